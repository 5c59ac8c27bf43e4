"""`Linear`: a matrix product whose kernel is stored [in, out]."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

# The standard deviation of fresh weights, as in the Llama family.
INIT_SCALE = 0.02


class Linear(nnx.Module):
    """x @ kernel (+ bias); kernel [in, out]."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, rngs: nnx.Rngs, dtype: DTypeLike):
        self.kernel = nnx.Param(normal(rngs, (inputs, outputs), dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "*B in"]) -> Float[Array, "*B out"]:
        y = self._product(x)
        return y if self.bias is None else y + self.bias[...]

    def _product(self, x: Float[Array, "*B in"]) -> Float[Array, "*B out"]:
        if math.prod(x.shape[:-1]) != 1 or x.dtype.itemsize > 2:
            return x @ self.kernel[...]
        # XLA for GPUs makes a multiplication and a sum of one short row's product, and would round in between.
        return jnp.matmul(x, self.kernel[...], preferred_element_type=jnp.float32).astype(x.dtype)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Fresh weights."""
    return (INIT_SCALE * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)
