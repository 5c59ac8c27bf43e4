"""The running softmax of a TPU tile: maxima and sums over a whole tile of lanes, weights in powers of two."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .tpu_tuning import LANES
from .xla import AttentionOptions

LOG2E = math.log2(math.e)
MASKED = -1e30  # a score below all others; finite, so that the difference of two of them is 0 and not NaN


@dataclass(frozen=True)
class Softmax:
    """State of the rows of a tile, in vector memory.

    Attributes:
      top: f32 [rows, 128], the largest score so far (base 2) in all lanes.
      total: f32 [rows, 128], sums of weights lane by lane: adding the lanes up waits for the end.
      acc: f32 [rows, width], weighted sums of V.
    """

    top: Any
    total: Any
    acc: Any

    def start(self, at: Any, sinks: Array | None) -> None:
        """Resets the rows `at`; `sinks` are f32 logits [rows, 128], the same in all lanes, or `None`."""
        shape = self.top[at].shape
        if sinks is None:
            self.top[at], self.total[at] = jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
        else:  # as if a key without a value had been seen
            first_lane = lax.broadcasted_iota(jnp.int32, shape, 1) == 0
            self.top[at], self.total[at] = sinks * LOG2E, jnp.where(first_lane, 1.0, 0.0)
        self.acc[at] = jnp.zeros(self.acc[at].shape, jnp.float32)

    def add(self, at: Any, s: Array, v: Array, v_scales: Array | None) -> None:
        """Adds keys: scores f32 [rows, n] in base 2, values [n, width], scales of the values [1, n] or `None`."""
        n = s.shape[1]
        before = self.top[at]
        top = jnp.maximum(before, jnp.max(s, axis=1, keepdims=True))
        p = jnp.exp2(s - _across(top, n))
        decay = jnp.exp2(before - top)
        if n % LANES:
            first_lane = lax.broadcasted_iota(jnp.int32, top.shape, 1) == 0
            sums = jnp.where(first_lane, jnp.sum(p, axis=1, keepdims=True), 0.0)
        else:
            sums = p[:, :LANES]
            for lane in range(LANES, n, LANES):
                sums = sums + p[:, lane : lane + LANES]
        self.top[at] = top
        self.total[at] = decay * self.total[at] + sums
        weights = p if v_scales is None else p * v_scales
        self.acc[at] = _across(decay, self.acc.shape[-1]) * self.acc[at] + product(weights.astype(v.dtype), v)

    def finish(self, at: Any) -> tuple[Array, Array]:
        """Outputs f32 [rows, width] and log-sum-exps [rows, 128], the same in all lanes."""
        total = jnp.maximum(jnp.sum(self.total[at], axis=1, keepdims=True), 1e-30)  # 0 only in rows that are padding
        lse = (self.top[at] + jnp.log2(total)) / LOG2E
        return self.acc[at] / total, lse


def _across(x: Array, width: int) -> Array:
    """x is the same in all of its 128 lanes; here in `width` of them."""
    if width % LANES:
        return x[:, :width] if width < LANES else jnp.broadcast_to(x[:, :1], (x.shape[0], width))
    return x if width == LANES else jnp.tile(x, (1, width // LANES))


def product(a: Array, b: Array, *, transpose_b: bool = False) -> Array:
    """Matrix product of equal dtypes with f32 sums; f32 factors are not rounded."""
    contract = (((1,), (1 if transpose_b else 0,)), ((), ()))
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def scores(q: Array, k: Array, k_scales: Array | None, options: AttentionOptions) -> Array:
    """Scores f32 [rows, n] in base 2, before the mask."""
    s = product(q, k, transpose_b=True)
    if k_scales is not None:
        s = s * k_scales
    if options.soft_cap is None:
        return s * (options.scale * LOG2E)
    return jnp.tanh(s * (options.scale / options.soft_cap)) * (options.soft_cap * LOG2E)
