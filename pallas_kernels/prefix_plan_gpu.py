"""Which rows of a step have a prefix of pages in common, and whether it pays to read it once for all of them.

Rows of one prompt, or of one conversation's beginning, have the same page ids at the front of their page tables. All is
found on the device, once a step, from the table alone:

    key      of a row and a level: the page id in the last column of its first 4, 8, 16... blocks, 0 if it is shorter
    level    of a row: the one that leaves the fewest blocks to read, if rows with equal keys share as much as it says
    leader   of a row: the first one of its level with equal keys; the rows of a leader are a group
    prefix   of a group: as many pages as the page tables of all its rows begin with, in whole blocks

So groups may nest in the requests (a system prompt of all, examples of some), and each row joins the group that saves
it the most. A row is compared with its leader page by page: an equal key alone is not trusted.

Reference:
  Ye et al., Cascade inference, https://flashinfer.ai/2024/02/02/cascade-inference.html; Juravsky et al., Hydragen,
  https://arxiv.org/abs/2402.05099.
"""

from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from .indices_gpu import arange, ceil_div, div, rem, take

MIN_BLOCKS = 4  # shorter prefixes are not looked for
JOIN_BLOCKS = 2  # blocks that a row of a group must leave unread for having its results joined
STEP_BLOCKS = 24  # of a worker, of a step that shares: all that were measured gain from 27 on, some from 15 on


@jax.tree_util.register_dataclass
@no_type_check  # trees are also made of placeholders, which have no shape
@dataclass(frozen=True)
class SharedPrefixes:
    """The groups of rows that have a prefix in common.

    Attributes:
      leader: first row of each row's group; the row itself if it has none.
      rank: rows of the group that come before the row.
      size: rows of the group; 0 for a row that has none.
      blocks: KV blocks of the group's prefix; 0 for a row that has none.
    """

    leader: Int32[Array, " S"]
    rank: Int32[Array, " S"]
    size: Int32[Array, " S"]
    blocks: Int32[Array, " S"]


