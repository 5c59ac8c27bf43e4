"""`add_rms_norm`: the residual sum and the norm of it, between two matrix products of a layer."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .compat import current_gpu, jax_version
from .dispatch import current_platform
from .pages import IMPLEMENTATIONS
from .split_product import sum_parts


def add_rms_norm(
    x: Float[Array, "*B E"],
    delta: Float[Array, "..."] | None,
    scale: Float[Array, "..."],
    eps: float,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "*B E"], Float[Array, "*B E"]]:
    """(y, y / sqrt(mean(y^2) + eps) * scale) with y = x + delta, in one pass.

    The sum is rounded to x's dtype, and what is normed is the rounded sum, in f32. XLA's can be differentiated, the
    kernel cannot.

    Args:
      x: the residual stream, [..., E].
      delta: what a layer's half adds to it, of x's shape and dtype; or f32 parts of it [P, ..., E], as `split_product`
        gives them, whose sum is rounded to x's dtype; `None` for nothing.
      scale: [E], a factor a column.
      eps: added to the mean square.
      implementation: "mosaic_gpu" (Hopper), "xla" (everywhere), or `None` to pick by the devices of the mesh in use.
        "mosaic_tpu" is "xla", as there is no kernel for TPUs; and a norm without a delta is XLA's everywhere.

    Raises:
      ValueError: shapes or dtypes do not agree, or no implementation has that name.
      NotImplementedError: the kernel was asked for and cannot run here.

    Example:
      >>> y, normed = add_rms_norm(jnp.array([[1.0, 2.0]]), jnp.array([[2.0, 2.0]]), jnp.array([1.0, 10.0]), 0.0)
      >>> y.tolist(), [round(float(v), 3) for v in normed[0]]
      ([[3.0, 4.0]], [0.849, 11.314])

    Reference:
      Zhang and Sennrich, Root Mean Square Layer Normalization, https://arxiv.org/abs/1910.07467.
    """
    in_parts = delta is not None and delta.shape[1:] == x.shape and delta.dtype == jnp.float32
    if delta is not None and not in_parts and (delta.shape, delta.dtype) != (x.shape, x.dtype):
        raise ValueError(f"{delta.shape=} {delta.dtype=}; expected {x.shape} {x.dtype}, as of x, or float32 parts")
    if scale.shape != x.shape[-1:]:
        raise ValueError(f"{scale.shape=}; expected {x.shape[-1:]}, a factor a column of x")
    name = norm_implementation(implementation, x.dtype, x.shape[-1])
    if name == "mosaic_gpu" and (scale.dtype != x.dtype or max(x.size, 0 if delta is None else delta.size) >= 2**31):
        if implementation is not None:
            raise NotImplementedError(
                f"implementation {implementation!r} cannot run: it takes less than 2**31 values, and a scale of x's "
                f"dtype, {x.dtype}; {x.shape=}, {scale.dtype=}"
            )
        name = "xla"
    if name == "mosaic_gpu" and delta is not None:
        from .norm_gpu import add_rms_norm_gpu  # needs jax 0.11

        with jax.named_scope("add_norm"):
            return add_rms_norm_gpu(x, delta, scale, eps)
    with jax.named_scope("add_norm"):
        return add_rms_norm_xla(x, delta, scale, eps)


def add_rms_norm_xla(x: Array, delta: Array | None, scale: Array, eps: float) -> tuple[Array, Array]:
    """The XLA implementation of `add_rms_norm`."""
    if delta is not None and delta.ndim > x.ndim:
        delta = sum_parts(delta, x.dtype)
    y = x if delta is None else x + delta
    wide = y.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return y, (wide * inverse * scale.astype(jnp.float32)).astype(x.dtype)


def norm_implementation(implementation: str | None, dtype: Any, columns: int) -> str:
    """What runs `add_rms_norm` on rows of that many columns: "mosaic_gpu" or "xla".

    Raises:
      ValueError: no implementation has that name.
      NotImplementedError: the kernel was asked for and cannot run here.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation is {implementation!r}; expected None or one of {', '.join(IMPLEMENTATIONS)}")
    if implementation in ("xla", "mosaic_tpu"):
        return "xla"
    objection = _objection(jnp.dtype(dtype), columns)
    if objection is None:
        return "mosaic_gpu"
    if implementation is not None:
        raise NotImplementedError(f"implementation {implementation!r} cannot run: {objection}")
    return "xla"


def _objection(dtype: Any, columns: int) -> str | None:
    if jax_version() < (0, 11):
        return f"the Mosaic GPU kernel needs jax 0.11 or newer; this is {jax.__version__}"
    gpu = current_gpu() if current_platform() == "gpu" else None
    if gpu is None or not gpu.is_hopper:
        return f"the Mosaic GPU kernel needs a Hopper GPU (sm_90); the devices in use are {current_platform()}"
    if dtype.name not in ("bfloat16", "float16", "float32"):
        return f"it takes bfloat16, float16 and float32; this is {dtype}"
    if columns * dtype.itemsize % 16:
        return f"it takes rows of whole 16 bytes; these have {columns} values of {dtype}"
    return None
