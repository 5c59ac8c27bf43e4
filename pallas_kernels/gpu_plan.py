"""The Mosaic GPU kernel's work list: equal shares of the KV blocks of a step for each worker, whatever the rows' mix.

A *unit* is one KV head of one tile of query tokens; its work is the KV blocks that the tile sees. Laid end to end, all
units of a step form one line of blocks, cut into equal shares; a worker (one consumer warpgroup) walks its share:

    units     |--- 0 ---|--- 1 ---|- 2 -|------------- 3 -------------|-- 4 --|
    workers   |.... 0 ....|.... 1 ....|.... 2 ....|.... 3 ....|.... 4 ....|..5|

A unit that a cut meets is computed in pieces, whose results are joined by their log-sum-exps. So the balance follows
the work and not the batch: one long row alone fills the chip, and a row among many is hardly ever cut.

Rows that share a prefix (`prefix_plan_gpu`) have units of it in common, whose query tokens are those of several rows.
The rows' own units begin where the prefix ends, and their results are joined with those of the shared unit. Shared
units are a line of their own, cut for the same workers, who walk their part of it first: so a prefix is done early, and
nearly all rows are joined by those who end their own units.

Reference:
  Osama et al., Stream-K, https://arxiv.org/abs/2301.03598, which cuts matrix products in the same way.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from .indices_gpu import arange, ceil_div, div, pad, reduce_rows, take
from .metadata import PagedMetadata
from .pages import PageSpec
from .prefix_plan_gpu import (
    Groups,
    SharedPrefixes,
    find_prefixes,
    levels,
    num_tiles,
    share_prefixes,
    step_pays,
    sums_of_groups,
    unread_blocks,
)
from .tuning import NARROW_ROWS, TILE_ROWS, GPUBlocks
from .work_line_gpu import At, Line, Run, Shares, Tile, align_units, begin_shares, cut_share, cut_units, list_tiles
from .xla_plan import XLAWork

# Fields of a record, which is one piece of a unit.
HEAD, TOKEN, NUM_TOKENS, POSITION, ROW, KV_START, NUM_BLOCKS = range(7)
PIECES, FIRST_WORKER, FIRST_RESULT, SHARED_PIECES, SHARED_RESULT = range(7, 12)
FOLLOWING, COUNT, LIVE_TOKENS = range(12, 15)
RECORD = 16  # int32 values of a record: 64 bytes, two sectors
MIN_SHARED = 8  # blocks of a piece of a shared unit, at least: it takes as long to begin and end one


@dataclass(frozen=True)
class PartialRows:
    """Where the results of pieces lie: rows of one array, by kind of piece; all static.

    Attributes:
      workers: of the launch. Each leaves at most two pieces of units that are cut: of the one that it goes on with, and
        of the one that it begins last.
      tile_rows: query rows of a tile.
      group: query heads of a KV head.
      num_rows, num_kv_heads: of the step; no rows if none may share a prefix.
    """

    workers: int
    tile_rows: int
    group: int
    num_rows: int
    num_kv_heads: int

    @property
    def whole(self) -> int:
        """Where whole units begin of rows that share a prefix: by row, KV head and query head of it."""
        return 2 * self.workers * self.tile_rows

    @property
    def shared(self) -> int:
        """Where the pieces of shared units begin, of `TILE_ROWS` rows each."""
        return self.whole + self.num_rows * self.num_kv_heads * self.group

    @property
    def whole_shared(self) -> int:
        """Where whole shared units begin: by KV head, member and query head."""
        return self.shared + (2 * self.workers * TILE_ROWS if self.num_rows else 0)

    @property
    def total(self) -> int:
        """Rows of the array."""
        return self.whole_shared + self.num_rows * self.num_kv_heads * self.group


class WorkLists(NamedTuple):
    """The work lists of a layer: `make_work_list`'s; that of `prefill_plan_gpu` or `None`; `find_first_pages`'s."""

    records: Array
    prefill_records: Array | None
    first_pages: Array


@jax.tree_util.register_dataclass
@no_type_check  # trees are also made of placeholders, which have no shape
@dataclass(frozen=True)
class GPUWork:
    """What a step's metadata holds for the Mosaic GPU kernel: live rows only.

    The lists also depend on a layer's heads and window. Those of layers that were announced to `plan_attention` are
    here; others are made when the layer attends, in each layer anew: XLA keeps one of equal ones, but must find them.

    Attributes:
      q_lens: query tokens of each row, 0 for padding.
      page_table: the metadata's, with no id outside of the pool.
      prefixes: the rows that have a prefix in common; `None` if no rows of a step of this shape can.
      counters: zeros, one a worker, and one a row and KV head if rows may share prefixes; a call counts finished pieces
        in them and leaves them zero.
      xla: the schedule of the XLA implementation, for layers that ask for it; what no layer uses, XLA drops.
      blocks: static.
      pages: static; number, size, head_dim and bytes of a value of the pages that it was made for.
      lists: by `lists_key`.
    """

    q_lens: Int32[Array, " S"]
    page_table: Int32[Array, "S P"]
    prefixes: SharedPrefixes | None
    counters: Int32[Array, " W"]
    xla: XLAWork
    blocks: GPUBlocks = field(metadata={"static": True})
    pages: tuple[int, int, int, int] = field(metadata={"static": True})
    lists: dict[tuple[int, int, int], WorkLists] = field(default_factory=dict)

    def check(self, spec: PageSpec) -> None:
        """Raises ValueError if it was not made for such pages."""
        if self.pages != pages_of(spec):
            raise ValueError(
                f"meta.work was made for pages of (number, size, head_dim, bytes of a value) {self.pages}, expected "
                f"{pages_of(spec)}; call plan_attention with the spec of these pages"
            )


def lists_key(num_heads: int, num_kv_heads: int, sliding_window: int | None) -> tuple[int, int, int]:
    """What of a layer its lists depend on; 0 for no window, as keys of a tree are sorted."""
    return num_heads, num_kv_heads, sliding_window or 0


def pages_of(spec: PageSpec) -> tuple[int, int, int, int]:
    """What of the pages a plan depends on."""
    return spec.num_pages, spec.page_size, spec.head_dim, spec.dtype.itemsize


def plan_gpu(meta: PagedMetadata, xla: XLAWork, spec: PageSpec, blocks: GPUBlocks) -> GPUWork:
    """The part of the plan that all layers share."""
    num_rows, columns = meta.page_table.shape
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    q_lens = jnp.where(rows < meta.num_seqs, meta.cu_q_lens[1:] - meta.cu_q_lens[:-1], 0)
    # A table that is computed has a buffer of its own. A slice of the step's packed metadata would be handed to the
    # kernel where it lies, and Mosaic GPU refuses what is not aligned to 256 bytes.
    page_table = jnp.clip(meta.page_table, 0, spec.num_pages - 1)
    prefixes = None
    if num_rows > 1 and levels(columns, spec.page_size, blocks.block_kv) and not spec.quantized:
        sharing = (q_lens == 1) & (rows < meta.num_decode)
        prefixes = find_prefixes(page_table, meta.kv_lens, sharing, page_size=spec.page_size, block_kv=blocks.block_kv)
    return GPUWork(
        q_lens=q_lens,
        page_table=page_table,
        prefixes=prefixes,
        counters=jnp.zeros(blocks.num_workers + (0 if prefixes is None else num_rows * spec.num_kv_heads), jnp.int32),
        xla=xla,
        blocks=blocks,
        pages=pages_of(spec),
    )


def tile_tokens(group: int, num_tokens: int, narrow: bool) -> int:
    """Query tokens of a tile, of `group` query heads each: as many as fill its rows, 8 if `narrow`, else 64."""
    return max(1, min((NARROW_ROWS if narrow else TILE_ROWS) // group, num_tokens))


def members_of_a_tile(group: int) -> int:
    """Rows of one query token that a shared unit's tile holds; none share if it holds one alone."""
    return TILE_ROWS // group


