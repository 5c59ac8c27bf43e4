"""Absmax quantisation."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.quantization import dequantize, quantize

# Half a step: of the 127 steps of int8, and of the 3 mantissa bits of e4m3 (of the value itself).
STEP = {"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-4}


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e20])
def test_error_is_within_half_a_step(dtype: str, magnitude: float) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 2, 64)) * magnitude, jnp.float32)
    values, scales = quantize(x, jnp.dtype(dtype))
    assert values.dtype == dtype
    assert scales.shape == (5, 2)
    error = jnp.abs(dequantize(values, scales) - x) / jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    assert float(error.max()) <= STEP[dtype] * (1 + 1e-5)


@pytest.mark.parametrize("dtype", STEP)
def test_zeros_stay_zeros(dtype: str) -> None:
    values, scales = quantize(jnp.zeros((3, 8)), jnp.dtype(dtype))
    np.testing.assert_array_equal(dequantize(values, scales), 0)


@pytest.mark.parametrize("dtype", STEP)
def test_the_largest_magnitude_is_exact(dtype: str) -> None:
    x = jnp.array([[0.1, -3.7, 2.0]])
    values, scales = quantize(x, jnp.dtype(dtype))
    np.testing.assert_allclose(dequantize(values, scales)[0, 1], x[0, 1], rtol=2e-7)


@pytest.mark.parametrize("dtype", STEP)
def test_nan_is_not_hidden(dtype: str) -> None:
    values, scales = quantize(jnp.array([[1.0, jnp.nan], [1.0, 2.0]]), jnp.dtype(dtype))
    assert jnp.isnan(dequantize(values, scales)[0]).any()
    assert not jnp.isnan(dequantize(values, scales)[1]).any()


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("tiny", [1e-45, 1e-40, 1e-38, 1e-36, 4e-36, 6e-36, 1e-35])
def test_tiny_magnitudes_never_become_nan(dtype: str, tiny: float) -> None:
    x = jnp.array([[tiny, 0.0, -tiny], [0.0, 0.0, 0.0]], jnp.float32)
    values, scales = quantize(x, jnp.dtype(dtype))
    assert bool((scales >= jnp.finfo(jnp.float32).tiny).all())
    back = dequantize(values, scales)
    np.testing.assert_array_equal(back[:, 1], 0)
    np.testing.assert_allclose(back, x, rtol=1e-6, atol=6e-36)
