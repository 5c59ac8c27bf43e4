"""Symmetric quantisation of K and V with one f32 scale a token and head (absmax)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

_INT8_MAX = 127.0


def quantize(x: Float[Array, "*rows D"], dtype: np.dtype) -> tuple[Array, Float32[Array, " *rows"]]:
    """Quantises the last axis: x is about values * scales, with the largest magnitude of a row on the dtype's largest.

    Returns:
      values of `dtype` and x's shape, f32 scales without the last axis. A row whose scale would be no normal f32
      (zeros, or magnitudes below some 1e-36) has scale 1, and so becomes zeros.

    Example:
      >>> values, scales = quantize(jnp.array([[0.5, -1.0]]), jnp.dtype("int8"))
      >>> values.tolist()
      [[64, -127]]
    """
    x = x.astype(jnp.float32)
    largest = _INT8_MAX if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    absmax = jnp.max(jnp.abs(x), axis=-1)
    # Subnormal numbers are 0 on some devices, and a scale of 0 would turn zeros into NaN.
    vanishes = absmax < largest * float(jnp.finfo(jnp.float32).tiny)
    scales = jnp.where(vanishes, 1.0, absmax / largest)
    # The quotient can pass `largest` by one rounding, which e4m3fn (no infinity) would turn into NaN further out.
    scaled = jnp.clip(x / scales[..., None], -largest, largest)
    return (jnp.round(scaled) if dtype == jnp.int8 else scaled).astype(dtype), scales


def dequantize(values: Array, scales: Float32[Array, " *rows"]) -> Float32[Array, "*rows D"]:
    """The inverse of `quantize`, in f32.

    Example:
      >>> dequantize(jnp.array([[64, -127]], jnp.int8), jnp.array([0.5])).tolist()
      [[32.0, -63.5]]
    """
    return values.astype(jnp.float32) * scales[..., None]
