"""Decode on a TPU: one query token against a KV block, all heads in one matrix product.

Rows of a block are (token, KV head). Every query head is multiplied with every row, and the products of heads that do
not belong together are masked:

                 rows of the block: token 0       token 1
                 KV head              0   1   2   0   1   2   ...
    query heads of KV head 0          s   .   .   s   .   .
    query heads of KV head 1          .   s   .   .   s   .
    query heads of KV head 2          .   .   s   .   .   s

The matrix unit must load every row of K and V once, whoever meets them, so this costs it nothing; the softmax computes
num_kv_heads times as much as it has to, and is still far from the time that the memory takes. In return nothing needs
to be taken apart, and the weights, zero where heads do not match, pick the right rows of V in one product as well.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from .pages import PageSpec
from .pipeline_tpu import Scalar
from .softmax_tpu import MASKED, Softmax, scores
from .xla import AttentionOptions

_LEAST_ROWS = 1024  # of a block that ends early, what is computed at least: less takes no less time


@dataclass(frozen=True)
class DecodeTile:
    """The arithmetic of decode items.

    Attributes:
      group: query heads of a KV head.
      pages: pages of a block.
      width: lanes of the queries: head_dim, or 128 where K and V share the lanes of a row.
      dtype: of the factors of matrix products.
      state: rows are the query heads.
    """

    spec: PageSpec
    options: AttentionOptions
    group: int
    pages: int
    width: int
    dtype: Any
    state: Softmax

    @property
    def _page_rows(self) -> int:
        return self.spec.page_size * self.spec.num_kv_heads

    def _scales(self, scale_ring: Any, slot: Scalar, which: int, pages: int) -> Array | None:
        if scale_ring is None:
            return None
        return jnp.concatenate([scale_ring[slot, i, which : which + 1] for i in range(pages)], axis=1)

    def _mask(self, heads: int, rows: int) -> Array:
        """bool [heads, rows]: whether the row's KV head is the query head's. Runs of rows begin with KV head 0."""
        hkv = self.spec.num_kv_heads
        row_head = lax.broadcasted_iota(jnp.int32, (heads, rows), 1) % hkv
        return row_head == lax.broadcasted_iota(jnp.int32, (heads, rows), 0) // self.group

    def add_whole(self, q: Array, ring: Any, scale_ring: Any, slot: Scalar) -> None:
        """Adds a block of which every token is seen."""
        rows = self.pages * self._page_rows
        k, v = self._split(ring[slot])
        s = scores(q, k, self._scales(scale_ring, slot, 0, self.pages), self.options)
        if self.spec.num_kv_heads > 1:
            s = jnp.where(self._mask(q.shape[0], rows), s, MASKED)
        self.state.add(..., s, v, self._scales(scale_ring, slot, 1, self.pages))

    def add_part(self, q: Array, ring: Any, scale_ring: Any, slot: Scalar, start: Scalar, stop: Scalar) -> None:
        """Adds tokens [start, stop) of a block; whatever lies beside them, be it NaN, does not count.

        As much of the block is computed as holds them: all, a half, a quarter, and so on.
        """
        smallest = max(1, _LEAST_ROWS // self._page_rows)
        pages = [self.pages]
        while pages[0] % 2 == 0 and pages[0] // 2 >= smallest:
            pages.insert(0, pages[0] // 2)
        below = 0
        for count in pages:
            tokens = count * self.spec.page_size

            @pl.when((stop > below) & (stop <= tokens))
            def _(count=count):
                self._add_masked(q, ring, scale_ring, slot, start, stop, count)

            below = tokens

    def _add_masked(self, q, ring, scale_ring, slot, start: Scalar, stop: Scalar, pages: int) -> None:
        hkv, rows = self.spec.num_kv_heads, pages * self._page_rows
        lo, hi = start * hkv, stop * hkv
        k, v = self._split(ring[slot, :rows])
        row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        v = jnp.where((row >= lo) & (row < hi), v, jnp.zeros((), v.dtype))
        s = scores(q, k, self._scales(scale_ring, slot, 0, pages), self.options)
        column = lax.broadcasted_iota(jnp.int32, s.shape, 1)
        seen = (column >= lo) & (column < hi)
        if hkv > 1:
            seen &= self._mask(q.shape[0], rows)
        v_scales = self._scales(scale_ring, slot, 1, pages)
        if v_scales is not None:
            v_scales = jnp.where((column[:1] >= lo) & (column[:1] < hi), v_scales, 0.0)
        self.state.add(..., jnp.where(seen, s, MASKED), v, v_scales)

    def _split(self, rows: Array) -> tuple[Array, Array]:
        """K and V of rows. If they share 128 lanes, both are the whole: q is 0 along V, and K's sums are cut off."""
        rows = widen(rows, self.dtype)
        if self.width == self.spec.head_dim:
            return rows[:, : self.width], rows[:, self.width :]
        return rows, rows


def widen(x: Array, dtype: Any) -> Array:
    """Values of 8-bit pages go to `dtype` by way of f32, as TPUs have no shorter one."""
    return x.astype(dtype) if x.dtype.itemsize > 1 else x.astype(jnp.float32).astype(dtype)
