"""The Mosaic GPU kernel's work list: equal shares of the KV blocks of a step for each worker, whatever the rows' mix.

A *unit* is one KV head of one tile of query tokens; its work is the KV blocks that the tile sees. Laid end to end, all
units of a step form one line of blocks, cut into equal shares; a worker (one consumer warpgroup) walks its share:

    units     |--- 0 ---|--- 1 ---|- 2 -|------------- 3 -------------|-- 4 --|
    workers   |.... 0 ....|.... 1 ....|.... 2 ....|.... 3 ....|.... 4 ....|..5|

A unit that a cut meets is computed in pieces, whose results are joined by their log-sum-exps. So the balance follows
the work and not the batch: one long row alone fills the chip, and a row among many is hardly ever cut.

Reference:
  Osama et al., Stream-K, https://arxiv.org/abs/2301.03598, which cuts matrix products in the same way.
"""

from dataclasses import dataclass, field
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from .metadata import PagedMetadata
from .pages import PageSpec
from .tuning import NARROW_ROWS, TILE_ROWS, GPUBlocks
from .xla_plan import XLAWork

# Fields of a record, which is one piece of a unit.
HEAD, TOKEN, NUM_TOKENS, POSITION, ROW, KV_START, NUM_BLOCKS, LAST_PAGE = range(8)
SLOT, PIECES, FIRST_WORKER, FOLLOWING, COUNT, LIVE_TOKENS = range(8, 14)
RECORD = 16  # int32 values of a record: 64 bytes, two sectors


@jax.tree_util.register_dataclass
@no_type_check  # trees are also made of placeholders, which have no shape
@dataclass(frozen=True)
class GPUWork:
    """What a step's metadata holds for the Mosaic GPU kernel: live rows only.

    The list itself also depends on a layer's query heads and window (`make_work_list`); layers that agree in them make
    equal ones, of which XLA keeps one.

    Attributes:
      q_lens: query tokens of each row, 0 for padding.
      page_table: the metadata's, with no id outside of the pool.
      counters: zeros, one a worker; a call counts finished pieces in them and leaves them zero.
      xla: the schedule of the XLA implementation, for layers that ask for it; what no layer uses, XLA drops.
      blocks: static.
      pages: static; number, size, head_dim and bytes of a value of the pages that it was made for.
    """

    q_lens: Int32[Array, " S"]
    page_table: Int32[Array, "S P"]
    counters: Int32[Array, " W"]
    xla: XLAWork
    blocks: GPUBlocks = field(metadata={"static": True})
    pages: tuple[int, int, int, int] = field(metadata={"static": True})

    def check(self, spec: PageSpec) -> None:
        """Raises ValueError if it was not made for such pages."""
        if self.pages != pages_of(spec):
            raise ValueError(
                f"meta.work was made for pages of (number, size, head_dim, bytes of a value) {self.pages}, expected "
                f"{pages_of(spec)}; call plan_attention with the spec of these pages"
            )


def pages_of(spec: PageSpec) -> tuple[int, int, int, int]:
    """What of the pages a plan depends on."""
    return spec.num_pages, spec.page_size, spec.head_dim, spec.dtype.itemsize


def plan_gpu(meta: PagedMetadata, xla: XLAWork, spec: PageSpec, blocks: GPUBlocks) -> GPUWork:
    """The part of the plan that all layers share."""
    live = jnp.arange(meta.kv_lens.shape[0], dtype=jnp.int32) < meta.num_seqs
    return GPUWork(
        q_lens=jnp.where(live, meta.cu_q_lens[1:] - meta.cu_q_lens[:-1], 0),
        # A table that is computed has a buffer of its own. A slice of the step's packed metadata would be handed to the
        # kernel where it lies, and Mosaic GPU refuses what is not aligned to 256 bytes.
        page_table=jnp.clip(meta.page_table, 0, spec.num_pages - 1),
        counters=jnp.zeros(blocks.num_workers, jnp.int32),
        xla=xla,
        blocks=blocks,
        pages=pages_of(spec),
    )


