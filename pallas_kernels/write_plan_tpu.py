"""The work list of the TPU kernel that writes K and V: runs of tokens in blocks of pages, listed once a step."""

import math
from dataclasses import dataclass, field
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from .metadata import PagedMetadata
from .pages import PageSpec
from .tpu_tuning import sublanes

# Fields of an item, each an array of the list's length. GROUPS groups of rows of page PAGE are written, from row FIRST
# on; of these rows [LO, HI), counted from FIRST, are new. Row SOURCE of the tile of new rows belongs to row FIRST. The
# scales of the item's block begin at lane LANE of the page.
PAGE, FIRST, GROUPS, LO, HI, SOURCE, LANE = range(7)
NUM_FIELDS = 7

_TILE_BYTES = 2 << 20  # of new rows, 32 bits a value: two such tiles are in vector memory
_BLOCK_BYTES = 64 << 10
_RING_BYTES = 2 << 20
_MAX_BUFFERS = 32


@dataclass(frozen=True)
class WriteBlocks:
    """Static sizes.

    Attributes:
      merges: whether tiles are read and written back; else a token's rows are whole tiles.
      slots: token slots of a block, which divide a page. An item lies in one block.
      rows: rows of a block.
      group: rows that are merged at once, whole tiles; a DMA moves whole groups.
      lanes: lanes of a block's scales: `rows`, or a whole page's.
      buffers: blocks in flight, a power of two; half of them being read.
      tile_tokens: tokens of a tile of new rows.
      margin, tile_rows: in a tile, rows before the first token's; and rows in all.
      lane_margin, tile_lanes: the same of the tile's scales.
    """

    merges: bool
    slots: int
    rows: int
    group: int
    lanes: int
    buffers: int
    tile_tokens: int
    margin: int
    tile_rows: int
    lane_margin: int
    tile_lanes: int

    @property
    def num_groups(self) -> int:
        """Groups of a block."""
        return self.rows // self.group


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def choose_write_blocks(spec: PageSpec, num_tokens: int) -> WriteBlocks:
    """Picks the sizes: blocks of some 64 KiB, as many in flight as a DMA's latency asks for.

    Example:
      >>> spec = PageSpec(64, page_size=128, num_kv_heads=3, head_dim=64, dtype="bfloat16", implementation="mosaic_tpu")
      >>> blocks = choose_write_blocks(spec, num_tokens=32)
      >>> blocks.slots, blocks.rows, blocks.group, blocks.buffers
      (64, 192, 16, 32)
    """
    heads, page_rows = spec.num_kv_heads, spec.page_size * spec.num_kv_heads
    if not spec.quantized and heads % 8 == 0:
        return WriteBlocks(False, spec.page_size, page_rows, 8, 0, 1, num_tokens, 0, num_tokens * heads, 0, 0)
    group = sublanes(spec.dtype.itemsize)  # a tile has 8 rows of 32 bits: so many tiled rows, and vector memory's tiles
    slots = spec.page_size
    if page_rows % group:
        group = page_rows  # the last tile of a page is not whole, so only whole pages can move
    else:
        unit = math.lcm(group, 128) if spec.quantized else group
        fits = [n for n in range(1, slots + 1) if slots % n == 0 and n * heads % unit == 0]
        row_bytes = 2 * spec.head_dim * spec.dtype.itemsize
        slots = max([n for n in fits if n * heads * row_bytes <= _BLOCK_BYTES], default=min(fits, default=slots))
    rows = slots * heads
    lanes = 0
    if spec.quantized:
        lanes = spec.scales_by_row_shape[-1] if slots == spec.page_size else rows
    block_bytes = rows * 2 * spec.head_dim * spec.dtype.itemsize + 8 * lanes
    buffers = min(max(2, 1 << (_RING_BYTES // block_bytes).bit_length() >> 1), _MAX_BUFFERS)
    tile_tokens = min(num_tokens, max(8, _TILE_BYTES // (heads * 2 * spec.head_dim * 4) // 8 * 8))
    margin = _round_up(group, 8)
    return WriteBlocks(
        merges=True,
        slots=slots,
        rows=rows,
        group=group,
        lanes=lanes,
        buffers=buffers,
        tile_tokens=tile_tokens,
        margin=margin,
        tile_rows=_round_up(tile_tokens * heads + 2 * margin, 8),
        lane_margin=lanes,
        tile_lanes=_round_up(tile_tokens * heads + 2 * lanes + 128, 128),
    )


@jax.tree_util.register_dataclass
@no_type_check  # trees are also made of placeholders, which have no shape
@dataclass(frozen=True)
class WriteWork:
    """The work list. It depends on the pages' spec; layers whose specs agree share one.

    Attributes:
      items: field after field (PAGE, FIRST, GROUPS, LO, HI, SOURCE, LANE), each as long as the capacity.
      bounds: the first item of each tile of new rows, the end of the last tile's, and the new rows of all items.
      blocks: static.
    """

    items: Int32[Array, " F"]
    bounds: Int32[Array, " B"]
    blocks: WriteBlocks = field(metadata={"static": True})


def plan_write(meta: PagedMetadata, spec: PageSpec) -> WriteWork:
    """Lists the items of a step; all sizes are static, all counts are data.

    It reads `slot_mapping` alone and relies on this: tokens of a row stand side by side, in the order of their slots,
    and rows do not share a page that is written. Tokens of the null page and outside the pool are left out.
    """
    num_tokens, heads = meta.slot_mapping.shape[0], spec.num_kv_heads
    blocks = choose_write_blocks(spec, num_tokens)
    num_tiles = -(-num_tokens // blocks.tile_tokens)
    # A row of q tokens meets at most q // slots + 2 blocks.
    num_rows = min(meta.kv_lens.shape[0], num_tokens)
    capacity = min(num_tokens, num_tokens // blocks.slots + 2 * num_rows + num_tiles - 1)

    slots, token = meta.slot_mapping, jnp.arange(num_tokens, dtype=jnp.int32)
    live = (slots >= spec.page_size) & (slots < spec.num_pages * spec.page_size)
    follows = (slots[1:] == slots[:-1] + 1) & live[:-1] & (slots[1:] % blocks.slots != 0)
    begins = live & ~(jnp.pad(follows, (1, 0)) & (token % blocks.tile_tokens != 0))
    last_item = jnp.cumsum(begins, dtype=jnp.int32) - 1  # the newest item at each token

    # Compared with all tokens at once: quicker than a sort or a scatter on TPU.
    item = jnp.arange(capacity, dtype=jnp.int32)[:, None]
    starts = jnp.minimum(jnp.sum(last_item < item, axis=1, dtype=jnp.int32), num_tokens - 1)
    counts = jnp.sum((last_item == item) & live, axis=1, dtype=jnp.int32)
    slot = slots[starts]
    row = slot % spec.page_size * heads
    first = row - row % (blocks.group if blocks.merges else heads)
    lo = row - first
    hi = lo + counts * heads
    source = starts % blocks.tile_tokens * heads + blocks.margin - lo
    fields = [slot // spec.page_size, first, -(-hi // blocks.group), lo, hi, source, row - row % blocks.rows]

    tiles = jnp.arange(1, num_tiles + 1, dtype=jnp.int32) * blocks.tile_tokens - 1
    ends = last_item[jnp.minimum(tiles, num_tokens - 1)] + 1
    num_new_rows = jnp.sum(live, dtype=jnp.int32) * heads
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), ends, num_new_rows[None]])
    return WriteWork(items=jnp.concatenate(fields), bounds=bounds, blocks=blocks)
