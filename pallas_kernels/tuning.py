"""Which shapes the Mosaic GPU kernel runs, and the sizes of its tiles: rules from measurements on one H200."""

from dataclasses import dataclass

import jax.numpy as jnp

from .pages import PageSpec

HEAD_DIMS = (64, 96, 128, 256)  # those that were compared with the reference on a GPU
TILE_ROWS = 64  # rows of a matrix instruction: query tokens times query heads of a KV head
NARROW_ROWS = 8  # the fewest columns of one
_SHARED_MEMORY = 227 * 1024  # bytes a block of threads may have on Hopper
_BARRIERS_AND_SLACK = 1280
_MAX_STAGES = 8  # two groups of 8 barriers a consumer
_BLOCK_KV = 64


@dataclass(frozen=True)
class GPUBlocks:
    """Static choices of the kernel.

    Attributes:
      block_kv: KV tokens of a tile in shared memory and of a matrix product.
      stages: tiles in a consumer's ring.
      consumers: computing warpgroups of a block of threads.
      num_blocks: blocks of threads, one a multiprocessor.
      min_share: least work of a worker, in KV blocks.
      swizzle: bytes of a row of the swizzled tiles.
    """

    block_kv: int
    stages: int
    consumers: int
    num_blocks: int
    min_share: int
    swizzle: int

    @property
    def num_workers(self) -> int:
        """Consumers of the whole launch."""
        return self.consumers * self.num_blocks


def shape_objection(spec: PageSpec, num_heads: int | None = None, q_dtype: str | None = None) -> str | None:
    """Why the kernel cannot run on such pages, or on such queries of theirs; `None` if it can."""
    if spec.dtype.name not in ("bfloat16", "float16"):
        return f"it reads bfloat16 and float16 pages; these are {spec.dtype.name}"
    if spec.head_dim not in HEAD_DIMS:
        return f"it takes a head_dim of {', '.join(map(str, HEAD_DIMS))}; these pages have {spec.head_dim}"
    if spec.page_size % 8:
        return f"it takes a page_size that is a multiple of 8; these pages have {spec.page_size}"
    if num_heads is not None and num_heads > TILE_ROWS * spec.num_kv_heads:
        return f"it takes up to {TILE_ROWS} query heads a KV head; these are {num_heads} over {spec.num_kv_heads}"
    if q_dtype is not None and jnp.dtype(q_dtype) != spec.dtype:
        return f"it takes queries of the pages' dtype, {spec.dtype.name}; these are {q_dtype}"
    return None


def choose_gpu_blocks(head_dim: int, multiprocessors: int) -> GPUBlocks:
    """The tiles that fit: two consumers with three stages or more each, else one.

    Two consumers hide each other's arithmetic, and three stages keep the memory busy while one is computed.

    Example:
      >>> choose_gpu_blocks(128, 132).stages, choose_gpu_blocks(256, 132).consumers
      (3, 1)
    """
    row = head_dim * 2
    tile, queries = 2 * _BLOCK_KV * row, TILE_ROWS * row
    for consumers in (2, 1):
        stages = min((_SHARED_MEMORY - _BARRIERS_AND_SLACK - consumers * queries) // (consumers * tile), _MAX_STAGES)
        if stages >= 3:
            break
    return GPUBlocks(
        block_kv=_BLOCK_KV,
        stages=stages,
        consumers=consumers,
        num_blocks=multiprocessors,
        min_share=1,
        swizzle=128 if head_dim % 64 == 0 else 64,
    )
