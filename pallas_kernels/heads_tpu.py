"""Rows of (token, head) taken apart by head, and put together again, in a TPU's vector memory.

A strided load takes every n-th row of 32-bit values. Of bf16, two rows share a word: an even number of heads is taken
apart in pairs, word by word, and a word into its halves. What is not bf16, or has an odd number of heads, is widened to
f32 first. Strides and bit casts want buffers of 128 lanes, so wider rows are kept in slabs.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from .tpu_tuning import LANES

_HIGH = 0xFFFF0000  # of a word, the half that holds the odd row


def in_pairs(dtype: Any, heads: int) -> bool:
    """Whether rows of `dtype` are taken apart as words of two heads."""
    return jnp.dtype(dtype) == jnp.bfloat16 and heads % 2 == 0


def buffer_shape(rows: int, width: int, dtype: Any, heads: int) -> tuple[tuple[int, int, int], Any]:
    """Shape and dtype of the buffer that `put_rows` and `take_head` need for [rows, width] values."""
    pairs = in_pairs(dtype, heads)
    return (width // LANES, rows // 2 if pairs else rows, LANES), jnp.uint32 if pairs else jnp.float32


def put_rows(buffer: Any, rows: Array, heads: int) -> None:
    """Stores rows of (token, head), of any dtype; f32 values are ready to be scaled before."""
    pairs, n = in_pairs(rows.dtype, heads), rows.shape[0]
    for slab in range(rows.shape[1] // LANES):
        part = rows[:, slab * LANES : (slab + 1) * LANES]
        if pairs:
            buffer[slab, : n // 2] = pltpu.bitcast(part, jnp.uint32)
        else:
            buffer[slab, :n] = part.astype(jnp.float32)


def take_head(buffer: Any, head: Any, slab: int, *, parity: int, heads: int, tokens: int, dtype: Any) -> Array:
    """Loads 128 lanes of one head of `tokens` tokens.

    Args:
      head: which one; may be a tracer.
      parity: head % 2, static.
    """
    if buffer.dtype != jnp.uint32:
        return buffer[slab, _every(head, tokens, heads), :].astype(dtype)
    words = buffer[slab, _every(head // 2, tokens, heads // 2), :]
    half = words & jnp.uint32(_HIGH) if parity else words << 16
    return lax.bitcast_convert_type(half, jnp.float32).astype(dtype)


def put_heads(buffer: Any, slab: int, pair: int, even: Array, odd: Array, *, heads: int) -> None:
    """Stores 128 lanes of heads 2 * pair and 2 * pair + 1, f32 [tokens, 128], for `rows_of`."""
    tokens = even.shape[0]
    if buffer.dtype != jnp.uint32:
        buffer[slab, _every(2 * pair, tokens, heads), :] = even
        buffer[slab, _every(2 * pair + 1, tokens, heads), :] = odd
        return
    low, high = (lax.bitcast_convert_type(x.astype(jnp.bfloat16).astype(jnp.float32), jnp.uint32) for x in (even, odd))
    buffer[slab, _every(pair, tokens, heads // 2), :] = (high & jnp.uint32(_HIGH)) | (low >> 16)


def rows_of(buffer: Any, slab: int, rows: int, dtype: Any) -> Array:
    """Loads 128 lanes of the rows of (token, head) that `put_heads` stored."""
    if buffer.dtype == jnp.uint32:
        return pltpu.bitcast(buffer[slab, : rows // 2], jnp.bfloat16)
    return buffer[slab, :rows].astype(dtype)


def _every(start: Any, tokens: int, stride: int) -> Any:
    return pl.ds(start, tokens) if stride == 1 else pl.ds(start, tokens, stride=stride)


def to_column(lanes: Array) -> Array:
    """Turns f32 [1, 128] into [128, 128] whose row i holds lane i everywhere."""
    return jnp.transpose(jnp.broadcast_to(lanes, (LANES, LANES)))
