"""Log-probabilities of sampled, of likeliest and of prompt tokens, of the model's raw distribution."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

_CHUNK_TOKENS = 64
_TILE = 64


class Logprobs(NamedTuple):
    """Log-probabilities of N tokens, one a row.

    Attributes:
      logprob: of the token itself.
      top_ids: the K likeliest tokens, best first, ties in the order of their ids.
      top_logprobs: theirs; -inf past the end of a vocabulary smaller than K.
    """

    logprob: Float32[Array, " N"]
    top_ids: Int32[Array, "N K"]
    top_logprobs: Float32[Array, "N K"]


def token_logprobs(logits: Float32[Array, "N V"], token_ids: Int32[Array, " N"], max_top: int) -> Logprobs:
    """Log-probabilities of one token a row, and of the `max_top` likeliest tokens.

    Args:
      logits: raw, before temperature, penalties and bias.
      token_ids: the tokens; -1 (a row that failed) reads token 0.
      max_top: K, static; may be 0.

    Example:
      >>> found = token_logprobs(jnp.log(jnp.array([[0.5, 0.125, 0.375]])), jnp.array([1], jnp.int32), 2)
      >>> jnp.exp(found.logprob).round(3).tolist(), found.top_ids.tolist()
      ([0.125], [[0, 2]])
    """
    normaliser = jax.nn.logsumexp(logits, axis=1)
    chosen = jnp.take_along_axis(logits, jnp.maximum(token_ids, 0)[:, None], axis=1)[:, 0]
    num_top = min(max_top, logits.shape[1])
    top_logits, top_ids = _likeliest(logits, num_top)
    missing = ((0, 0), (0, max_top - num_top))
    return Logprobs(
        logprob=chosen - normaliser,
        top_ids=jnp.pad(top_ids, missing),
        top_logprobs=jnp.pad(top_logits - normaliser[:, None], missing, constant_values=-jnp.inf),
    )


def prompt_logprobs(
    hidden: Float[Array, "T E"], next_tokens: Int32[Array, " T"], logits_fn: Callable[[Array], Array], max_top: int
) -> Logprobs:
    """Log-probabilities of the token that follows each token of the step, and of the `max_top` likeliest.

    The step's tokens are walked in chunks, so that logits of all of them never exist at once.

    Args:
      hidden: the model's last hidden states.
      next_tokens: the token after each; anything in [0, V) where there is none.
      logits_fn: hidden [n, E] to logits f32[n, V].
      max_top: K, static; may be 0.

    Example:
      >>> found = prompt_logprobs(jnp.eye(3), jnp.array([0, 1, 1], jnp.int32), lambda h: h * 9.0, 1)
      >>> found.top_ids.tolist(), bool(found.logprob[1] > found.logprob[2])
      ([[0], [1], [2]], True)
    """
    num_tokens = hidden.shape[0]
    chunk = min(_CHUNK_TOKENS, num_tokens)
    padding = -num_tokens % chunk
    chunks = (
        jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, chunk, hidden.shape[1]),
        jnp.pad(next_tokens, (0, padding)).reshape(-1, chunk),
    )
    found = jax.lax.map(lambda pair: token_logprobs(logits_fn(pair[0]), pair[1], max_top), chunks)
    return jax.tree.map(lambda x: x.reshape(num_tokens + padding, *x.shape[2:])[:num_tokens], found)


def _likeliest(logits: Float32[Array, "N V"], num_top: int) -> tuple[Float32[Array, "N k"], Int32[Array, "N k"]]:
    """The largest logits of each row and their tokens, best first, ties in the order of the ids.

    Whoever is among the k best is in one of the k tiles whose best are the best, the earlier of two that tie: each of
    them holds a better one than any in the other tiles. So only k tiles are ordered, not the vocabulary.
    """
    num_rows, vocab_size = logits.shape
    if num_top == 0:
        return logits[:, :0], jnp.zeros((num_rows, 0), jnp.int32)
    num_tiles = -(-vocab_size // _TILE)
    if num_tiles <= 2 * num_top:
        top_logits, top_ids = jax.lax.top_k(logits, num_top)
        return top_logits, top_ids
    padding = ((0, 0), (0, num_tiles * _TILE - vocab_size))  # it comes last: its ids are the highest
    tiles = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(num_rows, num_tiles, _TILE)
    best_tiles = jnp.sort(jax.lax.top_k(jnp.max(tiles, axis=2), num_top)[1], axis=1)
    candidates = jnp.take_along_axis(tiles, best_tiles[:, :, None], axis=1).reshape(num_rows, num_top * _TILE)
    top_logits, at = jax.lax.top_k(candidates, num_top)
    tile = jnp.take_along_axis(best_tiles, at // _TILE, axis=1)
    return top_logits, (tile * _TILE + at % _TILE).astype(jnp.int32)
