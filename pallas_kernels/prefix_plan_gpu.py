"""Which rows of a step have a prefix of pages in common, and whether it pays to read it once for all of them.

Rows of one prompt, or of one conversation's beginning, have the same page ids at the front of their page tables. All is
found on the device, once a step, from the table alone:

    key      of a row and a level: the page id in the last column of its first 4, 8, 16... blocks, 0 if it is shorter
    level    of a row: the deepest one up to which another row has equal keys. It leaves the fewest blocks to read: two
             rows that share a prefix save half of it, and more rows would save less than all of half of it
    leader   of a row: the first one of its level with equal keys; the rows of a leader are a group
    prefix   of a group: as many pages as the page tables of all its rows begin with, in whole blocks

So groups may nest in the requests (a system prompt of all, examples of some), and each row joins the group that saves
it the most. A row is compared with its leader page by page: an equal key alone is not trusted.

Reference:
  Ye et al., Cascade inference, https://flashinfer.ai/2024/02/02/cascade-inference.html; Juravsky et al., Hydragen,
  https://arxiv.org/abs/2402.05099.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from .indices_gpu import arange, ceil_div, diagonal, div, pad, reduce_rows, take

MIN_BLOCKS = 4  # shorter prefixes are not looked for
JOIN_BLOCKS = 2  # blocks that a row of a group must leave unread for having its results joined
STEP_BLOCKS = 24  # of a worker, of a step that shares: all that were measured gain from 27 on, some from 15 on


@jax.tree_util.register_dataclass
@no_type_check  # trees are also made of placeholders, which have no shape
@dataclass(frozen=True)
class SharedPrefixes:
    """The groups of rows that have a prefix in common. A row that has none is a group of its own.

    Attributes:
      leader: first row of each row's group.
      place: of each row, if all rows stand group by group, in the order of their leaders.
      size: rows of the group.
      tokens: of the group's prefix, which `blocks` rounds; of no account if it has one row.
      page_size, block_kv: static.
    """

    leader: Int32[Array, " S"]
    place: Int32[Array, " S"]
    size: Int32[Array, " S"]
    tokens: Int32[Array, " S"]
    page_size: int = field(metadata={"static": True})
    block_kv: int = field(metadata={"static": True})

    def blocks(self, row: Array | None = None) -> Array:
        """KV blocks of the prefixes of these rows, or of all: whole ones on whole pages."""
        tokens = self.tokens if row is None else take(self.tokens, row)
        if self.block_kv % self.page_size:
            tokens = div(tokens, self.page_size) * self.page_size
        return div(tokens, self.block_kv)


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
    here, there = rows[:, None], rows[None, :]
    shareable = jnp.where(sharing, kv_lens - 1, 0)  # tokens
    equal, common = jnp.ones((num_rows, num_rows), bool), jnp.zeros((num_rows, num_rows), jnp.int32)
    for pages in lengths:
        key = jnp.where(shareable >= pages * page_size, page_table[:, pages - 1], 0)
        key = jnp.where(key == 0, -1 - rows, key)  # no other row's
        equal &= key[:, None] == key[None, :]
        common += equal.astype(jnp.int32)
    shareable, level = reduce_rows([diagonal(shareable, here, there)], most=[jnp.where(here != there, common, 0)])
    together = (common >= level[:, None]) & (level[:, None] == level[None, :]) & (level > 0)[:, None]
    level, leader = reduce_rows([diagonal(level, here, there)], least=[jnp.where(together, there, here)])

    differ = page_table != take(page_table, leader)
    (matching,) = reduce_rows(least=[jnp.where(differ, arange(columns)[None, :], columns)])
    matching, least = jnp.minimum(matching * page_size, shareable), jnp.zeros_like(level)
    for n, pages in enumerate(lengths):
        least = jnp.where(level > n, pages * page_size, least)
    leader = jnp.where(matching >= least, leader, rows)

    same = leader[:, None] == leader[None, :]
    earlier = (leader[None, :] < leader[:, None]) | (same & (there < here))
    leader, size, place, tokens = reduce_rows(
        [diagonal(leader, here, there), same.astype(jnp.int32), earlier.astype(jnp.int32)],
        least=[jnp.where(same, matching[None, :], columns * page_size)],
    )
    return SharedPrefixes(leader, place, size, tokens, page_size, block_kv)


def unread_blocks(size: Array, blocks: Array, members: int) -> Array:
    """Blocks of one KV head that a group need not read if it shares its prefix; 0 if that does not pay for itself.

    Args:
      size, blocks: of the group.
      members: rows that a tile of the shared prefix holds; a block is read once for so many.
    """
    unread = (size - ceil_div(size, members)) * blocks
    return jnp.where((size > 1) & (unread >= JOIN_BLOCKS * size), unread, 0)


def step_pays(unread: Array, num_kv_heads: int, num_workers: int) -> Array:
    """Whether a step that leaves so many blocks of a KV head unread is to share at all.

    Args:
      num_workers: of the launch.
    """
    return unread * num_kv_heads >= STEP_BLOCKS * num_workers


def pays(prefixes: SharedPrefixes, members: int, num_kv_heads: int, num_workers: int) -> Bool[Array, " S"]:
    """Rows that share their prefix: if that leaves enough blocks unread, of their group and of the whole step.

    Args:
      members: rows that a tile of the shared prefix holds.
      num_workers: of the launch.
    """
    unread = unread_blocks(prefixes.size, prefixes.blocks(), members)
    is_leader = prefixes.leader == arange(prefixes.leader.shape[0])
    of_step = jnp.sum(jnp.where(is_leader, unread, 0), dtype=jnp.int32)
    return (unread > 0) & step_pays(of_step, num_kv_heads, num_workers)


def num_tiles(num_rows: int) -> int:
    """How many tiles of shared prefixes there can be: the most where groups of three take two tiles of two rows.

    Example:
      >>> [num_tiles(n) for n in (1, 2, 3, 64)]
      [0, 1, 2, 42]
    """
    return 2 * num_rows // 3


@dataclass(frozen=True)
class Groups:
    """The groups for which it pays to share, by leader: rows that lead none have no rows and tiles.

    Their rows are *members*, group by group. A tile is of as many members of a group as it holds.

    Attributes:
      size, blocks, tiles: members, KV blocks of the prefix, and tiles, of a group.
      first_member, first_tile, start: members, tiles, and KV blocks of a head of all tiles, of the groups before.
    """

    size: Array
    blocks: Array
    tiles: Array
    first_member: Array
    first_tile: Array
    start: Array

    def of(self, leader: Array) -> "Groups":
        """Those of some leaders."""
        return Groups(*(take(getattr(self, x.name), leader) for x in fields(self)))


def share_prefixes(prefixes: SharedPrefixes, sums: Sequence[Array], members: int, pays: Array) -> Groups:
    """The groups, of the summed `sums_of_groups` and as many; none if it does not pay."""
    rows, tiles, blocks = sums
    length = rows.shape[0]
    leader, size, prefix = (pad(x, length) for x in (prefixes.leader, prefixes.size, prefixes.blocks()))
    leads = pays & (leader == arange(length)) & (unread_blocks(size, prefix, members) > 0)
    size = jnp.where(leads, size, 0)
    of_group = ceil_div(size, members)
    rows, tiles, blocks = (jnp.where(pays, x, 0) for x in sums)
    return Groups(size, prefix, of_group, rows - size, tiles - of_group, blocks - of_group * prefix)


def sums_of_groups(prefixes: SharedPrefixes, members: int, length: int) -> tuple[list[Array], Array]:
    """Terms whose sums along the last axis of [length, length] say of each row what it and the rows before it lead.

    Args:
      members: rows that a tile of the shared prefix holds.
      length: rows, or more.

    Returns:
      Terms of members, tiles, and blocks of a KV head of all tiles; of the row at each place; and, of the whole step,
      of blocks of a KV head that are left unread, and of those of all tiles. And blocks, of which
      the most are those of the longest prefix.
    """
    nth = arange(length)
    leader, size, blocks = (pad(x, length) for x in (prefixes.leader, prefixes.size, prefixes.blocks()))
    place = pad(prefixes.place + 1, length) - 1
    unread = jnp.where(leader == nth, unread_blocks(size, blocks, members), 0)
    size = jnp.where(unread > 0, size, 0)
    tiles = ceil_div(size, members)
    here, there = nth[:, None], nth[None, :]
    sums = [jnp.where(there <= here, x[None, :], 0) for x in (size, tiles, tiles * blocks)]
    sums += [jnp.where(place[None, :] == here, there, 0), unread[None, :], (tiles * blocks)[None, :]]
    return sums, jnp.where(unread > 0, blocks, 0)[None, :]
