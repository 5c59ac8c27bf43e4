"""A line of KV blocks, cut into equal shares: what the work list of the Mosaic GPU kernel is made of (`gpu_plan`).

A *unit* of the line is one KV head of a tile; the units of a tile follow each other and have as many blocks each.
Worker w begins at block w * share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .indices_gpu import arange, ceil_div, div, reduce_rows
from .metadata import PagedMetadata

At = Callable[[Array], Array]  # of an array by tile, what it says of some tiles


@dataclass(frozen=True)
class Tile:
    """What records say of tiles (`gpu_plan.make_work_list`): `count` is NUM_TOKENS, `start` KV_START."""

    row: Array
    token: Array
    count: Array
    position: Array
    start: Array


@dataclass(frozen=True)
class Tiles:
    """Tiles of query tokens, row by row.

    Attributes:
      num: how many are live; arrays by tile have more places.
      first: by row; its first tile.
      row, nth, q_len, kv_len, cu_q_len: by tile; its row, which of the row's tiles it is, and what is known of the row.
      tokens, sliding_window, block_kv: static.
    """

    num: Array
    first: Array
    row: Array
    nth: Array
    q_len: Array
    kv_len: Array
    cu_q_len: Array
    tokens: int
    sliding_window: int | None
    block_kv: int

    def at(self, at: At, tile: Array) -> Tile:
        """What records say of some tiles."""
        q_len, offset = at(self.q_len), at(self.nth) * self.tokens
        count = jnp.where(tile < self.num, jnp.minimum(q_len - offset, self.tokens), 0)
        position = at(self.kv_len) - q_len + offset
        start = jnp.zeros_like(position)
        if self.sliding_window is not None:
            start = div(jnp.maximum(position - (self.sliding_window - 1), 0), self.block_kv) * self.block_kv
        return Tile(at(self.row), at(self.cu_q_len) + offset, count, position, start)

    @property
    def all(self) -> Tile:
        """What records say of all."""
        return self.at(lambda x: x, arange(self.row.shape[0]))

    @property
    def count(self) -> Array:
        """Query tokens."""
        return self.all.count

    @property
    def blocks(self) -> Array:
        """KV blocks that each tile sees."""
        tile = self.all
        return jnp.where(tile.count > 0, ceil_div(tile.position + tile.count - tile.start, self.block_kv), 0)


def list_tiles(
    meta: PagedMetadata, q_lens: Array, capacity: int, tokens: int, sliding_window: int | None, block_kv: int
) -> Tiles:
    """The tiles of a step, at most `capacity`; arguments as for `gpu_plan.make_work_list`."""
    num_rows = q_lens.shape[0]
    rows, tiles = arange(num_rows)[None, :], arange(capacity)[:, None]
    row_tiles = ceil_div(q_lens, tokens)[None, :]
    first, after = reduce_rows([jnp.where(rows < rows.T, row_tiles, 0), jnp.where(rows <= rows.T, row_tiles, 0)])
    is_last = rows == num_rows - 1  # which also has the tiles that are not live
    of_row = (first[None, :] <= tiles) & ((tiles < after[None, :]) | is_last)
    columns = rows, tiles - first[None, :], q_lens[None, :], meta.kv_lens[None, :], meta.cu_q_lens[None, :-1]
    row, nth, q_len, kv_len, cu_q_len = reduce_rows([jnp.where(of_row, x, 0) for x in columns])
    return Tiles(after[-1], first, row, nth, q_len, kv_len, cu_q_len, tokens, sliding_window, block_kv)


def round_share(share: Array, longest: Array) -> Array:
    """Rounds up to a multiple, or an even part, of the longest unit, if that is near.

    Then units of equal length are cut evenly or not at all, and a worker has one piece to hand over and not two. The
    workers that are left without work cost nothing as long as the others keep the memory busy.
    """
    multiple = ceil_div(share, longest) * longest
    part = ceil_div(longest, jnp.maximum(div(longest, share), 1))
    rounded = jnp.where(share >= longest, multiple, part)
    return jnp.where(rounded <= _nearly(share), rounded, share)


def _nearly(share: Array) -> Array:
    """The longest share that is as good as this one, if it saves pieces: 9 instead of 7 was, at head_dim 64."""
    return share + div(share, 6) + 1


def cut_share(num_blocks: Array, longest: Array, busy: Array | int, least: int) -> Array:
    """Blocks of a worker: `least` or more, for `busy` workers or fewer."""
    return round_share(jnp.maximum(ceil_div(num_blocks, busy), least), jnp.maximum(longest, 1))


class Line(NamedTuple):
    """The line's units, by tile: the blocks that each of its units takes, where those end, and those of a worker.

    Attributes:
      share: the same for all.
    """

    blocks: Array
    ends: Array
    share: Array


_CANDIDATES = 4  # shares that are tried


def align_units(line: Line, total: Array, busy: Array, num_kv_heads: int) -> Line:
    """The line with empty blocks behind each unit, if so each has workers of its own and shares are little longer.

    A worker that goes on with a second unit begins and ends twice, and its neighbours wait for it to join their pieces:
    8 rows of 1,040 tokens took 16.7 us cut evenly and 14.5 like this (H200, 32 query heads over 8). The least share is
    taken that needs no more than `busy` workers.

    Args:
      total: blocks of all units.
    """
    least = jnp.maximum(ceil_div(total, busy), 1)
    shares = [least + k for k in range(_CANDIDATES)]
    here, there = arange(len(least))[:, None], arange(len(least))[None, :]
    workers = [ceil_div(line.blocks[None, :], share[:, None]) for share in shares]
    found = reduce_rows([jnp.where(there <= here, x, 0) for x in workers] + workers)
    blocks = line.blocks
    for share, before, needed in reversed(list(zip(shares, found[:_CANDIDATES], found[_CANDIDATES:], strict=True))):
        fits = (needed * num_kv_heads <= busy) & (share <= _nearly(least))
        aligned = Line(ceil_div(blocks, share) * share, before * share, share)
        line = Line(*(jnp.where(fits, x, y) for x, y in zip(aligned, line, strict=True)))
    return Line(*lax.optimization_barrier(tuple(line)))  # kept from being made anew for each record


@dataclass(frozen=True)
class Shares:
    """Shares of workers, arrays by worker.

    Attributes:
      tile, head: of the unit that the worker begins with; of some unit if it has no work.
      begin, blocks: first block, and blocks, of its first piece.
      count: its pieces.
    """

    tile: Array
    head: Array
    begin: Array
    blocks: Array
    count: Array


@dataclass(frozen=True)
class Run:
    """Tiles of equal length, one after the other.

    Attributes:
      start: blocks of the line before them.
      blocks: of each unit.
      first_tile: number of the first.
      share: blocks of a worker, the same for all.
    """

    start: Array
    blocks: Array
    first_tile: Array
    share: Array


def begin_shares(run: Run, beyond: Array, num_units: Array, num_kv_heads: int, *, one_tile: bool = False) -> Shares:
    """The shares of workers.

    Args:
      run: for w in [0, workers], the one that block w * share is in; any if it is beyond the line.
      beyond: whether it is.
      num_units: of the line.
      one_tile: whether each run has one tile.
    """
    along = jnp.where(beyond, 0, arange(beyond.shape[0]) * run.share - run.start)
    nth = div(along, jnp.maximum(run.blocks, 1))
    begin = along - nth * run.blocks
    at = jnp.where(beyond, num_units, run.first_tile * num_kv_heads + nth)
    here, there, begin, end, nth = at[:-1], at[1:], begin[:-1], begin[1:], nth[:-1]
    tile = jnp.zeros_like(nth) if one_tile else div(nth, num_kv_heads)
    return Shares(
        tile=run.first_tile[:-1] + tile,
        head=nth - tile * num_kv_heads,
        begin=begin,
        blocks=jnp.where(here == there, end, run.blocks[:-1]) - begin,
        count=jnp.where(beyond[:-1], 0, there - here + (end > 0).astype(jnp.int32)),
    )


def cut_units(start: Array, blocks: Array, share: Array, num_workers: int) -> tuple[Array, Array]:
    """The first worker that begins behind the first block of each unit, and how many pieces the unit has."""
    first_cut = jnp.minimum(div(start, share) + 1, num_workers)
    return first_cut, 1 + jnp.maximum(ceil_div(start + blocks, share) - first_cut, 0)
