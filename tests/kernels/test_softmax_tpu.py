"""The running softmax of a TPU tile, on refs that are not in a kernel, against the whole softmax in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.softmax_tpu import LOG2E, MASKED, Softmax, product, scores
from jpaged.pallas_kernels.tpu_tuning import LANES
from jpaged.pallas_kernels.xla import AttentionOptions

ROWS, WIDTH = 8, 256


def state() -> Softmax:
    """Refs full of NaN, as fresh memory may be."""
    shapes = ((ROWS, LANES), (ROWS, LANES), (ROWS, WIDTH))
    return Softmax(*(jax.new_ref(jnp.full(shape, jnp.nan, jnp.float32)) for shape in shapes))


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("run", [48, 128, 384])
def test_runs_add_up_to_the_softmax_of_all(run: int, with_sinks: bool) -> None:
    rng = np.random.default_rng(0)
    s = (rng.standard_normal((ROWS, 2 * run)) * 20).astype(np.float32)
    s[3, :run] = MASKED  # a row that sees nothing of the first run
    v = rng.standard_normal((2 * run, WIDTH)).astype(np.float32)
    v_scales = rng.uniform(0.5, 2, (1, 2 * run)).astype(np.float32)
    sinks = rng.standard_normal(ROWS).astype(np.float32) * 30 if with_sinks else None

    softmax = state()
    softmax.start(..., None if sinks is None else jnp.broadcast_to(sinks[:, None], (ROWS, LANES)))
    for part in (slice(0, run), slice(run, 2 * run)):
        softmax.add(..., jnp.asarray(s[:, part]), jnp.asarray(v[part]), jnp.asarray(v_scales[:, part]))
    out, lse = softmax.finish(...)

    natural = s.astype(np.float64) / LOG2E
    if sinks is not None:
        natural = np.concatenate([natural, sinks[:, None].astype(np.float64)], axis=1)
    top = natural.max(axis=1, keepdims=True)
    weights = np.exp(natural - top)
    total = weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out, weights[:, : 2 * run] / total * v_scales @ v, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse, np.broadcast_to(top + np.log(total), (ROWS, LANES)), rtol=2e-5, atol=2e-5)


def test_a_row_that_is_padding_is_finite() -> None:
    softmax = state()
    softmax.start(..., None)
    out, lse = softmax.finish(...)
    assert (np.asarray(out) == 0).all()
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_scores_are_scaled_and_capped_in_base_2(soft_cap: float | None) -> None:
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((n, 64)).astype(np.float32) for n in (4, 6))
    k_scales = rng.uniform(0.5, 2, (1, 6)).astype(np.float32)
    options = AttentionOptions(scale=0.3, sliding_window=None, soft_cap=soft_cap)
    expected = q.astype(np.float64) @ k.T * k_scales * 0.3
    if soft_cap is not None:
        expected = soft_cap * np.tanh(expected / soft_cap)
    ours = scores(jnp.asarray(q), jnp.asarray(k), jnp.asarray(k_scales), options)
    np.testing.assert_allclose(ours, expected * LOG2E, rtol=2e-5, atol=2e-5)


def test_products_of_bfloat16_have_float32_sums() -> None:
    ones = jnp.ones((8, 300), jnp.bfloat16)
    assert product(ones, ones, transpose_b=True).dtype == jnp.float32
    assert (product(ones, ones, transpose_b=True) == 300).all()  # 301 steps of 1 would stop at 256 in bf16
