"""`after_attention`: what follows a layer's attention, up to the projection of the next one's, for few rows."""

import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from .compat import current_gpu
from .layer_plan_gpu import LayerPlan, plan_layer
from .norm import add_rms_norm_xla, norm_implementation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerWeights:
    """The kernels [in, out] and norm scales that `after_attention` multiplies by, all of one dtype.

    Attributes:
      o: [Hq * D, E].
      mlp_scale: [E].
      gate_up: [E, 2 F], gate's columns first.
      down: [F, E].
      scale: [E], of the norm before the next layer's attention; `None` for the last layer.
      qkv: [E, (Hq + 2 Hkv) * D] of the next layer; `None` for the last one.
    """

    o: Any
    mlp_scale: Any
    gate_up: Any
    down: Any
    scale: Any
    qkv: Any


def layer_plan(tokens: int, weights: LayerWeights) -> LayerPlan | None:
    """How the kernel for Hopper does `after_attention` of so many tokens; `None` where it is better left to XLA.

    Example:
      >>> ones = jnp.ones((64, 64)), jnp.ones(64), jnp.ones((64, 128)), jnp.ones((64, 64))
      >>> layer_plan(1, LayerWeights(*ones, None, None)) is None  # on a CPU
      True
    """
    dtype, hidden = weights.o.dtype, weights.o.shape[1]
    if dtype.itemsize != 2 or {x.dtype for x in jax.tree.leaves(weights)} != {dtype}:
        return None
    gpu = current_gpu()
    if gpu is None or _is_under_mps() or norm_implementation(None, dtype, hidden) != "mosaic_gpu":
        return None
    projected = None if weights.qkv is None else weights.qkv.shape[1]
    return plan_layer(tokens, hidden, weights.o.shape[0], weights.down.shape[0], projected, gpu.multiprocessors)


def _is_under_mps() -> bool:
    """Whether processes may share a GPU's multiprocessors, so that a kernel's blocks might never run all at once."""
    return "CUDA_MPS_PIPE_DIRECTORY" in os.environ or os.path.exists("/tmp/nvidia-mps/control")


def after_attention(
    x: Float[Array, "T E"],
    attended: Float[Array, "T A"],
    weights: LayerWeights,
    arrivals: Int32[Array, "1"],
    *,
    eps: float,
    plan: LayerPlan,
) -> tuple[Float[Array, "T E"], Float32[Array, "P T E"] | None, Float32[Array, "R T N"] | None, Int32[Array, "1"]]:
    """The rest of a layer in one kernel for Hopper; `after_attention_xla` says what it computes.

    Args:
      arrivals: one 0 for the first layer of a step, then what the layer before gave. Kernels count in it.
      plan: of `layer_plan`.

    Returns:
      the stream; f32 parts of what is still to be added to it, for the last layer, else `None`; f32 parts of the next
      projection, or `None`; and `arrivals`.

    Raises:
      ValueError: x, attended and the weights are not all of one dtype.
    """
    dtypes = sorted({array.dtype.name for array in jax.tree.leaves(weights)})
    if dtypes != [x.dtype.name] or attended.dtype != x.dtype:  # the kernel would take the bits of one for another
        raise ValueError(f"{x.dtype=} {attended.dtype=}, weights of {', '.join(dtypes)}; expected one dtype")
    from .layer_gpu import after_attention_gpu  # needs jax 0.11

    with jax.named_scope("after_attention"):
        return after_attention_gpu(x, attended, weights, arrivals, plan=plan, eps=eps)


def after_attention_xla(
    x: Float[Array, "T E"], attended: Float[Array, "T A"], weights: LayerWeights, eps: float
) -> tuple[Float[Array, "T E"], Float[Array, "T E"] | None, Float[Array, "T N"] | None]:
    """What `after_attention` computes, in XLA, with nothing in parts.

    Returns:
      the stream [T, E]; what is still to be added to it, for the last layer, else `None`; the next projection.

    Example:
      >>> one = jnp.ones((1, 1))
      >>> weights = LayerWeights(one, jnp.ones(1), jnp.ones((1, 2)), one, jnp.ones(1), one)
      >>> stream, _, projected = after_attention_xla(one, one, weights, 0.0)
      >>> round(float(stream[0, 0]), 3), round(float(projected[0, 0]), 3)
      (2.731, 1.0)
    """
    x, normed = add_rms_norm_xla(x, attended @ weights.o, weights.mlp_scale, eps)
    gate, up = jnp.split(normed @ weights.gate_up, 2, axis=-1)
    delta = (jax.nn.silu(gate) * up) @ weights.down
    if weights.scale is None or weights.qkv is None:
        return x, delta, None
    x, normed = add_rms_norm_xla(x, delta, weights.scale, eps)
    return x, None, normed @ weights.qkv
