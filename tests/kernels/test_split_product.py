"""Products in parts: when they are cut, and that the parts are the product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import best_parts, split_product
from jpaged.pallas_kernels.split_product import num_parts, sum_parts
from tests.kernels.test_decode_gpu import abstract_hopper


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_sum_of_parts_is_the_product(parts: int) -> None:
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.integers(-8, 8, shape), jnp.bfloat16) for shape in ((2, 3, 16), (16, 24)))
    product = split_product(x, kernel, parts)
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
    kernel = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    assert best_parts(2, kernel) == 1
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        assert best_parts(2, kernel) == 4
