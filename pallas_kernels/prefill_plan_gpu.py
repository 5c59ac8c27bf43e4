"""The Mosaic GPU prefill kernel's work list: tiles of query tokens in the order in which blocks of threads take them.

A *unit* is one KV head of one tile of query tokens. The list goes by rows, the longest first; within a row by sections
of so many KV heads that their K and V fit into the L2 cache; within a section from the last tile, which sees the most,
to the first, all heads of each:

    row 2                                         | row 0
    heads 0, 1: tile 2, 2, 1, 1, 0, 0 | heads 2, 3: ... | heads 0, 1, 2, 3: tile 1, 1, 1, 1, 0, 0, 0, 0

Blocks of threads take units one by one as they become free, so the list needs no balance of its own: it ends in short
units, which even out what the long ones left.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from .indices_gpu import arange, ceil_div, div, rem, take
from .metadata import PagedMetadata

# Fields of a record, which is one unit.
HEAD, TOKEN, NUM_TOKENS, POSITION, ROW, KV_START, NUM_BLOCKS, LAST_PAGE, KV_LEN, NUM_UNITS = range(10)
RECORD = 16  # int32 values of a record: 64 bytes, two sectors


def num_units(num_rows: int, num_tokens: int, num_kv_heads: int, tokens: int) -> int:
    """Static length of a work list: the most units that rows of `num_tokens` tokens in all can have.

    Example:
      >>> num_units(num_rows=2, num_tokens=100, num_kv_heads=8, tokens=32)
      40
    """
    # A row of q tokens has ceil(q / tokens) tiles, at most q / tokens + 1 - 1 / tokens.
    return (
        (num_tokens // tokens + min(num_rows, num_tokens)) * num_kv_heads if tokens > 1 else num_tokens * num_kv_heads
    )


def most_pages(tokens: int, page_size: int) -> int:
    """The most pages that a block of so many tokens lies in; blocks begin at multiples of `tokens`.

    Example:
      >>> most_pages(128, 16), most_pages(128, 24), most_pages(64, 256)
      (8, 6, 1)
    """
    return -(-(tokens + page_size - math.gcd(tokens, page_size)) // page_size)


def rows_to_split(
    meta: PagedMetadata,
    q_lens: Int32[Array, " S"],
    *,
    num_kv_heads: int,
    tokens: int,
    split_tokens: int,
    sliding_window: int | None,
    block_kv: int,
    multiprocessors: int,
) -> Bool[Array, " S"]:
    """Rows that the decode kernel should run instead, which splits a row over the KV: short chunks of long rows.

    A unit is not split, so the launch takes as long as its longest one. If that is more than twice an even share of all
    blocks, and the decode kernel's tiles of all such rows are half as many as there are multiprocessors to share them,
    the whole chip reads what a few multiprocessors would have.

    Args:
      q_lens: query tokens of the rows; 0 for those that are not to be listed.
      tokens, split_tokens: query tokens of a tile of this kernel, and of the decode kernel.
    """
    seen = meta.kv_lens
    if sliding_window is not None:
        seen = jnp.minimum(seen, sliding_window + q_lens)
    blocks = jnp.where(q_lens > 0, ceil_div(seen, block_kv), 0).astype(jnp.float32)  # products may pass int32
    units, split_units = ((num_kv_heads * ceil_div(q_lens, n)).astype(jnp.float32) for n in (tokens, split_tokens))
    long = blocks * multiprocessors > 2 * jnp.sum(units * blocks)
    cost = jnp.sum(jnp.where(long, split_units * blocks, 0.0))
    return long & (2 * cost <= multiprocessors * jnp.max(blocks))


def make_prefill_list(
    meta: PagedMetadata,
    q_lens: Int32[Array, " S"],
    *,
    page_size: int,
    num_kv_heads: int,
    tokens: int,
    sliding_window: int | None,
    block_kv: int,
    section_tokens: int,
) -> Int32[Array, "U F"]:
    """Lists the units of a step.

    Args:
      q_lens: query tokens of the rows; 0 for padding and for rows that are not to be listed.
      tokens: query tokens of a tile.
      block_kv: KV tokens of a block.
      section_tokens: KV tokens, of one head each, that a section may have; it has one head at least.

    Returns:
      i32 records. HEAD, ROW; TOKEN, NUM_TOKENS, POSITION: the tile's first token in the step, its tokens, the first
      one's position. KV_START: first KV token that the unit reads, a multiple of block_kv. NUM_BLOCKS: the blocks that
      it reads. LAST_PAGE: the last column of the page table that it needs. KV_LEN: the row's KV tokens. NUM_UNITS: of
      the list, in each record; records from there on are not units.
    """
    num_rows = meta.kv_lens.shape[0]
    capacity = num_units(num_rows, meta.positions.shape[0], num_kv_heads, tokens)
    rows, units = (arange(n) for n in (num_rows, capacity))

    # Rows, the longest first; a row's rank is how many come before it.
    length = jnp.where(q_lens > 0, meta.kv_lens, -1)
    before = (length[None, :] > length[:, None]) | ((length[None, :] == length[:, None]) & (rows[None] < rows[:, None]))
    rank = jnp.sum(before, axis=1, dtype=jnp.int32)
    by_rank = jnp.sum(jnp.where(rank[None, :] == rows[:, None], rows[None], 0), axis=1, dtype=jnp.int32)

    tiles = ceil_div(take(q_lens, by_rank), tokens)
    ends = jnp.cumsum(tiles * num_kv_heads, dtype=jnp.int32)
    nth = jnp.minimum(jnp.sum(ends[None, :] <= units[:, None], axis=1, dtype=jnp.int32), num_rows - 1)
    row = take(by_rank, nth)
    row_q_len, row_kv_len = take(q_lens, row), take(meta.kv_lens, row)
    live = units < ends[-1]
    row_tiles = jnp.maximum(take(tiles, nth), 1)
    within = units - take(ends - tiles * num_kv_heads, nth)
    together = jnp.clip(div(jnp.int32(section_tokens), jnp.maximum(row_kv_len, 1)), 1, num_kv_heads)
    first_head = jnp.minimum(div(within, together * row_tiles) * together, num_kv_heads - 1)
    heads = jnp.minimum(together, num_kv_heads - first_head)  # of this section
    within -= first_head * row_tiles
    head = jnp.where(live, first_head + rem(within, heads), 0)
    offset = jnp.where(live, row_tiles - 1 - div(within, heads), 0) * tokens
    count = jnp.where(live, jnp.minimum(row_q_len - offset, tokens), 0)
    position = row_kv_len - row_q_len + offset
    stop = position + count
    start = jnp.zeros_like(stop)
    if sliding_window is not None:
        start = div(jnp.maximum(position - (sliding_window - 1), 0), block_kv) * block_kv
    fields = {
        HEAD: head,
        TOKEN: take(meta.cu_q_lens, row) + offset,
        NUM_TOKENS: count,
        POSITION: position,
        ROW: row,
        KV_START: start,
        NUM_BLOCKS: jnp.where(live, ceil_div(stop - start, block_kv), 0),
        # No column outside of the table is read, whatever the lengths say.
        LAST_PAGE: jnp.clip(div(stop - 1, page_size), 0, meta.page_table.shape[1] - 1),
        KV_LEN: row_kv_len,
        NUM_UNITS: jnp.broadcast_to(ends[-1], units.shape),
    }
    zero = jnp.zeros_like(units)
    return lax.concatenate([fields.get(i, zero)[:, None] for i in range(RECORD)], 1)