def may_share(
    num_counters: int, blocks: GPUBlocks, num_rows: int, num_kv_heads: int, group: int, sliding_window: int | None
) -> bool:
    """Whether rows of a layer may share a prefix: where the plan has counters for it, and a tile is of several rows.

    A window hides the prefix from some of its rows, or all.
    """
    enough = num_counters >= blocks.num_workers + num_rows * num_kv_heads
    return enough and sliding_window is None and members_of_a_tile(group) > 1


def num_records(
    num_rows: int, num_tokens: int, num_kv_heads: int, tokens: int, num_workers: int, *, sharing: bool = False
) -> int:
    """Static length of a work list: one record a worker, one for each possible unit, and those of shared prefixes."""
    units = _num_tiles(num_rows, num_tokens, tokens) * num_kv_heads
    return num_workers + units + (num_shared_records(num_rows, num_kv_heads, num_workers) if sharing else 0)


def num_shared_records(num_rows: int, num_kv_heads: int, num_workers: int) -> int:
    """How many records are of shared prefixes: one a worker, one for each possible unit, one a member."""
    return num_workers + num_tiles(num_rows) * num_kv_heads + num_rows


def _num_tiles(num_rows: int, num_tokens: int, tokens: int) -> int:
    # A row of q tokens has ceil(q / tokens) tiles, at most q / tokens + 1 - 1 / tokens.
    return num_tokens // tokens + min(num_rows, num_tokens) if tokens > 1 else num_tokens


