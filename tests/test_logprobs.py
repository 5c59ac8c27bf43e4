"""Log-probabilities against numpy, and chunks against the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.logprobs import prompt_logprobs, token_logprobs

V = 53


def log_softmax(logits):
    x = logits.astype(np.float64)
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def random_logits(num_rows, seed=0):
    return (np.random.default_rng(seed).normal(size=(num_rows, V)) * 4).astype(np.float32)


@pytest.mark.parametrize("max_top", [0, 1, 5, V])
def test_token_logprobs_are_those_of_numpy(max_top):
    logits = random_logits(6)
    logits[2] += 1e4
    token_ids = np.array([0, V - 1, 7, 7, 20, 3], np.int32)
    found = jax.jit(token_logprobs, static_argnums=2)(logits, token_ids, max_top)
    expected = log_softmax(logits)
    np.testing.assert_allclose(found.logprob, expected[np.arange(6), token_ids], atol=2e-3, rtol=0)
    order = np.argsort(-expected, axis=1, kind="stable")[:, :max_top]
    np.testing.assert_array_equal(found.top_ids, order)
    np.testing.assert_allclose(found.top_logprobs, np.take_along_axis(expected, order, axis=1), atol=2e-3, rtol=0)


def test_more_asked_for_than_the_vocabulary_has():
    logits = random_logits(2)
    found = token_logprobs(jnp.asarray(logits), jnp.zeros(2, jnp.int32), V + 3)
    assert found.top_ids.shape == found.top_logprobs.shape == (2, V + 3)
    assert (np.asarray(found.top_logprobs)[:, V:] == -np.inf).all()
    assert (np.asarray(found.top_logprobs)[:, :V] > -np.inf).all()


def test_a_failed_row_harms_nobody():
    logits = random_logits(3)
    clean = token_logprobs(jnp.asarray(logits), jnp.array([4, 5, 6], jnp.int32), 3)
    logits[1] = np.nan
    found = token_logprobs(jnp.asarray(logits), jnp.array([4, -1, 6], jnp.int32), 3)
    for leaf, expected in zip(found, clean, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf)[[0, 2]], np.asarray(expected)[[0, 2]])


@pytest.mark.parametrize("vocab_size", [1000, 64 * 20])
def test_the_likeliest_of_a_large_vocabulary_by_rank_then_by_id(vocab_size):
    rng = np.random.default_rng(2)
    logits = np.round(rng.normal(size=(40, vocab_size)) * 2).astype(np.float32)  # nearly all tie
    logits[1] = 0.0
    logits[2, 7:] = -np.inf
    found = jax.jit(token_logprobs, static_argnums=2)(logits, np.zeros(40, np.int32), 5)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(found.top_ids, order)
    expected = np.take_along_axis(log_softmax(logits), order, axis=1)
    np.testing.assert_allclose(found.top_logprobs, expected, atol=2e-3, rtol=0)


class TestPromptLogprobs:
    @pytest.mark.parametrize("num_tokens", [1, 63, 64, 130])
    def test_chunks_equal_the_whole(self, num_tokens):
        rng = np.random.default_rng(1)
        hidden = jnp.asarray(rng.normal(size=(num_tokens, 8)), jnp.float32)
        head = jnp.asarray(rng.normal(size=(8, V)), jnp.float32)
        next_tokens = jnp.asarray(rng.integers(0, V, num_tokens), jnp.int32)
        found = prompt_logprobs(hidden, next_tokens, lambda h: h @ head, 4)
        whole = token_logprobs(hidden @ head, next_tokens, 4)
        assert found.logprob.shape == (num_tokens,)
        np.testing.assert_array_equal(found.top_ids, whole.top_ids)
        np.testing.assert_allclose(found.logprob, whole.logprob, atol=1e-5)
        np.testing.assert_allclose(found.top_logprobs, whole.top_logprobs, atol=1e-5)

    def test_logits_of_all_tokens_never_exist_at_once(self):
        num_tokens, vocab_size = 1024, 5000
        head = jnp.zeros((8, vocab_size))
        call = jax.jit(lambda h, t: prompt_logprobs(h, t, lambda x: x @ head, 4))
        args = (jnp.zeros((num_tokens, 8)), jnp.zeros(num_tokens, jnp.int32))
        memory = call.lower(*args).compile().memory_analysis()
        assert memory.temp_size_in_bytes < num_tokens * vocab_size * 4 / 3


def test_no_top_tokens_can_be_asked_for():
    hidden = jnp.eye(3)
    found = prompt_logprobs(hidden, jnp.array([0, 1, 1], jnp.int32), lambda h: h * 9.0, 0)
    assert found.top_ids.shape == found.top_logprobs.shape == (3, 0)
    assert float(found.logprob[0]) == pytest.approx(float(jax.nn.log_softmax(hidden * 9.0)[0, 0]), abs=1e-6)
