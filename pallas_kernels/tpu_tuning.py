"""Which shapes the Mosaic TPU kernel runs, and the sizes of its tiles: rules from the compiler's own schedules."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .compat import TPU
from .pages import PageSpec

LANES = 128  # of a vector register, and of a tile in memory
MIB = 1 << 20
_HEAD_DIMS = (64, 128, 256)
_PAGE_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")
# Bytes of a KV block, by generation. A block costs some 600 cycles however small it is, the latency of two products
# and a softmax; it must take the memory longer than that and its arithmetic. Generation 7 has the fastest memory.
_BLOCK_BYTES = {4: MIB // 2, 5: 2 * MIB, 6: 4 * MIB, 7: 8 * MIB}
_MAX_BLOCK_K = 512
_SHORT_Q = 32  # such a tile computes a block in about the time that the memory takes
TABLE_CHUNK = 128  # page ids of a run of the page table that one DMA brings to scalar memory


@dataclass(frozen=True)
class TPUBlocks:
    """Static choices of the kernel.

    Attributes:
      pages: pages of a KV block, a power of two, so that a run of 128 page ids holds whole blocks.
      buffers: KV blocks in the ring, of which one is computed while the others are on their way.
      block_q: query tokens of a prefill tile, a power of two.
      block_k: KV tokens that a prefill tile meets at once.
      cores: cores that share the work (2 on chips whose cores act as one device).
      short_q: query tokens of the tile for chunks that are no longer; 0 if there is no such tile.
    """

    pages: int
    buffers: int
    block_q: int
    block_k: int
    cores: int
    short_q: int = 0


def sublanes(itemsize: int) -> int:
    """Rows of a tile in memory: 8 of 32-bit values, and as many more as narrower ones are packed into a word.

    Example:
      >>> sublanes(4), sublanes(2), sublanes(1)
      (8, 16, 32)
    """
    return 32 // itemsize


def padded_bytes(buffers: Iterable[tuple[tuple[int, ...], Any]]) -> int:
    """Bytes that (shape, dtype) buffers take in vector memory, where the last two axes are whole tiles.

    Example:
      >>> padded_bytes([((2, 1, 100), np.dtype("float32"))])
      8192
    """
    total = 0
    for shape, dtype in buffers:
        itemsize = np.dtype(dtype).itemsize
        *major, rows, lanes = shape
        tile = sublanes(itemsize)
        total += math.prod(major) * -(-rows // tile) * tile * -(-lanes // LANES) * LANES * itemsize
    return total


def padded_heads(num_heads: int) -> int:
    """Query heads with those added that fill a tile of bf16."""
    return -(-num_heads // sublanes(2)) * sublanes(2)


def shape_objection(spec: PageSpec, num_heads: int | None = None, q_dtype: str | None = None) -> str | None:
    """Why the kernel cannot run on such pages, or on such queries of theirs; `None` if it can."""
    if spec.dtype.name not in _PAGE_DTYPES:
        return f"it reads {', '.join(_PAGE_DTYPES)} pages; these are {spec.dtype.name}"
    if spec.head_dim not in _HEAD_DIMS:
        return f"it takes a head_dim of {', '.join(map(str, _HEAD_DIMS))}; these pages have {spec.head_dim}"
    rows = spec.page_size * spec.num_kv_heads
    tile = LANES if spec.quantized else sublanes(spec.dtype.itemsize)  # scales are rows of lanes
    if spec.page_size % 8 or rows % tile:
        return (
            f"it takes a page_size that is a multiple of 8, with page_size * num_kv_heads a multiple of {tile} for "
            f"{spec.dtype.name}; these pages have {spec.page_size} and {rows}: use a page_size that is a multiple of "
            f"{max(8, tile // math.gcd(tile, spec.num_kv_heads))}"
        )
    if spec.page_size > _MAX_BLOCK_K:
        return f"it takes a page_size up to {_MAX_BLOCK_K}; these pages have {spec.page_size}"
    if num_heads is not None and num_heads > 8 * LANES:
        return f"it takes up to {8 * LANES} query heads; these are {num_heads}"
    if q_dtype is not None and q_dtype not in ("float32", "bfloat16"):
        return f"it takes float32 and bfloat16 queries; these are {q_dtype}"
    return None


def choose_tpu_blocks(spec: PageSpec, chip: TPU, num_tokens: int) -> TPUBlocks:
    """Picks the tiles, as large as is of use; `fit_tpu.fit` makes smaller what a chip has no room for.

    Example:
      >>> from .compat import TPU
      >>> spec = PageSpec(512, 64, 8, 128, "bfloat16", "mosaic_tpu")
      >>> choose_tpu_blocks(spec, TPU("TPU v6 lite", 6, 1, 128 * MIB), num_tokens=4096)
      TPUBlocks(pages=16, buffers=4, block_q=256, block_k=512, cores=1, short_q=32)
    """
    small = chip.vmem_bytes < 64 * MIB
    page_bytes = 2 * spec.head_dim * spec.dtype.itemsize * spec.page_size * spec.num_kv_heads
    pages = _power_of_two(max(1, _BLOCK_BYTES[chip.generation] // page_bytes))
    pages = min(pages, TABLE_CHUNK)
    block_q = 64 if small else 256 if chip.generation >= 6 else 128
    return TPUBlocks(
        pages=pages,
        buffers=3 if small or chip.generation >= 7 else 4,
        block_q=min(block_q, _power_of_two(2 * num_tokens - 1)),
        block_k=tile_kv(spec.page_size, pages),
        cores=chip.cores,
        short_q=_SHORT_Q,
    )


def tile_kv(page_size: int, pages: int) -> int:
    """KV tokens that a prefill tile meets at once: some of the block's pages, a power of two of them.

    Example:
      >>> tile_kv(64, pages=16), tile_kv(24, pages=32), tile_kv(256, pages=1)
      (512, 384, 256)
    """
    return page_size * min(pages, _power_of_two(_MAX_BLOCK_K // page_size))


def _power_of_two(n: int) -> int:
    """The largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)
