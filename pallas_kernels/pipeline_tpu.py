"""The Mosaic TPU kernel's memory traffic: page ids, KV blocks and queries arrive ahead of the arithmetic.

The blocks of all items form one line (tpu_plan). At block g of it

    page ids   of block g + 8           leave HBM for a ring in scalar memory
    KV pages   of block g + ahead       leave HBM for a ring in vector memory, page by page: the ids are there
    queries    of an item               travel with its first block
    block g                             is computed

so nothing waits for the memory but the first block of a walk, however short the sequences are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .pages import PageSpec
from .tpu_plan import COUNT, END, FIRST, POSITION, ROW
from .tpu_tuning import TABLE_CHUNK, TPUBlocks

Ref = Any
Scalar = jax.Array
IDS_AHEAD = 8  # blocks: more than KV blocks are under way, and a power of two, by which a remainder costs nothing


@dataclass(frozen=True)
class Items:
    """The work list in scalar memory: `items(FIELD, i)` reads a field of an item."""

    ref: Ref
    length: int

    def __call__(self, item_field: int, item: Scalar) -> Scalar:
        return self.ref[item_field * self.length + item]


@dataclass(frozen=True)
class Fetch:
    """The KV blocks' way from HBM, and where they are kept.

    Attributes:
      table, data, scales: in HBM: page ids in runs of 128, the pages, their scales or `None`.
      ids, ring, scale_ring: their rings, in scalar memory [A, 1, 128], in vector memory [B, rows, 2 * D] and
        [B, pages, 2, lanes].
      ids_sem, ring_sem, scale_sem: a DMA semaphore for each entry of a ring.
    """

    spec: PageSpec
    blocks: TPUBlocks
    sliding_window: int | None
    chunks: int
    items: Items
    table: Ref
    data: Ref
    scales: Ref
    ids: Ref
    ring: Ref
    scale_ring: Ref
    ids_sem: Ref
    ring_sem: Ref
    scale_sem: Ref

    @property
    def block_kv(self) -> int:
        """KV tokens of a block."""
        return self.blocks.pages * self.spec.page_size

    @property
    def ahead(self) -> int:
        """Blocks that are under way while one is computed."""
        return self.blocks.buffers - 1

    def ids_copy(self, g: Scalar, item: Scalar, block: Scalar) -> Any:
        """The DMA of the page ids of a block."""
        slot = lax.rem(g, IDS_AHEAD)
        run = self.items(ROW, item) * self.chunks + block * self.blocks.pages // TABLE_CHUNK
        return pltpu.make_async_copy(self.table.at[run], self.ids.at[slot], self.ids_sem.at[slot])

    def _page_range(self, item: Scalar, block: Scalar) -> tuple[Scalar, Scalar]:
        """Pages [lo, hi) of the block that some query of the item sees."""
        size, start = self.spec.page_size, block * self.blocks.pages
        position = self.items(POSITION, item)
        lo = jnp.int32(0)
        if self.sliding_window is not None:
            lo = jnp.maximum((position - (self.sliding_window - 1)) // size - start, 0)
        stop = position + self.items(COUNT, item)
        return lo, jnp.minimum((stop + size - 1) // size - start, self.blocks.pages)

    def start(self, g: Scalar, item: Scalar, block: Scalar) -> None:
        """Sends for the pages of block g of the line."""
        self.ids_copy(g, item, block).wait()
        slot, run = lax.rem(g, self.blocks.buffers), lax.rem(g, IDS_AHEAD)
        first, rows = lax.rem(block * self.blocks.pages, TABLE_CHUNK), self.spec.page_size * self.spec.num_kv_heads
        lo, hi = self._page_range(item, block)

        def send(i, _):
            page, at = self.ids[run, 0, first + i], i * rows if isinstance(i, int) else pl.multiple_of(i * rows, rows)
            to = self.ring.at[slot, pl.ds(at, rows)]
            pltpu.make_async_copy(self.data.at[page], to, self.ring_sem.at[slot]).start()
            if self.scales is not None:
                to = self.scale_ring.at[slot, i]
                pltpu.make_async_copy(self.scales.at[page], to, self.scale_sem.at[slot]).start()
            return 0

        whole = hi - lo == self.blocks.pages

        @pl.when(whole)
        def _():
            for i in range(self.blocks.pages):
                send(i, 0)

        @pl.when(jnp.logical_not(whole))
        def _():
            lax.fori_loop(lo, hi, send, 0)

    def wait(self, g: Scalar, item: Scalar, block: Scalar) -> None:
        """Waits for the pages of block g of the line: for as many bytes, in pieces of a power of two of pages."""
        slot, rows = lax.rem(g, self.blocks.buffers), self.spec.page_size * self.spec.num_kv_heads
        lo, hi = self._page_range(item, block)
        size = self.blocks.pages
        while size:

            @pl.when((hi - lo) // size % 2 == 1)
            def _(size=size):
                arrived = self.ring.at[slot, pl.ds(0, size * rows)]
                pltpu.make_async_copy(arrived, arrived, self.ring_sem.at[slot]).wait()
                if self.scale_ring is not None:
                    arrived = self.scale_ring.at[slot, pl.ds(0, size)]
                    pltpu.make_async_copy(arrived, arrived, self.scale_sem.at[slot]).wait()

            size //= 2


def copy_tokens(hbm: Ref, token: Scalar, vmem: Ref, count: Scalar, sem: Ref, *, limit: int, out: bool, op: str) -> None:
    """Starts or waits for the DMA of [count, heads, lanes] between HBM and vector memory; `op` is "start" or "wait".

    Sizes are static in a DMA, so it is one for each bit of `count`.

    Args:
      limit: the most that `count` can be, a power of two.
      out: from vector memory to HBM.
    """
    size = limit
    while size:
        done = pl.multiple_of(count // (2 * size) * (2 * size), 2 * size) if size < limit else 0

        @pl.when(count // size % 2 == 1 if limit > 1 else count > 0)
        def _(size=size, done=done):
            far, near = hbm.at[pl.ds(token + done, size)], vmem.at[pl.ds(done, size)]
            copy = pltpu.make_async_copy(near, far, sem) if out else pltpu.make_async_copy(far, near, sem)
            getattr(copy, op)()

        size //= 2


@dataclass(frozen=True)
class Block:
    """One KV block of an item, as the arithmetic sees it.

    Attributes:
      item: index of the item.
      block: index of the KV block in its row.
      slot: entry of the KV ring.
      q_slot: entry of the ring of queries.
      ordinal: how many items came before on this core.
    """

    item: Scalar
    block: Scalar
    slot: Scalar
    q_slot: Scalar
    ordinal: Scalar


def walk(
    fetch: Fetch, begin: Scalar, total: Scalar, queries: Callable[[Scalar, Scalar, str], None], compute: Callable
) -> None:
    """Walks `total` blocks from item `begin` on.

    Args:
      queries: `queries(item, slot, op)` starts or waits for the DMA of an item's queries to an entry of their ring,
        which is as long as that of the blocks.
      compute: `compute(block: Block)` for each block, in order; waiting for the queries is up to it.
    """
    items, buffers = fetch.items, fetch.blocks.buffers

    def following(cursor):
        item, block = cursor
        more = block + 1 < items(END, item)
        item = jnp.where(more, item, item + 1)
        return item, jnp.where(more, block + 1, items(FIRST, item))

    def send_ids(g, cursor):
        @pl.when(g < total)
        def _():
            fetch.ids_copy(g, *cursor).start()

        return following(cursor)

    def send(g, cursor):
        item, block = cursor

        @pl.when(g < total)
        def _():
            fetch.start(g, item, block)

            @pl.when(block == items(FIRST, item))
            def _():
                queries(item, lax.rem(item - begin, buffers), "start")

        return following(cursor)

    here = begin, items(FIRST, begin)
    ids_cursor = lax.fori_loop(0, IDS_AHEAD, send_ids, here)
    cursor = lax.fori_loop(0, fetch.ahead, send, here)

    def step(g, state):
        ids_cursor, cursor, (item, block) = state
        cursor = send(g + fetch.ahead, cursor)
        ids_cursor = send_ids(g + IDS_AHEAD, ids_cursor)
        fetch.wait(g, item, block)
        ordinal = item - begin
        compute(Block(item, block, lax.rem(g, buffers), lax.rem(ordinal, buffers), ordinal))
        return ids_cursor, cursor, following((item, block))

    lax.fori_loop(0, total, step, (ids_cursor, cursor, here))
