"""The Mosaic GPU kernel that filters and draws: interpreted anywhere, run where a Hopper GPU is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import filtered_draw
from jpaged.pallas_kernels.compat import jax_version
from jpaged.pallas_kernels.filtered_draw import DrawParams, draw_filtered
from tests.kernels.gpu_interpret import interpret_params, no_races
from tests.kernels.test_filtered_draw import by_sorting, candidates, maxima_of, rows_of_logits

if jax_version() < (0, 11):
    pytest.skip("the kernel needs jax 0.11", allow_module_level=True)

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
FILTERS = [
    {"top_k": 2},
    {"top_k": 40, "temperature": 0.6},
    {"top_k": 1000},
    {"top_k": 10**9, "top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.5, "temperature": 2.0},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"top_p": 5e-324},  # 0 in float32
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-30, "temperature": 3.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 3000, "top_p": 0.95, "temperature": 1e-3},
    {"top_k": 7, "min_p": 0.3},
    {"top_k": 600, "top_p": 0.95, "min_p": 0.01, "temperature": 0.7},
]


def batch(vocab_size: int, stride: int = 1) -> tuple[jax.Array, DrawParams]:
    """Every kind of row with every kind of filter, or every `stride`-th of these pairs."""
    kinds = rows_of_logits(vocab_size)
    pairs = [(row, {**OFF, **fields}) for row in kinds for fields in FILTERS][::stride]
    logits = np.stack([row for row, _ in pairs])
    columns = {
        name: np.array([fields[name] for _, fields in pairs], np.int32 if name == "top_k" else np.float32)
        for name in OFF
    }
    keys = np.random.default_rng(1).integers(0, 2**32, (len(logits), 2), np.uint32)
    return jax.device_put((logits, DrawParams(**columns, keys=keys)))


def assert_drawn(logits: jax.Array, params: DrawParams, interpret=None) -> None:
    """On a device top-p may be off by a token at its border, where exponentials are not those of the reference."""
    everyone = jnp.ones(len(logits), bool)
    found = jax.jit(lambda *args: draw_filtered(*args, interpret=interpret))(
        logits, maxima_of(logits), everyone, params
    )
    least, token_ids = map(np.asarray, by_sorting(logits, params))
    x, got_least = np.asarray(logits, np.float64), np.asarray(found.least)
    kept, expected = x >= got_least[:, None], x >= least[:, None]
    if interpret is None:
        p = np.exp((x - x.max(axis=1, keepdims=True)) / np.asarray(params.temperature)[:, None])
        shares = np.where(kept ^ expected, p, 0).sum(axis=1) / p.sum(axis=1)
        assert (shares <= np.where(np.asarray(params.top_p) < 1, 1e-4, 0)).all()
        same = (kept == expected).all(axis=1)
        assert same.mean() > 0.9
    else:
        np.testing.assert_array_equal(kept, expected)
        same = np.ones(len(x), bool)
    np.testing.assert_array_equal(np.asarray(found.token_ids)[same], token_ids[same])


def test_interpreted_it_keeps_and_draws_as_sorting_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filtered_draw, "_NUM_TILES", 6)  # so that there are rows whose candidates do not do
    logits, params = batch(1_101, stride=9)
    found = candidates(logits, params.temperature)
    assert len({*(np.asarray(found.token_ids) < 1_101).sum(axis=1)}) > 3
    with no_races():
        assert_drawn(logits, params, interpret=interpret_params())


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [128_256, 49_152, 50_002, 9_001, 300])
def test_keeps_and_draws_as_sorting_does(vocab_size: int) -> None:
    assert_drawn(*batch(vocab_size))


@pytest.mark.gpu
def test_a_row_is_drawn_alone_as_in_a_batch() -> None:
    logits, params = batch(128_256, stride=7)
    everyone = jnp.ones(len(logits), bool)
    together = jax.jit(draw_filtered)(logits, maxima_of(logits), everyone, params)
    for i in range(len(logits)):
        one = slice(i, i + 1)
        alone = jax.jit(draw_filtered)(
            logits[one], maxima_of(logits[one]), everyone[one], jax.tree.map(lambda x, one=one: x[one], params)
        )
        np.testing.assert_array_equal(alone.token_ids, together.token_ids[one])
        np.testing.assert_array_equal(alone.least, together.least[one])
