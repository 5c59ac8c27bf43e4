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

from dataclasses import dataclass, field
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from .indices_gpu import arange, ceil_div, div, take
from .metadata import PagedMetadata
from .pages import PageSpec
from .prefix_plan_gpu import SharedPrefixes, find_prefixes, levels, num_tiles, share_prefixes
from .tuning import NARROW_ROWS, TILE_ROWS, GPUBlocks
from .work_line_gpu import Cuts, Tiles, by_unit, cut_line
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
    capacity = _num_tiles(num_rows, num_tokens, tokens)
    own_records = num_workers + capacity * num_kv_heads
    sharing = None
    if prefixes is not None:
        sharing = share_prefixes(prefixes, members_of_a_tile(group), num_kv_heads, num_workers)
    parts = PartialRows(num_workers, tokens * group, group, 0 if sharing is None else num_rows, num_kv_heads)

    tiles = arange(capacity)
    row_tiles = ceil_div(q_lens, tokens)
    ends = jnp.cumsum(row_tiles, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(ends[None, :] <= tiles[:, None], axis=1, dtype=jnp.int32), num_rows - 1)
    row_q_len = take(q_lens, row)
    offset = (tiles - take(ends - row_tiles, row)) * tokens
    count = jnp.where(tiles < ends[-1], jnp.minimum(row_q_len - offset, tokens), 0)
    position = take(meta.kv_lens, row) - row_q_len + offset
    start = jnp.zeros_like(position)
    if sliding_window is not None:
        start = div(jnp.maximum(position - (sliding_window - 1), 0), block_kv) * block_kv
    if sharing is not None:
        start = take(sharing.blocks, row) * block_kv
    blocks = jnp.where(count > 0, ceil_div(position + count - start, block_kv), 0)
    own = Tiles(ends[-1], row, take(meta.cu_q_lens, row) + offset, count, position, start, blocks)
    total = jnp.sum(blocks, dtype=jnp.int32) * num_kv_heads
    busy = num_blocks * jnp.clip(ceil_div(total, num_blocks * full_share), 1, consumers)
    cuts = cut_line(own, busy, 1, num_kv_heads, num_workers)

    first_result = (2 * cuts.first_cut - 1) * parts.tile_rows
    if sharing is None:
        fields = {PIECES: cuts.pieces, FIRST_RESULT: first_result}
        return _records(meta, own, cuts, num_kv_heads, block_kv, num_workers, fields)

    # Shared units, and what becomes of the rows' own ones.
    of_group = sharing.tile_blocks
    first_member = own_records + num_workers + of_group.shape[0] * num_kv_heads
    shared = Tiles(
        num=sharing.num_tiles,
        row=sharing.tile_leader,
        token=first_member + sharing.tile_first,
        count=sharing.tile_members,
        position=of_group * block_kv - 1,
        start=jnp.zeros_like(of_group),
        blocks=of_group,
    )
    shared_cuts = cut_line(shared, num_workers, MIN_SHARED, num_kv_heads, num_workers)
    heads = arange(num_kv_heads)[None, :]
    shared_result = jnp.where(
        shared_cuts.pieces == 1,
        parts.whole_shared + (heads * num_rows + sharing.tile_first[:, None]).reshape(-1) * group,
        parts.shared + (2 * shared_cuts.first_cut - 1) * TILE_ROWS,
    )
    joins = by_unit(take(sharing.shares, row) & (count > 0), num_kv_heads)
    whole = parts.whole + (row[:, None] * num_kv_heads + heads).reshape(-1) * group
    joined = jnp.where(joins, (take(sharing.tile, row)[:, None] * num_kv_heads + heads).reshape(-1), 0)
    place = by_unit(take(sharing.place, row) * group, num_kv_heads)
    shared_pieces = jnp.where(joins, take(shared_cuts.pieces, joined), 0)
    fields = {
        PIECES: cuts.pieces + shared_pieces,
        FIRST_RESULT: jnp.where(joins & (cuts.pieces == 1), whole, first_result),
        SHARED_PIECES: shared_pieces,
        SHARED_RESULT: jnp.where(joins, take(shared_result, joined) + place, 0),
    }
    own_tile = take(ends - row_tiles, sharing.row)
    members = {
        TOKEN: take(meta.cu_q_lens, sharing.row),
        ROW: sharing.row,
        FOLLOWING: num_workers + own_tile * num_kv_heads,
    }
    return lax.concatenate(
        [
            _records(meta, own, cuts, num_kv_heads, block_kv, num_workers, fields),
            _records(
                meta,
                shared,
                shared_cuts,
                num_kv_heads,
                block_kv,
                own_records + num_workers,
                {PIECES: shared_cuts.pieces, FIRST_RESULT: shared_result},
            ),
            _stack(members, num_rows),
        ],
        0,
    )


def _records(
    meta: PagedMetadata,
    tiles: Tiles,
    cuts: Cuts,
    num_kv_heads: int,
    block_kv: int,
    first_unit: int,
    of_units: dict[int, Array],
) -> Int32[Array, "R F"]:
    """The records of the workers, then of the units of a line; the latter's records begin at `first_unit`."""

    num_tiles = tiles.row.shape[0]
    of_tiles = {
        HEAD: jnp.zeros_like(tiles.row),
        TOKEN: tiles.token,
        NUM_TOKENS: tiles.count,
        POSITION: tiles.position,
        ROW: tiles.row,
        KV_START: tiles.start,
    }
    fields = {which: by_unit(x, num_kv_heads) for which, x in of_tiles.items()} | {
        HEAD: jnp.broadcast_to(arange(num_kv_heads)[None, :], (num_tiles, num_kv_heads)).reshape(-1),
        NUM_BLOCKS: cuts.unit_blocks,
        FIRST_WORKER: cuts.first_cut - 1,
        LIVE_TOKENS: jnp.broadcast_to(meta.cu_q_lens[-1], cuts.pieces.shape),
        **of_units,
    }
    # Kept from being made once more inside of the gather: that would be the largest program of the step.
    units = lax.optimization_barrier(_stack(fields, cuts.pieces.shape[0]))
    workers = {
        KV_START: cuts.begin * block_kv,
        NUM_BLOCKS: cuts.first_blocks,
        COUNT: cuts.count,
        FOLLOWING: first_unit + cuts.unit + 1,
    }
    kept = jnp.asarray([field not in (NUM_BLOCKS, COUNT, FOLLOWING) for field in range(RECORD)])
    firsts = jnp.where(kept, take(units, cuts.unit), 0) + _stack(workers, cuts.unit.shape[0])
    return lax.concatenate([firsts, units], 0)


def _stack(fields: dict[int, Array], length: int) -> Int32[Array, "R F"]:
    """Records of these fields, and 0 in the others."""
    zero = jnp.zeros(length, jnp.int32)
    return jnp.stack([fields.get(i, zero) for i in range(RECORD)], axis=1)
