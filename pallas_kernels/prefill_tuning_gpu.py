"""Which steps the Mosaic GPU prefill kernel runs, and the sizes of its tiles: rules from measurements on one H200."""

from dataclasses import dataclass

from .tuning import TILE_ROWS

_SHARED_MEMORY = 227 * 1024  # bytes a block of threads may have on Hopper
_BARRIERS_AND_SLACK = 8192  # each group of barriers has 1 KiB of its own
_MAX_STAGES = 4
_SECTION_BYTES = 16 << 20  # of K and V; the L2 cache of an H200 has 50 MB


@dataclass(frozen=True)
class PrefillBlocks:
    """Static choices of the prefill kernel.

    Attributes:
      block_kv: KV tokens of a tile in shared memory and of a matrix product.
      stages: tiles in the rings of K and of V.
      consumers: computing warpgroups of a block of threads, of 64 query rows each.
      num_blocks: blocks of threads, one a multiprocessor.
      swizzle: bytes of a row of the swizzled tiles.
      query_buffers: 2 if the queries of the next unit are fetched while one is computed, else 1.
      section_tokens: KV tokens, of one head, that tiles which run at the same time should share: they stay in the L2
        cache.
      slack: how far, in powers of two, weights may grow before the output is rescaled.
    """

    block_kv: int
    stages: int
    consumers: int
    num_blocks: int
    swizzle: int
    query_buffers: int
    section_tokens: int
    slack: float


def tile_tokens(group: int) -> int:
    """Query tokens of a consumer's part of a tile, of `group` query heads each: as many as fill its 64 rows.

    Example:
      >>> tile_tokens(4), tile_tokens(9)
      (16, 7)
    """
    return TILE_ROWS // group


def choose_prefill_blocks(head_dim: int, multiprocessors: int) -> PrefillBlocks:
    """The tiles that fit: a consumer's scores, weights and outputs are all in its registers.

    A third consumer has room for its registers at head_dim 64, where the products are short and the softmax is as long.

    Example:
      >>> choose_prefill_blocks(128, 132).block_kv, choose_prefill_blocks(256, 132).block_kv
      (128, 64)
      >>> choose_prefill_blocks(64, 132).consumers, choose_prefill_blocks(128, 132).consumers
      (3, 2)
    """
    consumers = 3 if head_dim <= 64 else 2
    block_kv, query_buffers = (128, 2) if head_dim <= 128 else (64, 1)
    row = head_dim * 2
    room = _SHARED_MEMORY - _BARRIERS_AND_SLACK - query_buffers * consumers * TILE_ROWS * row
    return PrefillBlocks(
        block_kv=block_kv,
        stages=min(room // (2 * block_kv * row), _MAX_STAGES),
        consumers=consumers,
        num_blocks=multiprocessors,
        swizzle=128 if head_dim % 64 == 0 else 64,
        query_buffers=query_buffers,
        section_tokens=_SECTION_BYTES // (2 * row),
        slack=8.0,
    )


def fills_the_chip(num_tokens: int, group: int, num_kv_heads: int, blocks: PrefillBlocks) -> bool:
    """Whether a step of so many tokens has units for most multiprocessors; units are not split over the KV.

    Example:
      >>> blocks = choose_prefill_blocks(128, multiprocessors=132)
      >>> fills_the_chip(512, 4, 8, blocks), fills_the_chip(256, 4, 8, blocks)
      (True, False)
    """
    return -(-num_tokens // (blocks.consumers * tile_tokens(group))) * num_kv_heads >= 0.75 * blocks.num_blocks