def make_work_list(
    meta: PagedMetadata,
    q_lens: Int32[Array, " S"],
    prefixes: SharedPrefixes | None = None,
    *,
    num_kv_heads: int,
    group: int,
    tokens: int,
    sliding_window: int | None,
    block_kv: int,
    consumers: int,
    num_blocks: int,
    full_share: int,
) -> Int32[Array, "R F"]:
    """Cuts the step's work into one share a worker.

    Record w < num_workers is where worker w begins; it has COUNT pieces, and those after the first are the records from
    FOLLOWING on. Record num_workers + u is the first piece of unit u. Units are numbered tile by tile, heads inside.

    With `prefixes`, the same follows for shared units: worker w has COUNT pieces of them, which it walks before its
    others. Last is a record for each row that shares, by groups (a *member*): TOKEN, ROW, and FOLLOWING, where the
    records of its own unit begin, one a KV head.

    Args:
      q_lens: query tokens of the rows, 0 for padding.
      prefixes: rows that may share a prefix, of one query token; `None` if none may.
      group: query heads of a KV head.
      tokens: query tokens of a tile.
      block_kv: KV tokens of a block; pieces begin at its multiples.
      consumers, num_blocks: of the launch; worker w is consumer w // num_blocks of block w % num_blocks.
      full_share: where shares of so many blocks, or shorter ones, leave no work for some consumers, only as many
        consumers of each block of threads have work as are needed.

    Returns:
      i32 records. HEAD, ROW; TOKEN, NUM_TOKENS, POSITION: the tile's first token in the step, its tokens, the first
      one's position. KV_START: first KV token of the piece, a multiple of block_kv. NUM_BLOCKS: its blocks. PIECES: how
      many results are joined, of which the last SHARED_PIECES are those of a shared unit; the k-th of the others is
      worker FIRST_WORKER + k's. FIRST_RESULT, SHARED_RESULT: the row in `PartialRows` of the first of each kind; those
      of later pieces are in the place of the worker. LIVE_TOKENS: of the step.
      Of shared units ROW is some row of the group, TOKEN the record of the first member, NUM_TOKENS their number,
      POSITION the prefix' last token, and PIECES are the unit's own.
    """
    num_rows, num_tokens, num_workers = meta.kv_lens.shape[0], meta.positions.shape[0], consumers * num_blocks
    capacity, members = _num_tiles(num_rows, num_tokens, tokens), members_of_a_tile(group)
    length = max(capacity, num_rows)
    tiles = list_tiles(meta, q_lens, capacity, tokens, sliding_window, block_kv)

    # Where each tile ends on the line: as it is if no rows share, and if all do that may.
    here, there = arange(length)[:, None], arange(length)[None, :]
    blocks = pad(tiles.blocks, length)[None, :]
    if prefixes is None:
        sums = [jnp.where(there <= here, blocks, 0), jnp.where(there == here, blocks, 0), blocks]
        ends, blocks, total, longest = reduce_rows(sums, most=[blocks])
    else:
        prefix = prefixes.blocks(tiles.row)
        may = (unread_blocks(take(prefixes.size, tiles.row), prefix, members) > 0) & (tiles.count > 0)
        rest = blocks - pad(jnp.where(may, prefix, 0), length)[None, :]
        sums = [jnp.where(there <= here, blocks, 0), jnp.where(there == here, blocks, 0), blocks]
        sums += [jnp.where(there <= here, rest, 0), jnp.where(there == here, rest, 0), rest]
        group_sums, group_blocks = sums_of_groups(prefixes, members, length)
        reduced = reduce_rows([*sums, *group_sums], most=[blocks, rest, group_blocks])
        *in_groups, in_order, unread, shared_total, longest, longest_rest, longest_prefix = reduced[6:]
        pays = step_pays(unread, num_kv_heads, num_workers)
        ends, blocks, total, longest = (
            jnp.where(pays, x, y) for x, y in zip((*reduced[3:6], longest_rest), (*reduced[:3], longest), strict=True)
        )
        groups = share_prefixes(prefixes, in_groups, members, pays)
        shared_total = jnp.where(pays, shared_total, 0) * num_kv_heads
        shared_share = cut_share(shared_total, jnp.where(pays, longest_prefix, 0), num_workers, MIN_SHARED)
    total *= num_kv_heads
    busy = num_blocks * jnp.clip(ceil_div(total, num_blocks * full_share), 1, consumers)
    line = Line(blocks, ends, cut_share(total, longest, busy, 1))  # by tile, as all that follows
    if num_rows * num_kv_heads <= num_workers:  # else workers are hardly ever as many as units
        line = align_units(line, total, busy, num_kv_heads)
    starts, share = line.ends - line.blocks, line.share

    # Where on the lines workers begin, and of which groups shared tiles and their members are: how many end before.
    places = arange(max(num_workers + 1, length))[:, None]

    def ended(at: Array) -> Array:
        return (at[None, :] <= places).astype(jnp.int32)

    sums = [ended(ceil_div(line.ends * num_kv_heads, share))]
    if prefixes is not None:
        end = (groups.start + groups.tiles * groups.blocks) * num_kv_heads
        sums += [ended(ceil_div(end, shared_share)), ended(groups.first_tile + groups.tiles)]
        sums += [ended(groups.first_member + groups.size)]
    begins, *in_groups = reduce_rows(sums)

    parts = PartialRows(num_workers, tokens * group, group, 0 if prefixes is None else num_rows, num_kv_heads)
    joining = None
    if prefixes is not None:
        joining = _Joining(prefixes, groups, shared_share, members, group, parts)

    def own_unit(at: At, tile: Array, head: Array) -> _Unit:
        own, of_unit, own_share = tiles.at(at, tile), at(line.blocks), at(share)
        start = at(starts) * num_kv_heads + head * of_unit
        first_cut, pieces = cut_units(start, of_unit, own_share, num_workers)
        fields = {PIECES: pieces, FIRST_RESULT: (2 * first_cut - 1) * parts.tile_rows, KV_START: own.start}
        if joining is not None:
            fields = joining.fields(own, head, fields, block_kv)
        return _Unit(own, head, start, of_unit, at(blocks), own_share, first_cut, pieces, fields)

    beyond, tile = begins[: num_workers + 1] == length, jnp.minimum(begins[: num_workers + 1], capacity - 1)
    run = Run(take(starts, tile) * num_kv_heads, take(line.blocks, tile), tile, take(share, tile))
    shares = begin_shares(run, beyond, tiles.num * num_kv_heads, num_kv_heads, one_tile=True)
    listed = _records(meta, shares, own_unit, capacity, num_kv_heads, block_kv, num_workers)
    if joining is None or prefixes is None:
        return listed

    # Shared units, and their members.
    shared_capacity, first_shared = num_tiles(num_rows), listed.shape[0] + num_workers
    first_member = first_shared + shared_capacity * num_kv_heads
    of_cut, of_tile, of_member = (jnp.minimum(x, num_rows - 1) for x in in_groups)

    def shared_unit(at: At, tile: Array, head: Array) -> _Unit:
        leader = at(of_tile)
        of = groups.of(leader)
        nth, live = tile - of.first_tile, at(in_groups[1]) < length
        first, of_share = of.first_member + nth * members, take(shared_share, leader)
        start = (of.start + nth * of.blocks) * num_kv_heads + head * of.blocks
        first_cut, pieces = cut_units(start, of.blocks, of_share, num_workers)
        count = jnp.where(live, jnp.minimum(of.size - nth * members, members), 0)
        shared = Tile(leader, first_member + first, count, of.blocks * block_kv - 1, jnp.zeros_like(leader))
        result = joining.results(head, first_cut, pieces, first, 0)
        fields = {PIECES: pieces, FIRST_RESULT: result, KV_START: shared.start}
        return _Unit(shared, head, start, of.blocks, of.blocks, of_share, first_cut, pieces, fields)

    beyond, leader = in_groups[0][: num_workers + 1] == length, of_cut[: num_workers + 1]
    of = groups.of(leader)
    run = Run(of.start * num_kv_heads, of.blocks, of.first_tile, take(shared_share, leader))
    shares = begin_shares(run, beyond, (groups.first_tile[-1] + groups.tiles[-1]) * num_kv_heads, num_kv_heads)
    of_shared = _records(meta, shares, shared_unit, shared_capacity, num_kv_heads, block_kv, first_shared)
    leader, member = of_member[:num_rows], arange(num_rows)
    place = take(prefixes.place, leader) + member - take(groups.first_member, leader)
    row = take(in_order, jnp.clip(place, 0, num_rows - 1))  # some row, of those that are no members
    of_members = {
        TOKEN: take(meta.cu_q_lens, row),
        ROW: row,
        FOLLOWING: num_workers + take(tiles.first, row) * num_kv_heads,
    }
    return lax.concatenate([listed, of_shared, _stack(of_members, (num_rows,))], 0)


