"""Products between kernels of ours: cut along the contraction, or with what follows them on registers.

A step's products have few rows, so a matrix of 4096 columns makes 32 tiles of 128, for 132 multiprocessors. XLA on GPUs
cuts the contraction of such a product and adds a kernel that sums the parts, unless it can fuse the sum into what reads
them, and it cannot into a kernel of ours. So the parts go to that kernel as they are. On Hopper products of few rows
have a kernel of their own (`product_gpu`), and gate and up of many rows another (`gated_gpu`); `product_plan_gpu` says
which, and others are XLA's, with the cut said in the program.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from .compat import current_gpu, jax_version
from .dispatch import current_platform
from .product_plan_gpu import GatedBlocks, ProductBlocks, Result, gated_blocks, product_blocks

_Blocks = TypeVar("_Blocks", ProductBlocks, GatedBlocks)
_TILE_ROWS, _TILE_COLUMNS = 128, 128
_MIN_INPUTS = 768  # of a part: shorter ones do not pay for their sum
_MAX_PARTS = 8


def num_parts(tokens: int, inputs: int, outputs: int, multiprocessors: int) -> int:
    """The power of two that makes about a tile of XLA's for each multiprocessor; 1 for what fills them whole.

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


def _own_blocks(rule: Callable[..., _Blocks | None], x: Array, kernel: Array, *result: Result) -> _Blocks | None:
    """How a kernel of ours multiplies them, by its rule; `None` where none does."""
    gpu = current_gpu() if current_platform() == "gpu" else None
    if gpu is None or not gpu.is_hopper or jax_version() < (0, 11):
        return None
    if x.dtype != kernel.dtype or x.dtype.itemsize != 2:
        return None
    return rule(math.prod(x.shape[:-1]), *kernel.shape, *result, gpu.multiprocessors)


def split_product(x: Float[Array, "*B K"], kernel: Float[Array, "K F"]) -> Float[Array, "..."]:
    """x @ kernel [*B, F], or f32 parts of it [P, *B, F], whose sum it is: for a kernel that adds them up.

    On anything but a GPU it is the product.

    Example:
      >>> split_product(jnp.array([[1.0, 2.0]]), jnp.ones((2, 1))).tolist()
      [[3.0]]
    """
    if current_platform() != "gpu" or (gpu := current_gpu()) is None:
        return x @ kernel
    blocks = _own_blocks(product_blocks, x, kernel, "parts")
    if blocks is None:
        inputs, outputs = kernel.shape
        return cut_product(x, kernel, num_parts(math.prod(x.shape[:-1]), inputs, outputs, gpu.multiprocessors))
    from .product_gpu import product_gpu  # needs jax 0.11

    result: Result = "parts" if blocks.parts > 1 else "product"
    product = product_gpu(x.reshape(-1, x.shape[-1]), kernel, result=result, blocks=blocks)
    return product.reshape(*product.shape[:-2], *x.shape[:-1], kernel.shape[1])


def gated_product(x: Float[Array, "*B K"], kernel: Float[Array, "K F2"]) -> Float[Array, "*B F"]:
    """silu(x @ gate) * (x @ up), for a kernel that holds gate's columns and then up's.

    Where a kernel of ours computes it, both factors are in f32 and their product is rounded once. It has no derivative.

    Example:
      >>> round(float(gated_product(jnp.ones((1, 1)), jnp.array([[1.0, 2.0]]))[0, 0]), 4)
      1.4621
    """
    rows = x.reshape(-1, x.shape[-1])
    if (blocks := _own_blocks(product_blocks, x, kernel, "silu")) is not None:
        from .product_gpu import product_gpu  # needs jax 0.11

        product = product_gpu(rows, kernel, result="silu", blocks=blocks)
    elif (many := _own_blocks(gated_blocks, x, kernel)) is not None:
        from .gated_gpu import gated_gpu  # needs jax 0.11

        product = gated_gpu(rows, kernel, blocks=many)
    else:
        gate, up = jnp.split(x @ kernel, 2, axis=-1)
        return jax.nn.silu(gate) * up
    return product.reshape(*x.shape[:-1], kernel.shape[1] // 2)


def cut_product(
    x: Float[Array, "*B K"], kernel: Float[Array, "K F"], parts: int
) -> Float[Array, "*B F"] | Float32[Array, "P *B F"]:
    """x @ kernel, or with `parts` > 1 as many f32 parts of it, whose sum it is.

    Example:
      >>> cut_product(jnp.array([[1.0, 2.0, 3.0, 4.0]]), jnp.ones((4, 1)), 2).tolist()
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
