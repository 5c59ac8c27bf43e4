"""How the sampler goes through the logits: tiles and their best, noise, what is broken, on every device and kind."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.noise import gumbel
from jpaged.request import SamplingParams
from jpaged.sampler import _argmax, _noise, _tiles, _without_nan, choose_tokens
from jpaged.sampling_rows import sampling_fields, unpack_sampling_rows
from tests.test_sampler import CPU, GPU, S, V, jit_choose, random_logits, row, rows_on_device

on_every_device = pytest.mark.parametrize("tuning", [CPU, GPU], ids=["cpu", "gpu"])

# Each kind that draws, and how its rows filter.
DRAWING = {"draw": {}, "filter": {"top_p": 0.9, "top_k": V - 1, "min_p": 1e-3}, "full": {}}


@on_every_device
@pytest.mark.parametrize("vocab_size", [1, 3, 256, 97 * 64])
def test_any_vocabulary_size(vocab_size, tuning):
    logits = np.round(random_logits(6, num_rows=3, vocab_size=vocab_size))

    def argmax(logits):
        return _argmax(_tiles(_without_nan(logits)), tuning)

    best, token_ids, maxima = jax.jit(argmax)(logits)
    np.testing.assert_array_equal(maxima.max(axis=1), best)
    np.testing.assert_array_equal(token_ids, logits.argmax(axis=1))
    np.testing.assert_array_equal(best, logits.max(axis=1))
    logits[1, -1] = np.nan
    assert np.isfinite(jax.jit(argmax)(logits)[0]).tolist() == [True, False, True]


def test_only_rows_that_draw_have_noise():
    keys = jnp.asarray(np.random.default_rng(8).integers(0, 2**32, (4, 2), np.uint32))
    draws = jnp.array([True, False, False, True])
    expected = np.asarray(gumbel(keys, jnp.arange(V, dtype=jnp.int32)[None])) * np.asarray(draws)[:, None]
    np.testing.assert_allclose(jax.jit(_noise, static_argnums=2)(keys, draws, V), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@on_every_device
def test_broken_logits_where_rows_take_and_draw(value, tuning):
    logits = random_logits(15)
    logits[0, 0] = logits[1, V - 1] = value
    logits[2:4] = -np.inf
    logits[4, 1:] = logits[5, 1:] = -np.inf
    rows = rows_on_device([row(SamplingParams(temperature=i % 2)) for i in range(S)])
    tokens = np.asarray(jit_choose(logits, rows, "draw", tuning))
    assert tokens[:6].tolist() == [-1, -1, -1, -1, 0, 0]
    assert (tokens[6:] >= 0).all()


@on_every_device
def test_logits_that_overflow_when_divided_are_not_broken(tuning):
    logits = np.full((S, V), -1e36, np.float32)
    logits[:, 7] = np.linspace(-1e37, 1e37, S)
    expected = np.where(logits[:, 7] > 0, 7, 0)  # below, all are as unlikely as can be
    rows = rows_on_device([row(SamplingParams(temperature=1e-4))] * S)
    np.testing.assert_array_equal(jit_choose(logits, rows, "draw", tuning), expected)


@on_every_device
@pytest.mark.parametrize("kind", DRAWING)
def test_finite_logits_that_overflow_when_divided_stay_above_banned_ones(kind, tuning):
    logits = np.full((S, V), -1e36, np.float32)
    logits[:, :5] = -np.inf
    logits[1] = -np.inf
    logits[2, 9] = np.nan
    logits[3, 9:11] = [1e36, 2e36]
    params = SamplingParams(temperature=1e-4, **DRAWING[kind])
    found = jit_choose(logits, rows_on_device([row(params, position=i) for i in range(S)]), kind, tuning)
    # As unlikely, or as likely, as can be are all that overflow.
    np.testing.assert_array_equal(found, [5, -1, -1, 9, *[5] * (S - 4)])


@pytest.mark.parametrize(("kind", "tuning"), [("greedy", CPU), ("greedy", GPU), ("draw", GPU)], ids=str)
def test_the_logits_are_gone_through_once(kind, tuning):
    def program(logits, fields):
        return choose_tokens(logits, unpack_sampling_rows(fields), kind, tuning)

    num_rows, vocab_size = 4, 16 * 256
    fields = jnp.asarray(sampling_fields([row(SamplingParams())], num_rows, num_rows))
    text = jax.jit(program).lower(jnp.zeros((num_rows, vocab_size)), fields).compile().as_text()
    shapes = dict(re.findall(r"(%?[\w.-]+) = f32\[([\d,]+)\]", text))
    of = [operands.split(",")[0].strip() for operands in re.findall(r" reduce\(([^)]*)\)", text)]
    sizes = [math.prod(map(int, shapes[name].split(","))) for name in of if name in shapes]
    assert max(sizes) == num_rows * vocab_size
    assert sum(size == num_rows * vocab_size for size in sizes) == 1
