"""Gumbel noise that depends on a key and a token id alone: by XLA for many rows at once, or piece by piece in a kernel.

The bits are those of `jax.random.bits` of a whole vocabulary, but any of them can be made without the others.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Integer, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
SMALLEST, LARGEST = 2.0**-31, 1 - 2.0**-24


def threefry(high: Array, low: Array, token_ids: Array) -> Array:
    """32 random bits for each token id, of a key of two words: both words of a Threefry-2x32 of 20 rounds, xored.

    Args:
      high, low: u32, the key; with `token_ids` they broadcast.
      token_ids: u32.

    Example:
      >>> import jax
      >>> key = jax.random.wrap_key_data(jnp.array([3, 4], jnp.uint32), impl="threefry2x32")
      >>> with jax.threefry_partitionable(True):
      ...     expected = jax.random.bits(key, (5,), jnp.uint32)
      >>> found = threefry(jnp.uint32(3), jnp.uint32(4), jnp.arange(5, dtype=jnp.uint32))
      >>> bool((found == expected).all())
      True

    Reference: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
    """
    keys = (high, low, high ^ low ^ jnp.uint32(_PARITY))
    x, y = high, token_ids + low  # the upper half of the counter is 0
    for turn in range(5):
        for rotation in _ROTATIONS[turn % 2]:
            x = x + y
            y = ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation))) ^ x
        x = x + keys[(turn + 1) % 3]
        y = y + (keys[(turn + 2) % 3] + jnp.uint32(turn + 1))
    return x ^ y


def uniform(bits: Array) -> Array:
    """Numbers in (0, 1) of 31 bits each.

    Example:
      >>> uniform(jnp.array([0, 2**32 - 1], jnp.uint32)).tolist()
      [2.3283064365386963e-10, 0.9999999403953552]
    """
    return jnp.minimum(((bits >> jnp.uint32(1)).astype(jnp.int32).astype(jnp.float32) + 0.5) * SMALLEST, LARGEST)


def gumbel(keys: UInt32[Array, "S 2"], token_ids: Integer[Array, "#S N"]) -> Float32[Array, "S N"]:
    """Standard Gumbel noise for each token, of a key a row.

    The uniform number keeps 31 bits, and log1p is exact where it is small, that is where the noise is large: with the
    usual 23 bits no token less likely than 1e-7 could ever be drawn.

    Example:
      >>> ids = jnp.arange(4, dtype=jnp.int32)[None]
      >>> gumbel(jnp.array([[0, 1]], jnp.uint32), ids)[:, 2:].tolist() == gumbel(
      ...     jnp.array([[0, 1]], jnp.uint32), ids[:, 2:]
      ... ).tolist()
      True
    """
    return gumbel_of(threefry(keys[:, :1], keys[:, 1:], token_ids.astype(jnp.uint32)))


def gumbel_of(bits: UInt32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Standard Gumbel noise of random bits.

    Example:
      >>> [round(float(x), 2) for x in gumbel_of(jnp.array([0, 2**32 - 1], jnp.uint32))]
      [22.18, -2.81]
    """
    return -jnp.log(-jnp.log1p(-uniform(bits)))


def gumbel_in_kernel(bits: Array) -> Array:
    """The noise of random bits, by operations that a kernel has: log(1 - u), made exact where u is small."""
    u = uniform(bits)
    rest = 1 - u
    return -jnp.log(jnp.where(rest == 1, u, -jnp.log(rest) * u / (1 - rest)))
