"""Which shapes the Mosaic GPU kernel runs, and the sizes of its tiles: rules from measurements on one H200."""

import math
from dataclasses import dataclass

import jax.numpy as jnp

from .pages import QUANTIZED_DTYPES, PageSpec
from .tuned_blocks import tuned

HEAD_DIMS = (64, 96, 128, 256)  # those that were compared with the reference on a GPU
TILE_ROWS = 64  # rows of a matrix instruction: query tokens times query heads of a KV head
NARROW_ROWS = 8  # the fewest columns of one
_SHARED_MEMORY = 227 * 1024  # bytes a block of threads may have on Hopper
_BARRIERS_AND_SLACK = 1280
_MAX_STAGES = 8  # two groups of 8 barriers a consumer
_BLOCK_KV = 64
# Fewer pieces are joined sooner, but one consumer alone must keep up with the memory: with wide blocks of 16 bits it
# does, 8-bit blocks come twice as fast and take as long.
_FULL_SHARE, _FULL_SHARE_WIDE, _FULL_SHARE_8_BIT = 8, 20, 4
_WIDE = 128  # head_dim


@dataclass(frozen=True)
class GPUBlocks:
    """Static choices of the kernel.

    Attributes:
      block_kv: KV tokens of a tile in shared memory and of a matrix product.
      stages: tiles in a consumer's ring.
      consumers: computing warpgroups of a block of threads.
      num_blocks: blocks of threads, one a multiprocessor.
      full_share: KV blocks that keep a consumer busy: only steps of longer shares are cut for more than one consumer of
        a block of threads.
      swizzle: bytes of a row of the swizzled tiles.
    """

    block_kv: int
    stages: int
    consumers: int
    num_blocks: int
    full_share: int
    swizzle: int

    @property
    def num_workers(self) -> int:
        """Consumers of the whole launch."""
        return self.consumers * self.num_blocks


def shape_objection(
    spec: PageSpec, num_heads: int | None = None, q_dtype: str | None = None, num_tokens: int = 1
) -> str | None:
    """Why the kernel cannot run on such pages, or on such queries of theirs; `None` if it can.

    Example:
      >>> shape_objection(PageSpec(64, 16, 8, 128, "bfloat16"), 32, "bfloat16", num_tokens=1 << 19)
      'it takes queries of less than 2**31 values; these are 524288 x 32 x 128'
    """
    if spec.dtype.name not in ("bfloat16", "float16", *QUANTIZED_DTYPES):
        return f"it reads pages of bfloat16, float16, int8 and float8_e4m3fn; these are {spec.dtype.name}"
    if spec.head_dim not in HEAD_DIMS:
        return f"it takes a head_dim of {', '.join(map(str, HEAD_DIMS))}; these pages have {spec.head_dim}"
    if spec.page_size % 8:
        return f"it takes a page_size that is a multiple of 8; these pages have {spec.page_size}"
    if spec.quantized and spec.page_size * spec.num_kv_heads < 16:
        return "it takes pages with 16 scales of keys or more; these have 8, of one head"
    if num_heads is not None and num_heads > TILE_ROWS * spec.num_kv_heads:
        return f"it takes up to {TILE_ROWS} query heads a KV head; these are {num_heads} over {spec.num_kv_heads}"
    # Offsets are of 32 bits, but for K and V, which are copied by coordinates.
    if num_tokens * (num_heads or 1) * spec.head_dim >= 2**31:
        return f"it takes queries of less than 2**31 values; these are {num_tokens} x {num_heads} x {spec.head_dim}"
    if spec.scales_shape is not None and math.prod(spec.scales_shape) >= 2**31:
        return f"it takes pages with less than 2**31 scales; these have {math.prod(spec.scales_shape)}"
    if q_dtype is not None and spec.quantized and q_dtype not in ("bfloat16", "float16"):
        return f"it takes queries of bfloat16 and float16; these are {q_dtype}"
    if q_dtype is not None and not spec.quantized and jnp.dtype(q_dtype) != spec.dtype:
        return f"it takes queries of the pages' dtype, {spec.dtype.name}; these are {q_dtype}"
    return None


def scale_box(box: int, page_size: int) -> tuple[int, int]:
    """Scales of a box of `box` tokens in shared memory: floats, and where those of V begin.

    A copy must be a multiple of 128 bytes, so one of few tokens brings along some scales that nobody reads.
    """
    return (max(2 * box, 32), box) if box == page_size else (2 * max(box, 32), max(box, 32))


