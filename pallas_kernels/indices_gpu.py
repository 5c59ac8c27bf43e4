"""Integer arithmetic of work lists, without the code for cases that they do not have.

A list is a few hundred operations on small arrays, made once a step: little to do, but each operation is traced, and
XLA copies cheap ones into every kernel that uses them. What jax's own operators say of negative numbers and of indices
out of bounds would be most of the program, and of the time in which it compiles.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def arange(n: int) -> Array:
    """0 to n - 1, int32."""
    return jnp.arange(n, dtype=jnp.int32)


def take(x: Array, index: Array) -> Array:
    """x[index], of indices in bounds.

    Example:
      >>> take(jnp.array([5, 6, 7]), jnp.array([2, 0])).tolist()
      [7, 5]
    """
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def div(a: Array, b: Array | int) -> Array:
    """a // b, of int32 a >= 0 and b > 0.

    Example:
      >>> div(jnp.array([7, 8]), 4).tolist()
      [1, 2]
    """
    return lax.div(*jnp.broadcast_arrays(a, jnp.asarray(b, jnp.int32)))


def ceil_div(a: Array, b: Array | int) -> Array:
    """The least integer of at least a / b, likewise.

    Example:
      >>> ceil_div(jnp.array([0, 7, 8]), 4).tolist()
      [0, 2, 2]
    """
    return div(a + (b - 1), b)


def rem(a: Array, b: Array | int) -> Array:
    """a % b, likewise.

    Example:
      >>> rem(jnp.array([7, 8]), 4).tolist()
      [3, 0]
    """
    return lax.rem(*jnp.broadcast_arrays(a, jnp.asarray(b, jnp.int32)))