def levels(columns: int, page_size: int, block_kv: int) -> list[int]:
    """Pages of the prefixes that are looked for, in a page table of so many columns; none if it is too short.

    Example:
      >>> levels(columns=129, page_size=16, block_kv=64)
      [16, 32, 64, 128]
    """
    found, pages = [], -(-MIN_BLOCKS * block_kv // page_size)
    while pages < columns:
        found.append(pages)
        pages *= 2
    return found


def find_prefixes(
    page_table: Int32[Array, "S P"],
    kv_lens: Int32[Array, " S"],
    sharing: Bool[Array, " S"],
    *,
    page_size: int,
    block_kv: int,
) -> SharedPrefixes:
    """Groups the rows. A prefix is at most what its rows have before their last token, so each has a rest of its own.

    Args:
      sharing: rows that may be in a group; they have one query token.
    """
    num_rows, columns = page_table.shape
    lengths = levels(columns, page_size, block_kv)
    rows = arange(num_rows)
    shared_at_most = jnp.where(sharing, div(kv_lens - 1, page_size), 0)

    # How many levels two rows have in common: elementwise, so that the sums below need no array of S x S.
    common, equal = jnp.zeros((num_rows, num_rows), jnp.int32), jnp.ones((num_rows, num_rows), bool)
    for pages in lengths:
        key = jnp.where(shared_at_most >= pages, page_table[:, pages - 1], 0)
        equal &= (key[:, None] == key[None, :]) & (key[:, None] != 0)
        common += equal.astype(jnp.int32)

    nth = arange(len(lengths))
    count = jnp.sum(common[None] > nth[:, None, None], axis=2, dtype=jnp.int32)
    # Of a row's n pages, n / count are left to read if they are read once for `count` rows. (Not an argmax, which would
    # be one more program.)
    pages = jnp.asarray(lengths, jnp.int32)
    saved = pages.astype(jnp.float32)[:, None] * (1.0 - 1.0 / jnp.maximum(count, 1).astype(jnp.float32))
    level, most = jnp.zeros(num_rows, jnp.int32), saved[0]
    for n in range(1, len(lengths)):
        level = jnp.where(saved[n] > most, n, level)
        most = jnp.maximum(saved[n], most)
    together = (common > level[:, None]) & (level[:, None] == level[None, :])
    leader = jnp.min(jnp.where(together, rows[None, :], rows[:, None]), axis=1)

    nth_column = arange(columns)[None, :]
    differ = page_table != take(page_table, leader)
    matching = jnp.minimum(jnp.min(jnp.where(differ, nth_column, columns), axis=1), shared_at_most)
    leader = jnp.where(matching >= take(pages, level), leader, rows)

    same = leader[:, None] == leader[None, :]
    size = jnp.sum(same, axis=1, dtype=jnp.int32)
    rank = jnp.sum(same & (rows[None, :] < rows[:, None]), axis=1, dtype=jnp.int32)
    prefix = jnp.min(jnp.where(same, matching[None, :], columns), axis=1)
    alone = size < 2
    return SharedPrefixes(
        leader=leader,
        rank=rank,
        size=jnp.where(alone, 0, size),
        blocks=jnp.where(alone, 0, div(prefix * page_size, block_kv)),
    )


def pays(prefixes: SharedPrefixes, members: int, num_kv_heads: int, num_workers: int) -> Bool[Array, " S"]:
    """Rows that share their prefix: if that leaves enough blocks unread, of their group and of the whole step.

    Args:
      members: rows that a tile of the shared prefix holds; a block is read once for so many.
      num_workers: of the launch.
    """
    rows = arange(prefixes.leader.shape[0])
    unread = (prefixes.size - ceil_div(prefixes.size, members)) * prefixes.blocks
    shares = (prefixes.size > 1) & (unread >= JOIN_BLOCKS * prefixes.size)
    of_step = jnp.sum(jnp.where(shares & (prefixes.leader == rows), unread, 0), dtype=jnp.int32) * num_kv_heads
    return shares & (of_step >= STEP_BLOCKS * num_workers)


@dataclass(frozen=True)
class Sharing:
    """Tiles of shared prefixes, one for as many rows of a group as it holds, and each row's part in them.

    Attributes:
      num_tiles: live tiles; arrays by tile have S // 2 places.
      tile_leader, tile_first, tile_members, tile_blocks: by tile; a row of the group, the first member, how many there
        are, and KV blocks of the prefix, 0 in tiles that are not live.
      shares: by row; whether it shares its prefix.
      blocks: by row; KV blocks that it shares, 0 if it does not.
      tile, place: by row; where its queries are, if it shares.
      row: by member; members are the rows that share, group by group.
    """

    num_tiles: Array
    tile_leader: Array
    tile_first: Array
    tile_members: Array
    tile_blocks: Array
    shares: Array
    blocks: Array
    tile: Array
    place: Array
    row: Array


def num_tiles(num_rows: int) -> int:
    """How many tiles of shared prefixes there can be: the most where groups of three take two tiles of two rows.

    Example:
      >>> [num_tiles(n) for n in (1, 2, 3, 64)]
      [0, 1, 2, 42]
    """
    return 2 * num_rows // 3


def share_prefixes(prefixes: SharedPrefixes, members: int, num_kv_heads: int, num_workers: int) -> Sharing:
    """Makes tiles of the groups for which it pays; arguments as for `pays`."""
    num_rows = prefixes.leader.shape[0]
    rows, tiles = arange(num_rows), arange(num_tiles(num_rows))
    shares = pays(prefixes, members, num_kv_heads, num_workers)
    size = jnp.where(shares & (prefixes.leader == rows), prefixes.size, 0)
    row_tiles = ceil_div(size, members)
    ends, member_ends = jnp.cumsum(row_tiles, dtype=jnp.int32), jnp.cumsum(size, dtype=jnp.int32)
    member = jnp.where(shares, take(member_ends - size, prefixes.leader) + prefixes.rank, num_rows)
    leader = jnp.minimum(jnp.sum(ends[None, :] <= tiles[:, None], axis=1, dtype=jnp.int32), num_rows - 1)
    before = (tiles - take(ends - row_tiles, leader)) * members
    live = tiles < ends[-1]
    return Sharing(
        num_tiles=ends[-1],
        tile_leader=leader,
        tile_first=jnp.where(live, take(member_ends - size, leader) + before, 0),
        tile_members=jnp.where(live, jnp.minimum(take(size, leader) - before, members), 0),
        tile_blocks=jnp.where(live, take(prefixes.blocks, leader), 0),
        shares=shares,
        blocks=jnp.where(shares, prefixes.blocks, 0),
        tile=take(ends - row_tiles, prefixes.leader) + div(prefixes.rank, members),
        place=rem(prefixes.rank, members),
        row=jnp.sum(jnp.where(member[None, :] == rows[:, None], rows[None, :], 0), axis=1, dtype=jnp.int32),
    )
