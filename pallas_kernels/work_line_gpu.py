"""A line of KV blocks, cut into equal shares: what the work list of the Mosaic GPU kernel is made of (`gpu_plan`)."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .indices_gpu import arange, ceil_div, div, take


def by_unit(x: Array, num_kv_heads: int) -> Array:
    """What tiles have, of each of their units."""
    return jnp.broadcast_to(x[:, None], (x.shape[0], num_kv_heads)).reshape(-1)


@dataclass(frozen=True)
class Tiles:
    """Tiles of a line: the first `num` of each array are live, the others have no blocks.

    Attributes:
      row, token, count, position, start: what their records say (`gpu_plan.make_work_list`).
      blocks: KV blocks of each KV head.
    """

    num: Array
    row: Array
    token: Array
    count: Array
    position: Array
    start: Array
    blocks: Array


@dataclass(frozen=True)
class Cuts:
    """A line of blocks, cut for the workers; arrays by worker, then by unit.

    Attributes:
      unit, begin: where a worker begins: a unit, and a block of it.
      first_blocks: blocks of its first piece.
      count: its pieces.
      first_cut: the first worker that begins behind a unit's first block.
      pieces: of the unit.
      unit_blocks: blocks of the unit's first piece.
    """

    unit: Array
    begin: Array
    first_blocks: Array
    count: Array
    first_cut: Array
    pieces: Array
    unit_blocks: Array


def round_share(share: Array, longest: Array) -> Array:
    """Rounds up to a multiple, or an even part, of the longest unit, if that is near.

    Then units of equal length are cut evenly or not at all, and a worker has one piece to hand over and not two. The
    workers that are left without work cost nothing as long as the others keep the memory busy.
    """
    multiple = ceil_div(share, longest) * longest
    part = ceil_div(longest, jnp.maximum(div(longest, share), 1))
    rounded = jnp.where(share >= longest, multiple, part)
    return jnp.where(rounded <= share + div(share, 6) + 1, rounded, share)


def cut_line(tiles: Tiles, busy: Array | int, least: int, num_kv_heads: int, num_workers: int) -> Cuts:
    """Cuts a line into shares of `least` blocks or more for `busy` workers or fewer."""
    blocks = tiles.blocks
    # Worker w begins at w * share on the line of blocks, which is block `cut` of unit `at`.
    line = jnp.cumsum(blocks * num_kv_heads, dtype=jnp.int32)  # where each tile ends
    starts = line - blocks * num_kv_heads
    num_units = tiles.num * num_kv_heads
    share = round_share(jnp.maximum(ceil_div(line[-1], busy), least), jnp.maximum(jnp.max(blocks), 1))
    # Stored, or XLA would make them anew inside of every kernel that follows.
    line, starts, share = lax.optimization_barrier((line, starts, share))
    cuts = arange(num_workers + 1) * share
    tile = jnp.minimum(jnp.sum(line[None, :] <= cuts[:, None], axis=1, dtype=jnp.int32), blocks.shape[0] - 1)
    beyond = cuts >= line[-1]
    along, tile_blocks = cuts - take(starts, tile), take(blocks, tile)
    head = div(along, jnp.maximum(tile_blocks, 1))
    at = jnp.where(beyond, num_units, tile * num_kv_heads + head)
    cut = jnp.where(beyond, 0, along - head * tile_blocks)

    # Units, and the cuts inside of each.
    heads = arange(num_kv_heads)[None, :]
    unit_start = (starts[:, None] + heads * blocks[:, None]).reshape(-1)
    blocks_of = by_unit(blocks, num_kv_heads)
    first_cut = jnp.minimum(div(unit_start, share) + 1, num_workers)
    pieces = 1 + jnp.maximum(ceil_div(unit_start + blocks_of, share) - first_cut, 0)

    here, there, begin, end = at[:-1], at[1:], cut[:-1], cut[1:]
    unit = jnp.minimum(here, blocks_of.shape[0] - 1)
    return Cuts(
        unit=unit,
        begin=begin,
        first_blocks=jnp.where(here == there, end, take(blocks_of, unit)) - begin,
        count=jnp.where(here < num_units, there - here + (end > 0).astype(jnp.int32), 0),
        first_cut=first_cut,
        pieces=pieces,
        unit_blocks=jnp.where(pieces > 1, take(cut, first_cut), blocks_of),
    )
