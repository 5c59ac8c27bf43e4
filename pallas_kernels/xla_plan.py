"""The XLA implementation's schedule: which rows and query blocks a step holds, made once and shared by all layers."""

from dataclasses import dataclass, field
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from .metadata import PagedMetadata


@dataclass(frozen=True)
class XLABlocks:
    """Static choices, tile sizes above all. One trip of a loop handles several rows or query blocks and one run of KV.

    Attributes:
      decode_rows: rows with one query token a trip.
      block_q: query tokens of a prefill item.
      prefill_items: prefill items a trip.
      decode_pages: pages of KV a trip, for decode rows.
      prefill_pages: pages of KV a trip, for prefill items.
      accelerator: whole pages are gathered and 16-bit factors stay so. Else (CPU) heads are gathered, and all is f32.
    """

    decode_rows: int
    block_q: int
    prefill_items: int
    decode_pages: int
    prefill_pages: int
    accelerator: bool


def choose_blocks(platform: str, page_size: int, num_tokens: int, num_rows: int) -> XLABlocks:
    """Picks the tile sizes by platform; a heuristic from measurements of SmolLM2's heads (9 over 3, of 64).

    On CPU a trip costs some 20 us however little it does, while gathered pages are read from a near cache only as long
    as a trip's are few: 4 rows of 64 tokens or one row of 128 are at the flat bottom between, and several prefill items
    a trip gain nothing. An accelerator waits longer for the host at each trip than it computes: large tiles.
    """
    if platform == "cpu":
        decode_rows, block_q, prefill_items, decode_tokens, prefill_tokens = 4, 64, 1, 64, 128
        if num_rows == 1:
            decode_tokens = 128
    else:
        decode_rows, block_q, prefill_items, decode_tokens, prefill_tokens = 64, 64, 16, 256, 256
    return XLABlocks(
        decode_rows=min(decode_rows, num_rows, num_tokens),
        block_q=min(block_q, num_tokens),
        prefill_items=prefill_items,
        decode_pages=max(1, decode_tokens // page_size),
        prefill_pages=max(1, prefill_tokens // page_size),
        accelerator=platform != "cpu",
    )


@jax.tree_util.register_dataclass
@no_type_check  # trees are also made of placeholders, which have no shape
@dataclass(frozen=True)
class XLAWork:
    """Rows with one query token, and (row, query block) items of the others.

    Attributes:
      decode_rows: row ids, those with one query token first and of these the longest first, so that the rows of a
        trip are of like lengths; padded to whole trips.
      num_decode_rows: how many of them are live.
      item_rows: row of each prefill item, in the order of their tokens; padded to whole trips.
      item_offsets: the item's first query token, counted within its row.
      num_items: how many of them are live.
      blocks: static.
    """

    decode_rows: Int32[Array, " R"]
    num_decode_rows: Int32[Array, ""]
    item_rows: Int32[Array, " I"]
    item_offsets: Int32[Array, " I"]
    num_items: Int32[Array, ""]
    blocks: XLABlocks = field(metadata={"static": True})


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def plan_xla(meta: PagedMetadata, page_size: int, platform: str) -> XLAWork:
    """Makes the work list from the rows' query lengths; all sizes are static, all counts are data.

    The split follows `q_lens` alone, so a row is computed alike whatever stands beside it.
    """
    num_rows, num_tokens = meta.kv_lens.shape[0], meta.positions.shape[0]
    blocks = choose_blocks(platform, page_size, num_tokens, num_rows)
    live = jnp.arange(num_rows, dtype=jnp.int32) < meta.num_seqs
    q_lens = jnp.where(live, meta.cu_q_lens[1:] - meta.cu_q_lens[:-1], 0)

    is_decode = q_lens == 1
    order = jnp.argsort(jnp.where(is_decode, -meta.kv_lens, 1)).astype(jnp.int32)
    padding = _round_up(num_rows, blocks.decode_rows) - num_rows

    # A row of q tokens has ceil(q / block_q) items, less than q / block_q + 1, and only rows of 2 or more have any.
    capacity = num_tokens // blocks.block_q + min(num_rows, num_tokens // 2)
    items = jnp.arange(max(blocks.prefill_items, _round_up(capacity, blocks.prefill_items)), dtype=jnp.int32)
    row_items = jnp.where(q_lens > 1, -(-q_lens // blocks.block_q), 0)
    ends = jnp.cumsum(row_items, dtype=jnp.int32)
    item_rows = jnp.sum(ends[None, :] <= items[:, None], axis=1, dtype=jnp.int32)
    item_rows = jnp.minimum(item_rows, num_rows - 1)
    return XLAWork(
        decode_rows=jnp.pad(order, (0, padding)),
        num_decode_rows=jnp.sum(is_decode, dtype=jnp.int32),
        item_rows=item_rows,
        item_offsets=(items - (ends - row_items)[item_rows]) * blocks.block_q,
        num_items=ends[-1],
        blocks=blocks,
    )
