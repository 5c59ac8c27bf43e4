"""`add_rms_norm` for Hopper in Pallas Mosaic GPU: one launch, a warpgroup a row, each value read and written once.

    rows of x and of delta's parts -> their sum, rounded -> its mean square over the threads -> sum, normed

All of a row is in flight at once, 16 bytes a thread and turn, and stays in registers. With few rows the time is that of
one load, one reduction and one store; with many, that of the memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from .columns_gpu import PlainColumns, RegisterColumns, columns_of


@functools.partial(jax.jit, static_argnames=("eps", "parts", "interpret"))
def _add_rms_norm(x, delta, scale, *, eps: float, parts: int, interpret: Any):
    """The kernel call on x [T, E] and delta [parts * T, E]; jitted, so that equal layers are lowered once."""
    tokens, embed = x.shape
    columns = columns_of(embed, x.dtype)
    moves = PlainColumns if interpret else RegisterColumns

    def body(x_ref, delta_ref, scale_ref, sum_ref, normed_ref):
        row = lax.axis_index("row")
        stream = moves.load(x_ref, row, columns)
        loaded = [moves.load(delta_ref, part * tokens + row, columns) for part in range(parts)]
        factors = moves.load(scale_ref, 0, columns)
        added = functools.reduce(jnp.add, (part.astype(jnp.float32) for part in loaded))
        if parts > 1 or delta.dtype != x.dtype:  # as a product that is not cut is rounded; one part is f32, too
            added = added.astype(x.dtype).astype(jnp.float32)
        y = (stream.astype(jnp.float32) + added).astype(x.dtype)
        moves.store(sum_ref, row, columns, y)
        wide = y.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.sum(wide * wide) / embed + eps)
        normed = wide * inverse * factors.astype(jnp.float32)
        moves.store(normed_ref, row, columns, normed.astype(x.dtype))

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2,
        grid=(tokens,),
        grid_names=("row",),
        kernel_name="add_rms_norm",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,  # threads share the sum of squares alone, whose reduction has its own
            lowering_semantics=mgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
    )(x, delta, scale.reshape(1, embed))


def add_rms_norm_gpu(
    x: Float[Array, "*B E"],
    delta: Float[Array, "..."],
    scale: Float[Array, " E"],
    eps: float,
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "*B E"], Float[Array, "*B E"]]:
    """The Mosaic GPU implementation of `add_rms_norm`.

    Args:
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    rows = x.reshape(-1, x.shape[-1])
    parts = 1 if delta.ndim == x.ndim else delta.shape[0]
    y, normed = _add_rms_norm(
        rows,
        delta.reshape(-1, x.shape[-1]),
        scale.astype(x.dtype),
        eps=eps,
        parts=parts,
        interpret=interpret,
    )
    return y.reshape(x.shape), normed.reshape(x.shape)