@dataclass(frozen=True)
class _Unit:
    """What records say of units: blocks of the line before them, their own, and fields of a kind of units.

    Attributes:
      blocks: of the line; the last ones of them may be empty.
      seen: those that are not.
      share: blocks of a worker.
      first_cut, pieces: as `cut_units` says.
    """

    tile: Tile
    head: Array
    start: Array
    blocks: Array
    seen: Array
    share: Array
    first_cut: Array
    pieces: Array
    fields: dict[int, Array]


@dataclass(frozen=True)
class _Joining:
    """How the results of units are joined with those of the shared units of their rows.

    Attributes:
      share: by leader; blocks of a worker on the line of shared units.
      members: rows that a tile of theirs holds.
      group: query heads of a KV head.
    """

    prefixes: SharedPrefixes
    groups: Groups
    share: Array
    members: int
    group: int
    parts: PartialRows

    def fields(self, tile: Tile, head: Array, alone: dict[int, Array], block_kv: int) -> dict[int, Array]:
        """Of units whose fields would be `alone`, if they did not share."""
        leader, num_kv_heads = take(self.prefixes.leader, tile.row), self.parts.num_kv_heads
        of, place = self.groups.of(leader), take(self.prefixes.place, tile.row)
        rank, shares = place - take(self.prefixes.place, leader), of.size > 0
        joins, nth = shares & (tile.count > 0), div(rank, self.members)
        start = (of.start + nth * of.blocks) * num_kv_heads + head * of.blocks
        first_cut, pieces = cut_units(start, of.blocks, take(self.share, leader), self.parts.workers)
        first = of.first_member + nth * self.members
        result = self.results(head, first_cut, pieces, first, rank - nth * self.members)
        whole = self.parts.whole + (tile.row * num_kv_heads + head) * self.group
        return {
            KV_START: jnp.where(shares, of.blocks * block_kv, 0),
            PIECES: alone[PIECES] + jnp.where(joins, pieces, 0),
            FIRST_RESULT: jnp.where(joins & (alone[PIECES] == 1), whole, alone[FIRST_RESULT]),
            SHARED_PIECES: jnp.where(joins, pieces, 0),
            SHARED_RESULT: jnp.where(joins, result, 0),
        }

    def results(self, head: Array, first_cut: Array, pieces: Array, first: Array, nth: Array | int) -> Array:
        """Where the first piece of a shared unit, of members from `first` on, leaves the results of the nth of them."""
        whole = self.parts.whole_shared + (head * self.parts.num_rows + first) * self.group
        return jnp.where(pieces == 1, whole, self.parts.shared + (2 * first_cut - 1) * TILE_ROWS) + nth * self.group


