"""Prefill on a TPU: a tile of query tokens against a KV block, one KV head at a time.

The rows of a matrix product are the query heads of a KV head, one after the other, each with all tokens of the tile:

    rows       head 0: token 0, 1, ... block_q - 1 | head 1: token 0, 1, ... | ...
    columns    block_k tokens of K and V of the KV head, taken out of the rows of the block (heads_tpu)

Heads are written out one after the other where there are few, so that the compiler overlaps the softmax of one with the
matrix products of the next.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from .heads_tpu import put_heads, put_rows, rows_of, take_head, to_column
from .pages import PageSpec
from .pipeline_tpu import Scalar
from .softmax_tpu import MASKED, Softmax, scores
from .tpu_tuning import LANES
from .xla import AttentionOptions

_WRITTEN_OUT = 4  # KV heads of one straight run of code: with 8 it is 2 % quicker, and takes twice as long to compile


@dataclass(frozen=True)
class PrefillTile:
    """The arithmetic of prefill items.

    Attributes:
      group: query heads of a KV head.
      heads: query heads, padding included.
      block_q, block_k: query tokens of a tile, KV tokens that it meets at once.
      width: lanes of the queries: head_dim, or 128 where K and V share the lanes of a row.
      dtype: of the factors of matrix products.
      q: [Hkv, group * block_q, width] queries by KV head, in vector memory.
      q_rows, kv_rows: buffers of `heads_tpu` for queries (and outputs), and for K and V.
      state: indexed by KV head.
    """

    spec: PageSpec
    options: AttentionOptions
    group: int
    heads: int
    block_q: int
    block_k: int
    width: int
    dtype: Any
    q: Any
    q_rows: Any
    kv_rows: Any
    state: Softmax

    def start(self, queries: Any, sinks: Any) -> None:
        """Takes the queries [block_q, heads, width] apart and resets the state; `sinks`: f32 scalars or `None`."""
        rows = queries[...].reshape(self.block_q * self.heads, self.width)
        put_rows(self.q_rows, rows, self.heads)
        for head in range(self.spec.num_kv_heads * self.group):
            kv_head, rows = head // self.group, self._rows_of_head(head)
            for slab in range(self.width // LANES):
                part = take_head(
                    self.q_rows,
                    head,
                    slab,
                    parity=head % 2,
                    heads=self.heads,
                    tokens=self.block_q,
                    dtype=self.dtype,
                )
                self.q[kv_head, rows, slab * LANES : (slab + 1) * LANES] = part
            own = None if sinks is None else jnp.full((self.block_q, LANES), sinks[head], jnp.float32)
            self.state.start((kv_head, rows), own)

    def _rows_of_head(self, head: int) -> slice:
        g = head % self.group
        return slice(g * self.block_q, (g + 1) * self.block_q)

    def add(
        self, ring: Any, scale_ring: Any, slot: Scalar, position: Scalar, offset: Scalar, stop: Scalar, *, whole: bool
    ) -> None:
        """Adds the block whose first token stands at position `offset` of the row.

        Args:
          position: of the tile's first query.
          stop: KV tokens at and after it are seen by no query.
          whole: every query sees all of the block.
        """
        hkv, runs = self.spec.num_kv_heads, ring.shape[1] // (self.block_k * self.spec.num_kv_heads)
        last = runs if whole else jnp.clip((stop - offset + self.block_k - 1) // self.block_k, 0, runs)
        per_trip = max(n for n in range(1, _WRITTEN_OUT + 1) if hkv % n == 0 and (n % 2 == 0 or hkv % 2))

        def run(i, _):
            first = pl.multiple_of(i * self.block_k, self.block_k)
            if hkv > 1:
                self._put_kv(ring, scale_ring, slot, first)

            def some_heads(trip, _):
                for h in range(per_trip):
                    self._add_head(
                        ring, scale_ring, slot, trip * per_trip + h, h % 2, first, position, offset, stop, whole
                    )
                return 0

            if hkv == per_trip:
                return some_heads(0, 0)
            return lax.fori_loop(0, hkv // per_trip, some_heads, 0)

        if runs == 1:
            run(0, 0)
        else:
            lax.fori_loop(0, last, run, 0)

    def _put_kv(self, ring: Any, scale_ring: Any, slot: Scalar, first: Scalar) -> None:
        """Lays out the rows of block_k tokens so that heads can be taken; quantised ones get their scales first."""
        hkv = self.spec.num_kv_heads
        n = self.block_k * hkv
        at = pl.multiple_of(first * hkv, n)
        if scale_ring is None:
            put_rows(self.kv_rows, ring[slot, pl.ds(at, n)], hkv)
            return
        for i in range(0, n, LANES):
            rows = self._dequantised(ring, scale_ring, slot, at, i)
            for slab in range(rows.shape[1] // LANES):
                self.kv_rows[slab, i : i + LANES] = rows[:, slab * LANES : (slab + 1) * LANES]

    def _dequantised(self, ring: Any, scale_ring: Any, slot: Scalar, at: Scalar, i: int) -> Array:
        """128 rows of a run of block_k tokens that begins at row `at`, f32."""
        page_rows, d = self.spec.page_size * self.spec.num_kv_heads, self.spec.head_dim
        rows = ring[slot, pl.ds(pl.multiple_of(at + i, LANES), LANES)].astype(jnp.float32)
        page, lane = at // page_rows + i // page_rows, i % page_rows
        k_scale, v_scale = (
            to_column(scale_ring[slot, page, which : which + 1, lane : lane + LANES]) for which in (0, 1)
        )
        if d < LANES:
            lanes = lax.broadcasted_iota(jnp.int32, rows.shape, 1)
            return rows * jnp.where(lanes < d, k_scale, v_scale)
        tiles = [k_scale] * (d // LANES) + [v_scale] * (d // LANES)
        return rows * jnp.concatenate(tiles, axis=1)

    def _kv(self, ring: Any, scale_ring: Any, slot: Scalar, head: Any, parity: int, first: Scalar) -> Array:
        """K and V of a head, [block_k, 2 * head_dim]."""
        n = self.block_k
        if self.spec.num_kv_heads == 1 and scale_ring is None:
            return ring[slot, pl.ds(first, n)].astype(self.dtype)
        if self.spec.num_kv_heads == 1:
            parts = [self._dequantised(ring, scale_ring, slot, first, i) for i in range(0, n, LANES)]
            return jnp.concatenate(parts, axis=0).astype(self.dtype)
        slabs = range(2 * self.spec.head_dim // LANES)
        parts = [
            take_head(
                self.kv_rows,
                head,
                slab,
                parity=parity,
                heads=self.spec.num_kv_heads,
                tokens=n,
                dtype=self.dtype,
            )
            for slab in slabs
        ]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def _add_head(self, ring, scale_ring, slot, head, parity: int, first, position, offset, stop, whole: bool) -> None:
        kv = self._kv(ring, scale_ring, slot, head, parity, first)
        shared = self.width > self.spec.head_dim
        k, v = (kv, kv) if shared else (kv[:, : self.width], kv[:, self.width :])
        key = offset + first
        if not whole:
            row = key + lax.broadcasted_iota(jnp.int32, (self.block_k, 1), 0)
            seen = row < stop
            if self.options.sliding_window is not None:
                seen &= row > position - self.options.sliding_window
            v = jnp.where(seen, v, jnp.zeros((), v.dtype))
        s = scores(self.q[head], k, None, self.options)
        if not whole:
            token = lax.broadcasted_iota(jnp.int32, s.shape, 0) % self.block_q
            distance = position + token - (key + lax.broadcasted_iota(jnp.int32, s.shape, 1))
            visible = distance >= 0
            if self.options.sliding_window is not None:
                visible &= distance < self.options.sliding_window
            s = jnp.where(visible, s, MASKED)
        self.state.add(head, s, v, None)

    def finish(self, out: Any, lse: Any) -> None:
        """Writes outputs to [block_q, heads, width], and log-sum-exps to f32 [block_q, heads, 128] unless `None`."""
        heads = self.spec.num_kv_heads * self.group
        results = {}
        for pair in range((heads + 1) // 2):
            for head in (2 * pair, min(2 * pair + 1, heads - 1)):
                results[head] = self.state.finish((head // self.group, self._rows_of_head(head)))
            even, odd = results.pop(2 * pair), results.pop(2 * pair + 1, None)
            odd = even if odd is None else odd
            for slab in range(self.width // LANES):
                lanes = slice(slab * LANES, (slab + 1) * LANES)
                put_heads(self.q_rows, slab, pair, even[0][:, lanes], odd[0][:, lanes], heads=self.heads)
            if lse is not None:
                lse[:, 2 * pair] = even[1]
                if 2 * pair + 1 < heads:
                    lse[:, 2 * pair + 1] = odd[1]
        for slab in range(self.width // LANES):
            rows = rows_of(self.q_rows, slab, self.block_q * self.heads, out.dtype)
            out[:, :, slab * LANES : (slab + 1) * LANES] = rows.reshape(self.block_q, self.heads, LANES)
