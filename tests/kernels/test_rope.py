"""Rotary embedding."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import Rope, apply_rope


def angles(positions: np.ndarray, half: int) -> np.ndarray:
    return positions[:, None] * 10_000.0 ** (-np.arange(half) / half)


def rope_at(positions: np.ndarray, half: int) -> Rope:
    theta = angles(positions, half)
    return Rope(cos=jnp.asarray(np.cos(theta), jnp.float32), sin=jnp.asarray(np.sin(theta), jnp.float32))


def test_rotates_pairs_as_complex_numbers() -> None:
    positions = np.array([0, 3, 70])
    x = np.random.default_rng(0).standard_normal((3, 2, 8))
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles(positions, 4))[:, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(apply_rope(jnp.asarray(x, jnp.float32), rope_at(positions, 4)), expected, atol=1e-6)


def test_scores_depend_on_the_distance_only() -> None:
    q, k = (jnp.asarray(x, jnp.float32) for x in np.random.default_rng(1).standard_normal((2, 1, 1, 16)))

    def score(q_position: int, k_position: int) -> float:
        turned = [apply_rope(x, rope_at(np.array([at]), 8)) for x, at in ((q, q_position), (k, k_position))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)


def test_values_beyond_the_rotated_ones_pass() -> None:
    x = jnp.ones((2, 3, 8), jnp.bfloat16)
    turned = apply_rope(x, rope_at(np.array([1, 2]), 2))
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    assert (turned[..., :4] != x[..., :4]).any()


@pytest.mark.parametrize(("tokens", "half"), [(3, 4), (2, 5)])
def test_wrong_angles_are_refused(tokens: int, half: int) -> None:
    with pytest.raises(ValueError, match=r"rope.cos.shape="):
        apply_rope(jnp.ones((2, 1, 8)), rope_at(np.arange(tokens), half))
