"""Rotary position embedding, in the half-split order of Hugging Face Llama checkpoints."""

from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


@no_type_check  # trees are also made of placeholders, which have no shape
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rope:
    """Cosines and sines of the angles of each token; made once a step and shared by all layers.

    Rotates the pair (x[i], x[i + D_rot / 2]) of the first D_rot values of a head; the others pass unchanged.

    Attributes:
      cos: cosines, [T, D_rot / 2].
      sin: sines, [T, D_rot / 2].

    Reference:
      Su et al., RoFormer, https://arxiv.org/abs/2104.09864.
    """

    cos: Float32[Array, "T D_half"]
    sin: Float32[Array, "T D_half"]


def apply_rope(x: Float[Array, "T H D"], rope: Rope) -> Float[Array, "T H D"]:
    """Rotates the heads of x by the angles of their tokens, in f32; the result has x's dtype.

    Raises:
      ValueError: the angles are of other tokens, or turn more values than a head has.

    Example:
      >>> quarter = Rope(cos=jnp.zeros((1, 1)), sin=jnp.ones((1, 1)))
      >>> apply_rope(jnp.array([[[1.0, 2.0, 3.0]]]), quarter).tolist()
      [[[-2.0, 1.0, 3.0]]]
    """
    validate_rope(x, rope)
    half = rope.cos.shape[1]
    cos, sin = rope.cos[:, None, :], rope.sin[:, None, :]
    wide = x.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)


def validate_rope(x: Float[Array, "T H D"], rope: Rope) -> None:
    """Checks that the angles are those of x's tokens, and turn no more values than its heads have.

    Raises:
      ValueError: says what was got and what was expected.
    """
    tokens, half = rope.cos.shape
    if rope.sin.shape != rope.cos.shape or tokens != x.shape[0] or 2 * half > x.shape[-1]:
        raise ValueError(
            f"{rope.cos.shape=} and {rope.sin.shape=} with {x.shape=}; expected both to be [T, D_rot / 2] with "
            f"T = {x.shape[0]} (the tokens of x) and D_rot <= {x.shape[-1]} (its head_dim)"
        )