def tile_tokens(group: int, num_tokens: int, narrow: bool) -> int:
    """Query tokens of a tile, of `group` query heads each: as many as fill its rows, 8 if `narrow`, else 64."""
    return max(1, min((NARROW_ROWS if narrow else TILE_ROWS) // group, num_tokens))


def num_records(num_rows: int, num_tokens: int, num_kv_heads: int, tokens: int, num_workers: int) -> int:
    """Static length of a work list: one record a worker, then one for each unit that there can be."""
    return num_workers + _num_tiles(num_rows, num_tokens, tokens) * num_kv_heads


def _num_tiles(num_rows: int, num_tokens: int, tokens: int) -> int:
    # A row of q tokens has ceil(q / tokens) tiles, at most q / tokens + 1 - 1 / tokens.
    return num_tokens // tokens + min(num_rows, num_tokens) if tokens > 1 else num_tokens


def _round_share(share: Array, longest: Array) -> Array:
    """Rounds up to a multiple, or an even part, of the longest unit, if that is near.

    Then units of equal length are cut evenly or not at all, and a worker has one piece to hand over and not two. The
    workers that are left without work cost nothing as long as the others keep the memory busy.
    """
    multiple = -(-share // longest) * longest
    part = -(-longest // jnp.maximum(longest // share, 1))
    rounded = jnp.where(share >= longest, multiple, part)
    return jnp.where(rounded <= share + share // 6 + 1, rounded, share)


def make_work_list(
    meta: PagedMetadata,
    q_lens: Int32[Array, " S"],
    *,
    page_size: int,
    num_kv_heads: int,
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

    Args:
      q_lens: query tokens of the rows, 0 for padding.
      tokens: query tokens of a tile.
      block_kv: KV tokens of a block; pieces begin at its multiples.
      consumers, num_blocks: of the launch; worker w is consumer w // num_blocks of block w % num_blocks.
      full_share: where shares of so many blocks, or shorter ones, leave no work for some consumers, only as many
        consumers of each block of threads have work as are needed.

    Returns:
      i32 records. HEAD, ROW; TOKEN, NUM_TOKENS, POSITION: the tile's first token in the step, its tokens, the first
      one's position. KV_START: first KV token of the piece, a multiple of block_kv. NUM_BLOCKS: its blocks. LAST_PAGE:
      the last column of the page table that the unit needs. PIECES: how many the unit has; if more than one, this one
      writes to SLOT of the partial results, and the piece of FIRST_WORKER is the unit's first. The k-th piece is worker
      FIRST_WORKER + k's and its slot is twice that, plus 1 for the first piece. LIVE_TOKENS: of the step.
    """
    num_rows, num_tokens, num_workers = meta.kv_lens.shape[0], meta.positions.shape[0], consumers * num_blocks
    capacity = _num_tiles(num_rows, num_tokens, tokens)

    def arange(n: int) -> Array:
        return jnp.arange(n, dtype=jnp.int32)

    # Tiles.
    row_tiles = -(-q_lens // tokens)
    ends = jnp.cumsum(row_tiles, dtype=jnp.int32)
    num_tiles, tiles = ends[-1], arange(capacity)
    row = jnp.minimum(jnp.sum(ends[None, :] <= tiles[:, None], axis=1, dtype=jnp.int32), num_rows - 1)
    offset = (tiles - (ends - row_tiles)[row]) * tokens
    count = jnp.where(tiles < num_tiles, jnp.minimum(q_lens[row] - offset, tokens), 0)
    position = meta.kv_lens[row] - q_lens[row] + offset
    stop = position + count
    start = jnp.zeros_like(stop)
    if sliding_window is not None:
        start = jnp.maximum(position - (sliding_window - 1), 0) // block_kv * block_kv
    blocks = jnp.where(count > 0, -(-(stop - start) // block_kv), 0)

    # Cuts: worker w begins at w * share on the line of blocks, which is block `cut` of unit `at`.
    line = jnp.cumsum(blocks * num_kv_heads, dtype=jnp.int32)  # where each tile ends
    starts = line - blocks * num_kv_heads
    num_units = num_tiles * num_kv_heads
    busy = num_blocks * jnp.clip(-(-line[-1] // (num_blocks * full_share)), 1, consumers)
    share = _round_share(jnp.maximum(-(-line[-1] // busy), 1), jnp.maximum(jnp.max(blocks), 1))
    cuts = arange(num_workers + 1) * share
    tile = jnp.minimum(jnp.sum(line[None, :] <= cuts[:, None], axis=1, dtype=jnp.int32), capacity - 1)
    beyond = cuts >= line[-1]
    along = cuts - starts[tile]
    head = along // jnp.maximum(blocks[tile], 1)
    at = jnp.where(beyond, num_units, tile * num_kv_heads + head)
    cut = jnp.where(beyond, 0, along - head * blocks[tile])

    # Units, and the cuts inside of each.
    units = arange(capacity * num_kv_heads)
    unit_tile = units // num_kv_heads
    unit_start = starts[unit_tile] + (units - unit_tile * num_kv_heads) * blocks[unit_tile]
    first_cut = jnp.minimum(unit_start // share + 1, num_workers)
    pieces = 1 + jnp.maximum(-(-(unit_start + blocks[unit_tile]) // share) - first_cut, 0)
    unit_blocks = jnp.where(pieces > 1, cut[first_cut], blocks[unit_tile])

    def records(unit: Array, begin: Array, num_blocks: Array, slot: Array, following: Array, pieces_of: Array) -> Array:
        t = unit // num_kv_heads
        fields = {
            HEAD: unit - t * num_kv_heads,
            TOKEN: meta.cu_q_lens[row[t]] + offset[t],
            NUM_TOKENS: count[t],
            POSITION: position[t],
            ROW: row[t],
            KV_START: start[t] + begin * block_kv,
            NUM_BLOCKS: num_blocks,
            LAST_PAGE: jnp.maximum(stop[t] - 1, 0) // page_size,
            SLOT: slot,
            PIECES: pieces[unit],
            FIRST_WORKER: first_cut[unit] - 1,
            FOLLOWING: following,
            COUNT: pieces_of,
            LIVE_TOKENS: jnp.broadcast_to(meta.cu_q_lens[-1], unit.shape),
        }
        zero = jnp.zeros_like(unit)
        return jnp.stack([fields.get(i, zero) for i in range(RECORD)], axis=1)

    here, there, begin, end = at[:-1], at[1:], cut[:-1], cut[1:]
    unit = jnp.minimum(here, capacity * num_kv_heads - 1)
    first_blocks = jnp.where(here == there, end, blocks[unit // num_kv_heads]) - begin
    firsts = records(
        unit,
        begin,
        first_blocks,
        2 * arange(num_workers) + (begin == 0).astype(jnp.int32),
        num_workers + unit + 1,
        jnp.where(here < num_units, there - here + (end > 0).astype(jnp.int32), 0),
    )
    others = records(
        units, jnp.zeros_like(units), unit_blocks, 2 * (first_cut - 1) + 1, jnp.zeros_like(units), jnp.zeros_like(units)
    )
    return lax.concatenate([firsts, others], 0)