def fit_stages(head_dim: int, itemsize: int, page_size: int, consumers: int, rows: int, *, swapped: bool) -> int:
    """Tiles in a consumer's ring that fit shared memory.

    Args:
      itemsize: bytes of a value in the pages; of 1, they have scales.
      rows: query rows of a tile.
      swapped: whether they lie along N.
    """
    tile, own = 2 * _BLOCK_KV * head_dim * itemsize, rows * head_dim * 2
    if itemsize == 1:  # scales
        box = math.gcd(page_size, _BLOCK_KV)
        tile += _BLOCK_KV // box * scale_box(box, page_size)[0] * 4
    if swapped:  # weights of 16 bits, and 4 floats a row to find its maximum in
        own += rows * (2 * _BLOCK_KV + 4 * 4)
    return min((_SHARED_MEMORY - _BARRIERS_AND_SLACK - consumers * own) // (consumers * tile), _MAX_STAGES)


def choose_gpu_blocks(
    head_dim: int,
    multiprocessors: int,
    itemsize: int = 2,
    page_size: int = 16,
    *,
    narrow: bool = True,
    units: int = 0,
    group: int = 1,
) -> GPUBlocks:
    """The tiles of a step: those of the rules, or what the table of the GPU in use has instead (`tuned_blocks`).

    The table does not know of `group` and `page_size`: where its sizes do not fit shared memory with these, rules hold.

    Args:
      itemsize: bytes of a value in the pages.
      narrow: whether the step's shape is that of a decode step.
      units: KV heads times rows of the step, live or not.
      group: query heads of a KV head, the most of any layer, as far as they are known.
    """
    blocks = rule_gpu_blocks(head_dim, multiprocessors, itemsize, page_size, narrow=narrow, units=units, group=group)
    if not narrow:
        return blocks
    chosen = tuned("decode", blocks, head_dim=head_dim, itemsize=itemsize, units=units)
    rows = tile_rows(head_dim, itemsize, group, narrow=narrow)
    fitting = fit_stages(head_dim, itemsize, page_size, chosen.consumers, rows, swapped=itemsize == 1)
    return chosen if chosen.stages <= fitting else blocks


def tile_rows(head_dim: int, itemsize: int, group: int, *, narrow: bool) -> int:
    """Query rows of a tile that shared memory must have room for; narrow tiles of 16 bits leave it to wide ones.

    Args:
      (all): as in `choose_gpu_blocks`.

    Example:
      >>> tile_rows(128, 1, 4, narrow=True), tile_rows(128, 1, 12, narrow=True), tile_rows(128, 2, 4, narrow=True)
      (8, 16, 64)
    """
    return -(-group // NARROW_ROWS) * NARROW_ROWS if _has_few_rows(head_dim, itemsize, narrow) else TILE_ROWS


def _has_few_rows(head_dim: int, itemsize: int, narrow: bool) -> bool:
    """Whether a tile over 8-bit pages has room for no more rows than a decode step's has."""
    return narrow and itemsize == 1 and head_dim % 64 == 0


def rule_gpu_blocks(
    head_dim: int,
    multiprocessors: int,
    itemsize: int = 2,
    page_size: int = 16,
    *,
    narrow: bool = True,
    units: int = 0,
    group: int = 1,
) -> GPUBlocks:
    """The tiles that fit: two consumers with three stages or more each, else one; four for large steps of 8-bit decode.

    Two consumers hide each other's arithmetic, and three stages keep the memory busy while one is computed. Blocks of
    8-bit pages come twice as fast and take as long to compute: four consumers are as fast as the memory, but cut a step
    in more pieces, which costs more than it saves if units are few.

    Args:
      (all): as in `choose_gpu_blocks`.

    Example:
      >>> rule_gpu_blocks(128, 132).stages, rule_gpu_blocks(256, 132).consumers
      (3, 1)
      >>> [rule_gpu_blocks(128, 132, itemsize=1, units=8 * rows).consumers for rows in (8, 128)]
      [2, 4]
      >>> [rule_gpu_blocks(*shape).full_share for shape in ((64, 132), (128, 132), (128, 132, 1))]
      [8, 20, 4]
    """
    rows = tile_rows(head_dim, itemsize, group, narrow=narrow)
    many = _has_few_rows(head_dim, itemsize, narrow) and head_dim <= 128 and units >= 3 * multiprocessors
    for consumers in (4, 2, 1) if many else (2, 1):
        stages = fit_stages(head_dim, itemsize, page_size, consumers, rows, swapped=itemsize == 1)
        if stages >= 3:
            break
    return GPUBlocks(
        block_kv=_BLOCK_KV,
        stages=stages,
        consumers=consumers,
        num_blocks=multiprocessors,
        full_share=_FULL_SHARE_8_BIT if itemsize == 1 else _FULL_SHARE_WIDE if head_dim >= _WIDE else _FULL_SHARE,
        swizzle=128 if head_dim % 64 == 0 else 64,
    )