def _records(
    meta: PagedMetadata,
    shares: Shares,
    unit_at: Callable[[At, Array, Array], _Unit],
    capacity: int,
    num_kv_heads: int,
    block_kv: int,
    first_unit: int,
) -> Int32[Array, "R F"]:
    """The records of the workers, then of the units of a line; the latter's records begin at `first_unit`."""

    def fields_of(unit: _Unit, begin: Array | int, blocks: Array) -> dict[int, Array]:
        return unit.fields | {
            HEAD: unit.head,
            TOKEN: unit.tile.token,
            NUM_TOKENS: unit.tile.count,
            POSITION: unit.tile.position,
            ROW: unit.tile.row,
            KV_START: unit.fields[KV_START] + begin * block_kv,
            NUM_BLOCKS: blocks,
            FIRST_WORKER: unit.first_cut - 1,
            LIVE_TOKENS: meta.cu_q_lens[-1],
        }

    unit = unit_at(lambda x: x[:capacity, None], arange(capacity)[:, None], arange(num_kv_heads)[None, :])
    # A unit's first piece ends where the first worker begins behind its first block.
    blocks = jnp.where(unit.pieces > 1, unit.first_cut * unit.share - unit.start, unit.seen)
    of_units = _stack(fields_of(unit, 0, blocks), (capacity, num_kv_heads)).reshape(-1, RECORD)
    of_units = lax.optimization_barrier(of_units)  # kept from being made once more for the workers
    first = jnp.minimum(shares.tile * num_kv_heads + shares.head, of_units.shape[0] - 1)
    own = {
        KV_START: shares.begin * block_kv,
        NUM_BLOCKS: jnp.minimum(
            shares.blocks, take(unit.seen[:, 0], jnp.minimum(shares.tile, capacity - 1)) - shares.begin
        ),
        COUNT: shares.count,
        FOLLOWING: first_unit + first + 1,
    }
    kept = jnp.asarray([field != NUM_BLOCKS for field in range(RECORD)])
    of_workers = jnp.where(kept, take(of_units, first), 0) + _stack(own, first.shape)
    return lax.concatenate([of_workers, of_units], 0)


def _stack(fields: dict[int, Array], shape: tuple[int, ...]) -> Int32[Array, "*N F"]:
    """Records of these fields, and 0 in the others."""
    zero = jnp.zeros((), jnp.int32)
    return jnp.stack([jnp.broadcast_to(fields.get(i, zero), shape) for i in range(RECORD)], axis=-1)
