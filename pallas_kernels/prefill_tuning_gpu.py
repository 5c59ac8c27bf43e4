"""Which steps the Mosaic GPU prefill kernel runs, and the sizes of its tiles: rules from measurements on one H200."""

import dataclasses
from dataclasses import dataclass

from .tuned_blocks import tuned
from .tuning import TILE_ROWS

_SHARED_MEMORY = 227 * 1024  # bytes a block of threads may have on Hopper
_BARRIERS_AND_SLACK = 8192  # each group of barriers has 1 KiB of its own
_RAW_BARRIERS_AND_SLACK = 12288  # and of 8-bit pages there are more
_MAX_STAGES = 4
_RAW_STAGES = 3
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
      raw_stages: tiles in the rings of 8-bit K and V, before they are converted; 0 for 16-bit pages.
    """

    block_kv: int
    stages: int
    consumers: int
    num_blocks: int
    swizzle: int
    query_buffers: int
    section_tokens: int
    slack: float
    raw_stages: int


def tile_tokens(group: int) -> int:
    """Query tokens of a consumer's part of a tile, of `group` query heads each: as many as fill its 64 rows.

    Example:
      >>> tile_tokens(4), tile_tokens(9)
      (16, 7)
    """
    return TILE_ROWS // group


def has_prefill_tiles(head_dim: int, itemsize: int) -> bool:
    """Whether the kernel runs such pages.

    A product of 256 columns needs more registers than the compiler gives the threads of four warpgroups, one of which
    converts 8-bit pages.

    Example:
      >>> has_prefill_tiles(256, 2), has_prefill_tiles(256, 1)
      (True, False)
    """
    return itemsize == 2 or head_dim <= 128


def choose_prefill_blocks(head_dim: int, multiprocessors: int, itemsize: int = 2) -> PrefillBlocks:
    """The tiles of a step: those of the rules, or what the table of the GPU in use has instead (`tuned_blocks`).

    Args:
      itemsize: bytes of a value in the pages.
    """
    blocks = rule_prefill_blocks(head_dim, multiprocessors, itemsize)
    return fit_prefill_stages(tuned("prefill", blocks, head_dim=head_dim, itemsize=itemsize), head_dim)


def rule_prefill_blocks(head_dim: int, multiprocessors: int, itemsize: int = 2) -> PrefillBlocks:
    """The tiles that fit: a consumer's scores, weights and outputs are all in its registers.

    A third consumer has room for its registers at head_dim 64, where the products are short and the softmax is as long.
    Blocks of 8-bit pages are half as long: shared memory holds both kinds of tiles, and registers are shared with the
    warpgroup that converts them.

    Args:
      itemsize: bytes of a value in the pages.

    Example:
      >>> rule_prefill_blocks(128, 132).block_kv, rule_prefill_blocks(256, 132).block_kv
      (128, 64)
      >>> rule_prefill_blocks(64, 132).consumers, rule_prefill_blocks(128, 132).consumers
      (3, 2)
      >>> rule_prefill_blocks(128, 132, itemsize=1).block_kv
      64
    """
    consumers = 3 if head_dim <= 64 and itemsize == 2 else 2
    block_kv, query_buffers = (128, 2) if head_dim <= 128 else (64, 1)
    if itemsize == 1:
        block_kv = 64  # the fewest that a product sums over
    return fit_prefill_stages(
        PrefillBlocks(
            block_kv=block_kv,
            stages=_MAX_STAGES,
            consumers=consumers,
            num_blocks=multiprocessors,
            swizzle=128 if head_dim % 64 == 0 else 64,
            query_buffers=query_buffers,
            section_tokens=_SECTION_BYTES // (2 * head_dim * itemsize),
            slack=8.0,
            raw_stages=_RAW_STAGES if itemsize == 1 else 0,
        ),
        head_dim,
    )


def fit_prefill_stages(blocks: PrefillBlocks, head_dim: int) -> PrefillBlocks:
    """The same with as many stages as fit shared memory, up to those asked for.

    Example:
      >>> fit_prefill_stages(rule_prefill_blocks(128, 132), 128).stages
      2
    """
    row, tokens = 2 * head_dim, 2 * blocks.block_kv  # of K and of V
    room = _SHARED_MEMORY - blocks.query_buffers * blocks.consumers * TILE_ROWS * row
    if not blocks.raw_stages:
        fitting = (room - _BARRIERS_AND_SLACK) // (tokens * row)
    else:  # a place of scales is 4 bytes a token, and there is one more than there are stages
        room -= _RAW_BARRIERS_AND_SLACK + blocks.raw_stages * tokens * head_dim + 4 * tokens
        fitting = room // (tokens * (row + 4))
    return dataclasses.replace(blocks, stages=min(fitting, blocks.stages))


def fills_the_chip(num_tokens: int, group: int, num_kv_heads: int, blocks: PrefillBlocks) -> bool:
    """Whether a step of so many tokens has units for most multiprocessors; units are not split over the KV.

    Example:
      >>> blocks = choose_prefill_blocks(128, multiprocessors=132)
      >>> fills_the_chip(512, 4, 8, blocks), fills_the_chip(256, 4, 8, blocks)
      (True, False)
    """
    return -(-num_tokens // (blocks.consumers * tile_tokens(group))) * num_kv_heads >= 0.75 * blocks.num_blocks
