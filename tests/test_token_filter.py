"""`filter_logits` against a reference that sorts, compiled in each way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.request import SamplingParams
from jpaged.sampler_tuning import TUNINGS, SamplerTuning
from jpaged.token_filter import filter_logits
from tests.test_sampler import S, V, kept_tokens, random_logits, row, rows_on_device

CPU, GPU = TUNINGS["cpu"], TUNINGS["gpu"]
jit_filter = jax.jit(filter_logits, static_argnums=3)


def filtered(logits, params, tuning=CPU):
    """Which tokens `filter_logits` keeps, in a batch of S rows with these params."""
    rows = rows_on_device([row(params)] * len(logits), len(logits))
    scaled = jnp.asarray(logits) / params.temperature
    return np.asarray(jit_filter(scaled, rows, rows.samples, tuning)) > -np.inf


FILTERS = [
    {"top_k": 2},
    {"top_k": 40},
    {"top_k": V},
    {"top_k": 10**12},
    {"top_p": 0.9},
    {"top_p": 0.5, "temperature": 2.0},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"top_p": 5e-324},  # 0 in float32
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 7, "min_p": 0.3},
    {"top_k": 60, "top_p": 0.95, "min_p": 0.01, "temperature": 0.7},
]


class TestFilters:
    @pytest.mark.parametrize(
        "tuning", [CPU, GPU, SamplerTuning(bits=4, branches=True)], ids=["cpu", "gpu", "four-bits"]
    )
    @pytest.mark.parametrize("fields", FILTERS, ids=str)
    def test_keeps_what_the_reference_keeps(self, fields, tuning):
        params = SamplingParams(**fields)
        logits = random_logits(1)
        logits[3] -= 1e4  # large negative
        logits[4] = np.round(logits[4])  # many ties
        logits[5, ::2] = -np.inf
        logits[6] = 0.0  # all equal, all tie
        logits[7, 1:] = -np.inf
        logits[8] *= 100
        expected = np.stack([kept_tokens(x, params) for x in logits]) & (logits > -np.inf)
        np.testing.assert_array_equal(filtered(logits, params, tuning), expected)

    @pytest.mark.parametrize("fields", [{"top_p": 0.95}, {"top_k": 1000, "top_p": 0.99}], ids=str)
    def test_a_large_vocabulary_is_as_exact(self, fields):
        params = SamplingParams(**fields)
        logits = random_logits(2, num_rows=2, vocab_size=50_021)
        expected = np.stack([kept_tokens(x, params) for x in logits])
        assert expected.sum() > 100
        np.testing.assert_array_equal(filtered(logits, params), expected)

    def test_kept_logits_are_unchanged(self):
        rows = rows_on_device([row(SamplingParams(top_k=5, top_p=0.9))] * S)
        logits = random_logits(3)
        found = np.asarray(jit_filter(jnp.asarray(logits), rows, rows.samples))
        np.testing.assert_array_equal(found[found > -np.inf], logits[found > -np.inf])

    def test_signed_zeros_tie(self):
        logits = np.full((S, V), -1.0, np.float32)
        logits[:, 5], logits[:, 9] = -0.0, 0.0
        assert filtered(logits, SamplingParams(top_k=2))[:, [5, 9]].all()
        assert filtered(logits, SamplingParams(min_p=1.0)).sum() == 2 * S

    def test_a_row_without_filters_keeps_all_beside_rows_with_filters(self):
        rows = rows_on_device([row(SamplingParams(top_k=2, top_p=0.5, min_p=0.1)), row(SamplingParams())] * (S // 2))
        logits = jnp.asarray(random_logits(4))
        filters = (rows.top_k > 0) | (rows.top_p < 1)
        np.testing.assert_array_equal(jit_filter(logits, rows, filters)[1::2], logits[1::2])

    def test_equal_bits_in_any_batch(self):
        logits = random_logits(10, scale=1.5)
        params = [SamplingParams(top_p=0.05 + 0.03 * i, top_k=i * 3) for i in range(S)]
        rows = rows_on_device([row(p) for p in params])
        together = np.asarray(jit_filter(jnp.asarray(logits), rows, rows.samples))
        for i in range(S):
            rows = rows_on_device([row(params[i])], 1)
            alone = np.asarray(jit_filter(jnp.asarray(logits[i : i + 1]), rows, rows.samples))[0]
            np.testing.assert_array_equal(alone, together[i])
