"""The Mosaic TPU kernel's work list: what each core walks through, in order.

A *decode item* is a row with one query token; a *prefill item* is a tile of query tokens of a longer row. An item meets
the KV blocks [first, end) of its row; the kernel walks the blocks of all items as one line, so that the next item's
first block is on its way while the last one of this item is computed:

    items    |---- 0 ----|-- 1 --|- 2 -|------------ 3 ------------|
    blocks   | 0 | 1 | 2 | 0 | 1 | 0 | | 0 | 1 | 2 | 3 | 4 | 5 | 6 |
"""

from dataclasses import dataclass, field
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from .metadata import PagedMetadata
from .tpu_tuning import TABLE_CHUNK, TPUBlocks
from .write_plan_tpu import WriteWork

# Fields of an item, each an array of the list's length.
ROW, TOKEN, COUNT, POSITION, FIRST, END = range(6)
NUM_FIELDS = 6
_NEVER = 1 << 30  # blocks of an item that is not live: whoever looks ahead stays on it


@jax.tree_util.register_dataclass
@no_type_check  # trees are also made of placeholders, which have no shape
@dataclass(frozen=True)
class TPUWork:
    """What a step's metadata holds for the Mosaic TPU kernel.

    The items also depend on a layer's window (`make_items`); layers that agree in it make equal ones, of which XLA
    keeps one.

    Attributes:
      q_lens: query tokens of each row, 0 for padding.
      page_table: the page table in runs of 128 ids, row after row. It stays in HBM: as scalars, 256 rows of 2,048 pages
        would take twice the memory that there is.
      write: what `write_kv` walks through.
      blocks: static.
    """

    q_lens: Int32[Array, " S"]
    page_table: Int32[Array, "C 1 128"]
    write: WriteWork
    blocks: TPUBlocks = field(metadata={"static": True})


def plan_tpu(meta: PagedMetadata, write: WriteWork, blocks: TPUBlocks) -> TPUWork:
    """The part of the plan that all layers share."""
    live = jnp.arange(meta.kv_lens.shape[0], dtype=jnp.int32) < meta.num_seqs
    padding = -meta.page_table.shape[1] % TABLE_CHUNK
    table = jnp.pad(meta.page_table, ((0, 0), (0, padding)))
    return TPUWork(
        q_lens=jnp.where(live, meta.cu_q_lens[1:] - meta.cu_q_lens[:-1], 0),
        page_table=table.reshape(-1, 1, TABLE_CHUNK),
        write=write,
        blocks=blocks,
    )


def num_items(num_rows: int, num_tokens: int, block_q: int) -> tuple[int, int]:
    """Static capacity for decode items and for prefill items.

    A row of q tokens has ceil(q / block_q) tiles, less than q / block_q + 1, and only rows of 2 or more have any.
    """
    return min(num_rows, num_tokens), num_tokens // block_q + min(num_rows, num_tokens // 2)


def make_items(
    meta: PagedMetadata,
    q_lens: Int32[Array, " S"],
    blocks: TPUBlocks,
    *,
    page_size: int,
    sliding_window: int | None,
) -> tuple[Int32[Array, " F"], Int32[Array, " B"]]:
    """Lists the items, decode items first, and shares them out to the cores.

    Args:
      q_lens: query tokens of each row, 0 for padding.

    Returns:
      items: i32, field after field (ROW, TOKEN, COUNT, POSITION, FIRST, END), each as long as the capacity plus 1: an
        item that is not live has END beyond all blocks.
      bounds: i32 [2 * (cores + 1) + 2 * cores]: the first item of each core among decode items and the end of the last
        one's, the same for prefill items, then the blocks of each core in decode items, and in prefill items.
    """
    block_q, cores, block_kv = blocks.block_q, blocks.cores, blocks.pages * page_size
    num_rows, num_tokens = meta.kv_lens.shape[0], meta.positions.shape[0]
    decode_capacity, prefill_capacity = num_items(num_rows, num_tokens, block_q)

    is_decode = q_lens == 1
    num_decode = jnp.sum(is_decode, dtype=jnp.int32)
    order = jnp.argsort(jnp.logical_not(is_decode), stable=True).astype(jnp.int32)[:decode_capacity]
    decode = jnp.arange(decode_capacity, dtype=jnp.int32)

    tiles = jnp.arange(prefill_capacity, dtype=jnp.int32)
    row_tiles = jnp.where(q_lens > 1, -(-q_lens // block_q), 0)
    ends = jnp.cumsum(row_tiles, dtype=jnp.int32)
    tile_rows = jnp.minimum(jnp.sum(ends[None, :] <= tiles[:, None], axis=1, dtype=jnp.int32), num_rows - 1)
    tile_offsets = (tiles - (ends - row_tiles)[tile_rows]) * block_q

    row = jnp.concatenate([order, tile_rows])
    offset = jnp.concatenate([jnp.zeros_like(order), tile_offsets])
    live = jnp.concatenate([decode < num_decode, tiles < ends[-1]])
    count = jnp.where(live, jnp.minimum(q_lens[row] - offset, block_q), 0)
    position = meta.kv_lens[row] - q_lens[row] + offset
    first = jnp.zeros_like(position)
    if sliding_window is not None:
        first = jnp.maximum(position - (sliding_window - 1), 0) // block_kv
    end = -(-(position + count) // block_kv)
    num_blocks = jnp.where(live, end - first, 0)
    fields = {
        ROW: row,
        TOKEN: meta.cu_q_lens[row] + offset,
        COUNT: count,
        POSITION: position,
        FIRST: jnp.where(live, first, 0),
        END: jnp.where(live, end, _NEVER),
    }
    last = {END: _NEVER}
    items = jnp.concatenate([jnp.append(fields[f], jnp.int32(last.get(f, 0))) for f in range(NUM_FIELDS)])

    starts, totals = [], []
    for lo, hi, alive in ((0, decode_capacity, num_decode), (decode_capacity, live.shape[0], ends[-1])):
        line = jnp.cumsum(num_blocks[lo:hi], dtype=jnp.int32) if hi > lo else jnp.zeros(1, jnp.int32)
        # Core c begins with the first item that ends beyond its share of the blocks.
        shares = jnp.arange(cores + 1, dtype=jnp.int32) * -(-line[-1] // cores)
        begin = jnp.minimum(jnp.sum(line[None, :] <= shares[:, None], axis=1, dtype=jnp.int32), alive)
        done = jnp.where(begin > 0, line[jnp.maximum(begin - 1, 0)], 0)
        starts.append(begin + lo)
        totals.append(done[1:] - done[:-1])
    return items, jnp.concatenate([*starts, *totals])
