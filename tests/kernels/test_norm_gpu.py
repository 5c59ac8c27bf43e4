"""The Mosaic GPU kernel of the residual sum and norm: lowered and interpreted anywhere, run where a Hopper GPU is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import add_rms_norm
from jpaged.pallas_kernels.compat import jax_version
from jpaged.pallas_kernels.norm import add_rms_norm_xla
from tests.kernels.gpu_interpret import interpret_params, no_races
from tests.kernels.test_decode_gpu import abstract_hopper

if jax_version() < (0, 11):
    pytest.skip("the kernel needs jax 0.11", allow_module_level=True)

from jpaged.pallas_kernels.norm_gpu import add_rms_norm_gpu

# Columns that fill a part of a turn of the threads, turns exactly, and a turn and a part.
SHAPES = ((3, 576, "bfloat16"), (1, 2048, "float16"), (2, 520, "float32"))
# And every hidden size there is.
DEVICE_SHAPES = (*SHAPES, *((5, size, "bfloat16") for size in (3072, 4096, 5120, 8192)), (1000, 576, "bfloat16"))


def inputs(tokens: int, size: int, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(size)
    x, delta = (jnp.asarray(rng.standard_normal((tokens, size)), dtype) for _ in range(2))
    return x, delta, jnp.asarray(1 + 0.1 * rng.standard_normal(size), dtype)


def assert_equal_but_for_a_rounding(got, expected) -> None:
    """The sums are the same bits; a mean of squares that was added up in another order may round a factor once more."""
    for x in (*got, *expected):
        assert x.dtype == expected[0].dtype
    np.testing.assert_array_equal(*(x.view(np.uint8) for x in map(np.asarray, (got[0], expected[0]))))
    eps = float(jnp.finfo(expected[1].dtype).eps)
    normed, wanted = (np.asarray(x, np.float64) for x in (got[1], expected[1]))
    np.testing.assert_allclose(normed, wanted, rtol=2 * eps, atol=0)


@pytest.mark.parametrize(("tokens", "size", "dtype"), SHAPES)
def test_interpreted_it_equals_xla(tokens: int, size: int, dtype: str) -> None:
    x, delta, scale = inputs(tokens, size, dtype)
    with no_races():
        got = jax.block_until_ready(add_rms_norm_gpu(x, delta, scale, 1e-5, interpret=interpret_params()))
    assert_equal_but_for_a_rounding(got, jax.jit(add_rms_norm_xla, static_argnums=3)(x, delta, scale, 1e-5))


def in_parts(delta: jax.Array) -> jax.Array:
    """Halves are exact, so that the sum is the delta in whatever order it is added up."""
    quarter = delta.astype(jnp.float32) / 4
    return jnp.stack([2 * quarter, quarter, quarter])


@pytest.mark.parametrize(("tokens", "size", "dtype"), SHAPES[:2])
def test_interpreted_it_adds_up_parts(tokens: int, size: int, dtype: str) -> None:
    x, delta, scale = inputs(tokens, size, dtype)
    with no_races():
        got = jax.block_until_ready(add_rms_norm_gpu(x, in_parts(delta), scale, 1e-5, interpret=interpret_params()))
    assert_equal_but_for_a_rounding(got, jax.jit(add_rms_norm_xla, static_argnums=3)(x, delta, scale, 1e-5))


def test_interpreted_it_rounds_one_part() -> None:
    x, delta, scale = inputs(*SHAPES[0])
    between = delta.astype(jnp.float32) * (1 + 2.0**-10)  # rounds to what delta is
    with no_races():
        got = jax.block_until_ready(add_rms_norm_gpu(x, between[None], scale, 1e-5, interpret=interpret_params()))
    assert_equal_but_for_a_rounding(got, jax.jit(add_rms_norm_xla, static_argnums=3)(x, delta, scale, 1e-5))


def lowered(op, *arguments) -> str:
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        return jax.jit(op).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("tokens", "size", "dtype"), SHAPES)
def test_lowers_for_cuda_and_layers_share_it(tokens: int, size: int, dtype: str) -> None:
    def layers(x, delta, scale):
        for _ in range(3):
            x, delta = add_rms_norm(x, delta, scale, 1e-5)
        return x, delta

    text = lowered(layers, *inputs(tokens, size, dtype))
    assert text.count("call @_add_rms_norm") == 3
    assert text.count("custom_call @mosaic_gpu") == 2  # the first layer's operands are arguments and not results


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "size", "dtype"), DEVICE_SHAPES)
def test_equals_xla(tokens: int, size: int, dtype: str) -> None:
    x, delta, scale = inputs(tokens, size, dtype)
    got = jax.jit(add_rms_norm, static_argnums=3)(x, delta, scale, 1e-5)
    assert_equal_but_for_a_rounding(got, jax.jit(add_rms_norm_xla, static_argnums=3)(x, delta, scale, 1e-5))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "size", "dtype"), DEVICE_SHAPES)
def test_adds_up_parts(tokens: int, size: int, dtype: str) -> None:
    x, delta, scale = inputs(tokens, size, dtype)
    got = jax.jit(add_rms_norm, static_argnums=3)(x, in_parts(delta), scale, 1e-5)
    assert_equal_but_for_a_rounding(got, jax.jit(add_rms_norm_xla, static_argnums=3)(x, delta, scale, 1e-5))
