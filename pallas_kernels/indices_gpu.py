"""Integer arithmetic of work lists, without the code for cases that they do not have.

A list is a few hundred operations on small arrays, made once a step: little to do, but each operation is traced, and
XLA copies cheap ones into every kernel that uses them. What jax's own operators say of negative numbers and of indices
out of bounds would be most of the program, and of the time in which it compiles.

It is kernels that take the time here, and XLA makes one of a reduction and of all that its terms are computed from. So
a list is made in *rounds*, each one reduction of several arrays (`reduce_rows`): prefix sums, searches and permutations
are sums over all pairs of a few hundred. What a later round looks up by index is brought along (`diagonal`), as what
is computed between rounds would be a kernel of its own.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
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
    if isinstance(b, int) and b & (b - 1) == 0:  # XLA takes divisions for dear, and is loath to do them more than once
        return a if b == 1 else lax.shift_right_arithmetic(a, jnp.full_like(a, b.bit_length() - 1))
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


def reduce_rows(
    sums: Sequence[Array] = (), *, least: Sequence[Array] = (), most: Sequence[Array] = ()
) -> tuple[Array, ...]:
    """Sums, then least, then greatest numbers along the last axis, int32 each: one reduction of them all.

    The arrays are broadcast to one shape.

    Example:
      >>> [x.tolist() for x in reduce_rows([jnp.array([[1, 2], [3, 4]])], most=[jnp.array([[5], [6]])])]
      [[3, 7], [5, 6]]
    """
    arrays = jnp.broadcast_arrays(*sums, *least, *most)
    limits = np.iinfo(np.int32)
    kinds = [(lax.add, 0)] * len(sums) + [(lax.min, limits.max)] * len(least) + [(lax.max, limits.min)] * len(most)
    return tuple(
        lax.reduce(
            tuple(arrays),
            tuple(np.int32(start) for _, start in kinds),
            lambda a, b: tuple(operation(x, y) for (operation, _), x, y in zip(kinds, a, b, strict=True)),
            (arrays[0].ndim - 1,),
        )
    )


def diagonal(x: Array, here: Array, there: Array) -> Array:
    """Terms whose sum along the last axis is x itself, for indices [n, 1] and [1, n]."""
    return jnp.where(here == there, x[None, :], 0)


def pad(x: Array, length: int) -> Array:
    """x with zeros behind it.

    Example:
      >>> pad(jnp.array([1, 2]), 3).tolist()
      [1, 2, 0]
    """
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, length - x.shape[0], 0)])
