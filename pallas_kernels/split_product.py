"""Products of few rows in parts: the contraction is cut, and what reads the product adds the parts up.

A step's products have few rows, so a matrix of 4096 columns makes 32 tiles of 128, for 132 multiprocessors. XLA on GPUs
cuts the contraction of such a product and adds a kernel that sums the parts, unless it can fuse the sum into what reads
them, and it cannot into a kernel of ours. Said in the program, the parts go to that kernel as they are.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from .compat import current_gpu
from .dispatch import current_platform

_TILE_ROWS, _TILE_COLUMNS = 128, 128
_MIN_INPUTS = 768  # of a part: shorter ones do not pay for their sum
_MAX_PARTS = 8


def num_parts(tokens: int, inputs: int, outputs: int, multiprocessors: int) -> int:
    """The power of two that makes about a tile for each multiprocessor; 1 for what fills them whole.

    A token alone is not cut: XLA makes no matrix product of a batch of vectors times matrices, but sums that take twice
    the time.

    Example:
      >>> [num_parts(tokens, 4096, 4096, 132) for tokens in (1, 2, 256, 8192)]
      [1, 4, 2, 1]
    """
    if tokens == 1:
        return 1
    tiles, parts = -(-tokens // _TILE_ROWS) * -(-outputs // _TILE_COLUMNS), 1
    while parts < _MAX_PARTS and tiles * parts * 4 < 3 * multiprocessors and inputs % (2 * parts) == 0:
        if inputs // (2 * parts) < _MIN_INPUTS:
            break
        parts *= 2
    return parts


def best_parts(tokens: int, kernel: jax.ShapeDtypeStruct | Array) -> int:
    """How many parts a product with a kernel [K, F] is best cut into, where a kernel of ours adds them up.

    Example:
      >>> best_parts(1, jnp.zeros((4096, 4096)))  # on a CPU nothing is cut
      1
    """
    if current_platform() != "gpu" or (gpu := current_gpu()) is None:
        return 1
    inputs, outputs = kernel.shape
    return num_parts(tokens, inputs, outputs, gpu.multiprocessors)


def split_product(
    x: Float[Array, "*B K"], kernel: Float[Array, "K F"], parts: int
) -> Float[Array, "*B F"] | Float32[Array, "P *B F"]:
    """x @ kernel, or with `parts` > 1 as many f32 parts of it, whose sum it is.

    Example:
      >>> split_product(jnp.array([[1.0, 2.0, 3.0, 4.0]]), jnp.ones((4, 1)), 2).tolist()
      [[[3.0]], [[7.0]]]
    """
    if parts == 1:
        return x @ kernel
    rows = x.reshape(-1, parts, kernel.shape[0] // parts)
    cut = kernel.reshape(parts, -1, kernel.shape[1])
    # As XLA cuts them itself, so that neither operand is copied.
    product = jax.lax.dot_general(rows, cut, (((2,), (1,)), ((1,), (0,))), preferred_element_type=jnp.float32)
    return product.reshape(parts, *x.shape[:-1], kernel.shape[1])


def sum_parts(parts: Float32[Array, "P ..."], dtype) -> Array:
    """The product that parts are of, rounded to the dtype that it would have had."""
    return parts.sum(axis=0).astype(dtype)
