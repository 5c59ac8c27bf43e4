"""`add_rms_norm`, and the choice of an implementation for ops on rows of tokens."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import add_rms_norm
from jpaged.pallas_kernels.compat import jax_version
from jpaged.pallas_kernels.norm import norm_implementation
from tests.kernels.test_decode_gpu import abstract_hopper


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_rounded_sum_is_normed_in_float32(dtype: str) -> None:
    """In bf16, 256 + 1 is 256: the norm is of that."""
    x, delta = jnp.array([[256.0, -3.0, 0.0, 1.0]], dtype), jnp.array([[1.0, 5.0, 0.0, -1.0]], dtype)
    scale = jnp.array([1, 2, 3, 4], dtype)
    y, normed = jax.jit(add_rms_norm, static_argnums=3)(x, delta, scale, 0.25)
    assert y.dtype == normed.dtype == x.dtype
    first = 257 if dtype == "float32" else 256
    assert y.tolist() == [[first, 2, 0, 0]]
    rms = math.sqrt((first**2 + 4) / 4 + 0.25)
    np.testing.assert_allclose(normed.astype(jnp.float32), [[first / rms, 4 / rms, 0, 0]], rtol=2**-8)


def test_parts_are_added_up_and_rounded() -> None:
    x, scale = jnp.ones((1, 2), jnp.bfloat16), jnp.ones(2, jnp.bfloat16)
    parts = jnp.array([[[200.0, 1.0]], [[57.0, 2.0]], [[0.5, 3.0]]])  # 257.5 is 258 in bf16, which 1 does not change
    y, normed = add_rms_norm(x, parts, scale, 0.0)
    assert (y.dtype, y.tolist()) == (jnp.bfloat16, [[260.0, 7.0]])
    np.testing.assert_array_equal(normed, add_rms_norm(y, None, scale, 0.0)[1])


def test_no_delta_is_a_norm_alone() -> None:
    x, scale = jnp.arange(24.0).reshape(2, 3, 4), jnp.arange(4.0)
    y, normed = add_rms_norm(x, None, scale, 1e-6)
    assert y is x
    np.testing.assert_array_equal(normed, add_rms_norm(x, jnp.zeros_like(x), scale, 1e-6)[1])


def test_it_can_be_differentiated() -> None:
    x, delta, scale = jnp.array([[3.0, 4.0]]), jnp.zeros((1, 2)), jnp.ones(2)
    # The norm does not change with x's length, so its derivative along x is 0, and that of the sum is 1.
    (y, normed), tangents = jax.jvp(lambda x: add_rms_norm(x, delta, scale, 0.0), (x,), (x,))
    np.testing.assert_allclose(tangents[0], y)
    np.testing.assert_allclose(tangents[1], jnp.zeros_like(normed), atol=1e-6)


def test_wrong_arguments_are_refused() -> None:
    x, scale = jnp.ones((2, 4)), jnp.ones(4)
    with pytest.raises(ValueError, match=r"delta.shape=\(2, 3\).*expected \(2, 4\) float32"):
        add_rms_norm(x, jnp.ones((2, 3)), scale, 1e-6)
    with pytest.raises(ValueError, match=r"scale.shape=\(3,\).*expected \(4,\)"):
        add_rms_norm(x, x, jnp.ones(3), 1e-6)
    with pytest.raises(ValueError, match="'fast'"):
        add_rms_norm(x, x, scale, 1e-6, implementation="fast")
    with pytest.raises(NotImplementedError, match="Mosaic GPU"):
        add_rms_norm(x, x, scale, 1e-6, implementation="mosaic_gpu")


@pytest.mark.skipif(jax_version() < (0, 11), reason="the kernel needs jax 0.11")
def test_the_kernel_is_the_choice_on_hopper_where_it_takes_the_rows() -> None:
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        assert norm_implementation(None, "bfloat16", 576) == "mosaic_gpu"
        assert norm_implementation("mosaic_gpu", "float32", 4) == "mosaic_gpu"
        assert norm_implementation("xla", "bfloat16", 576) == "xla"
        assert norm_implementation(None, "bfloat16", 12) == "xla"  # 24 bytes
        with pytest.raises(NotImplementedError, match="whole 16 bytes; these have 12 values of bfloat16"):
            norm_implementation("mosaic_gpu", "bfloat16", 12)
        with pytest.raises(NotImplementedError, match="this is float64"):
            norm_implementation("mosaic_gpu", "float64", 16)
    assert norm_implementation(None, "bfloat16", 576) == "xla"
    assert norm_implementation("mosaic_tpu", "bfloat16", 576) == "xla"
