"""Which tiles become candidates; and what tests of the draw share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.filtered_draw import TILE, Candidates, DrawParams, find_candidates
from jpaged.pallas_kernels.noise import gumbel

NUM_TILES = 128


def maxima_of(logits) -> jax.Array:
    logits = np.asarray(logits)
    padded = np.pad(logits, ((0, 0), (0, -logits.shape[1] % TILE)), constant_values=-np.inf)
    return jax.device_put(padded.reshape(len(logits), -1, TILE).max(axis=2))


def candidates(logits, temperatures) -> Candidates:
    """As one program, and a new one each time, since a test may change how many tiles there are."""
    return jax.jit(lambda *args: find_candidates(*args))(logits, maxima_of(logits), temperatures)


def rows_of_logits(vocab_size: int) -> np.ndarray:
    """Rows of each kind that is hard in its own way."""
    rng = np.random.default_rng(vocab_size)
    logits = (rng.normal(size=(10, vocab_size)) * 3).astype(np.float32)
    logits[1] = np.round(logits[1])  # many ties
    logits[2] = 0.0  # all tie
    logits[2, ::3] = -0.0
    logits[3, ::2] = -np.inf
    logits[4, 3:] = -np.inf
    logits[5] *= 100
    logits[6] -= 1e4
    logits[7, 77] += 30  # one that is likely
    logits[8] = np.round(logits[8] * 8) / 8 - 1e-30
    logits[8, 5] = 1e34
    logits[9] = -np.inf
    logits[9, -1] = -1e34
    return logits


@jax.jit
def by_sorting(logits: jax.Array, params: DrawParams) -> tuple[jax.Array, jax.Array]:
    """Reference: the least logit that stays, and the token that is drawn; f32, by sorting."""
    vocab_size = logits.shape[1]
    scaled = logits / params.temperature[:, None]
    ordered = -jnp.sort(-scaled, axis=1)
    best = ordered[:, :1]
    top_k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, vocab_size), vocab_size)
    lowest = jnp.take_along_axis(ordered, top_k[:, None] - 1, axis=1)
    lowest = jnp.minimum(jnp.maximum(lowest, best + jnp.log(params.min_p)[:, None]), best)
    # Fixed point, as the filters have it.
    word = 31 - vocab_size.bit_length()
    weights = jnp.where(ordered >= lowest, jnp.exp(ordered - best), 0.0)
    fixed = weights * (2.0**word - 1)
    low_word = jnp.floor((fixed - jnp.floor(fixed)) * 2.0**word)
    upper, lower = (jnp.sum(x.astype(jnp.int32), axis=1).astype(jnp.float32) for x in (fixed, low_word))
    scale = 2.0**30 / ((upper + lower * 2.0**-word) / (2.0**word - 1))
    mass = jnp.cumsum(jnp.round(weights * scale[:, None]).astype(jnp.int32), axis=1)
    wanted = jnp.clip(jnp.ceil(params.top_p * mass[:, -1].astype(jnp.float32)).astype(jnp.int32), 1, mass[:, -1])
    enough = jnp.argmax(mass >= wanted[:, None], axis=1)
    threshold = jnp.maximum(jnp.take_along_axis(ordered, enough[:, None], axis=1), lowest)
    threshold = jnp.where(params.top_p[:, None] < 1, threshold, lowest)
    stays = scaled >= threshold
    noise = gumbel(params.keys, jnp.arange(vocab_size, dtype=jnp.int32)[None])
    drawn = jnp.argmax(jnp.where(stays, scaled + noise, -jnp.inf), axis=1)
    return jnp.min(jnp.where(stays, logits, jnp.inf), axis=1), drawn.astype(jnp.int32)


@pytest.mark.parametrize(("vocab_size", "temperature"), [(500, 1.0), (9_001, 1e-3), (20_000, 2.0)])
def test_candidates_are_all_that_is_above_the_bound(vocab_size: int, temperature: float) -> None:
    logits = rows_of_logits(vocab_size)
    temperatures = np.full(len(logits), temperature, np.float32)
    token_ids, taken, bound = map(np.asarray, candidates(logits, temperatures))
    assert token_ids.shape == (len(logits), NUM_TILES * TILE)
    assert (np.diff(token_ids, axis=1) > 0)[token_ids[:, 1:] < vocab_size].all()
    for row, ids, values, limit in zip(logits, token_ids, taken, bound, strict=True):
        real = ids < vocab_size
        np.testing.assert_array_equal(values[real], row[ids[real]])
        assert (values[~real] == -np.inf).all()
        assert set(np.flatnonzero(row > limit)) <= set(ids[real])


def test_there_is_room_for_few_tiles_and_it_is_used() -> None:
    logits = rows_of_logits(64_000)
    found = candidates(logits, np.ones(len(logits), np.float32))
    tiles = (np.asarray(found.token_ids) < 64_000).sum(axis=1) // TILE
    assert (tiles <= NUM_TILES).all()
    assert tiles[0] > 100
    # All that is not -inf, be it as little as one token.
    assert np.asarray(found.bound)[[4, 9]].tolist() == [-np.inf, -np.inf]
    assert tiles[2] == 0  # a tie of all
