"""Products in parts: when they are cut, and that the parts are the product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import gated_product, split_product
from jpaged.pallas_kernels.split_product import cut_product, num_parts, sum_parts
from tests.kernels.test_decode_gpu import abstract_hopper


def operands(rows: tuple[int, ...], depth: int, columns: int) -> tuple[jax.Array, jax.Array]:
    """Integers, so that sums are exact."""
    rng = np.random.default_rng(0)
    x, kernel = (rng.integers(-8, 8, shape) for shape in ((*rows, depth), (depth, columns)))
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(kernel, jnp.bfloat16)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_sum_of_parts_is_the_product(parts: int) -> None:
    x, kernel = operands((2, 3), 16, 24)
    product = cut_product(x, kernel, parts)
    assert product.shape == (2, 3, 24) if parts == 1 else (parts, 2, 3, 24)
    whole = product if parts == 1 else sum_parts(product, jnp.bfloat16)
    np.testing.assert_array_equal(whole, x @ kernel)


def test_parts_fill_the_chip_and_are_not_too_short() -> None:
    assert num_parts(2, 4096, 28672, 132) == 1  # 224 tiles
    assert num_parts(8192, 14336, 4096, 132) == 1
    assert num_parts(2, 576, 960, 132) == 1  # of 288 inputs each
    assert num_parts(2, 1536, 576, 132) == 2
    assert num_parts(2, 14336, 1024, 132) == 8
    assert num_parts(1, 14336, 1024, 132) == 1  # a vector
    assert num_parts(2, 1538, 576, 132) == 2  # 769 cannot be halved


def test_nothing_is_cut_but_for_a_gpu() -> None:
    x, kernel = operands((3,), 4096, 64)
    np.testing.assert_array_equal(split_product(x, kernel), x @ kernel)
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        assert jax.eval_shape(split_product, x, kernel).shape == (4, 3, 64)


def test_the_gated_product_is_that_of_its_halves() -> None:
    x, kernel = operands((2, 3), 16, 24)
    expected = jax.nn.silu(x @ kernel[:, :12]) * (x @ kernel[:, 12:])
    np.testing.assert_array_equal(gated_product(x, kernel), expected)
