import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.models import RopeScaling
from jpaged.models.layers import RMSNorm, rotary_angles, rotary_frequencies
from jpaged.models.linear import Linear

from .paged import tiny_config

PLAIN = 10000.0 ** -np.array([0, 0.25, 0.5, 0.75])  # head_dim 8


def test_a_product_of_one_row_is_rounded_once():
    linear = Linear(8, 4, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    types = [
        str(equation.outvars[0].aval)
        for rows in (1, 2)
        for equation in jax.make_jaxpr(linear)(jnp.ones((rows, 8), jnp.bfloat16)).eqns
        if equation.primitive.name == "dot_general"
    ]
    assert types == ["float32[1,4]", "bfloat16[2,4]"]


def frequencies(**changes):
    return rotary_frequencies(tiny_config(**changes))


def test_plain_frequencies_follow_theta():
    np.testing.assert_allclose(frequencies(), PLAIN, rtol=1e-6)
    np.testing.assert_allclose(frequencies(rope_theta=81.0), [1, 1 / 3, 1 / 9, 1 / 27], rtol=1e-6)


def test_linear_scaling_divides_all():
    np.testing.assert_allclose(frequencies(rope_scaling=RopeScaling(kind="linear", factor=4.0)), PLAIN / 4, rtol=1e-6)


def test_factors_divide_each():
    scaling = RopeScaling(kind="factors", factors=(1.0, 2.0, 4.0, 8.0))
    np.testing.assert_allclose(frequencies(rope_scaling=scaling), PLAIN / [1, 2, 4, 8], rtol=1e-6)


def test_llama3_scaling_keeps_high_divides_low_and_blends_between():
    # Wavelengths 2 pi / f are 6.3, 62.8, 628 and 6283; the context was 300, so they make 47.7, 4.8, 0.48, 0.048 turns.
    scaling = RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=9.0, original_max_position_embeddings=300
    )
    turns = 300 * PLAIN[1] / (2 * math.pi)
    kept = (turns - 1) / (9 - 1)
    blend = PLAIN[1] * (kept + (1 - kept) / 8)
    expected = [PLAIN[0], blend, PLAIN[2] / 8, PLAIN[3] / 8]
    np.testing.assert_allclose(frequencies(rope_scaling=scaling), expected, rtol=1e-6)


def test_angles_are_float32_and_exact_at_large_positions():
    rope = rotary_angles(tiny_config(), jnp.array([0, 100_001], jnp.int32))
    assert rope.cos.dtype == rope.sin.dtype == jnp.float32
    np.testing.assert_allclose(rope.cos[0], 1)
    np.testing.assert_allclose(rope.sin[1, 0], math.sin(100_001), atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_norm_is_computed_in_float32(dtype):
    """In bf16, 1 + 2**-9 is 1; squares of 2**-70 are 0 in f16 and the smallest normal numbers in f32."""
    x = jnp.array([[3.0, -4.0, 0.0, 0.0]], dtype)
    norm = RMSNorm(4, 1e-6, dtype)
    norm.scale[...] = jnp.array([1, 2, 3, 4], dtype)
    out = norm(x)
    assert out.dtype == dtype
    rms = math.sqrt(25 / 4)
    np.testing.assert_allclose(out.astype(jnp.float32), [[3 / rms, -8 / rms, 0, 0]], rtol=2**-8)
    # 1000 entries of 1 and one of 32: a bf16 sum of squares stops growing at 256.
    wide = RMSNorm(1001, 1e-6, dtype)(jnp.concatenate([jnp.ones((1000,), dtype), jnp.full((1,), 32, dtype)]))
    np.testing.assert_allclose(wide[0].astype(jnp.float32), 1 / math.sqrt((1000 + 1024) / 1001), rtol=2**-8)


def test_eps_bounds_the_norm_of_zeros():
    norm = RMSNorm(2, 1.0, jnp.float32)
    np.testing.assert_array_equal(norm(jnp.zeros((1, 2))), 0)
    np.testing.assert_allclose(norm(jnp.ones((1, 2))), 1 / math.sqrt(2), rtol=1e-6)
