"""The Mosaic GPU kernel of matrix products: how they are cut, lowered anywhere, run where a Hopper GPU is."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import gated_product, split_product
from jpaged.pallas_kernels.compat import jax_version
from jpaged.pallas_kernels.product_plan_gpu import ProductBlocks, Result, product_blocks
from tests.kernels.test_decode_gpu import abstract_hopper

needs_kernel = pytest.mark.skipif(jax_version() < (0, 11), reason="the kernel needs jax 0.11")

# Rows that end within a tile, columns that do, parts of unequal length, more units than blocks.
ONE, TWO = ProductBlocks(1, 256, 5, 2, 132), ProductBlocks(2, 128, 6, 3, 4)
SMALL = ((16, 192, 384, ONE), (64, 320, 128, ONE), (72, 320, 640, TWO), (128, 192, 512, TWO))
# What the rule takes.
LARGE = (
    (8, 4096, 4096),
    (64, 4096, 4096),
    (128, 14336, 4096),
    (32, 4096, 6144),
    (24, 2048, 4160),
    (96, 4096, 28672),
    (256, 4096, 28672),
)


@pytest.mark.parametrize("rows", [8, 64, 72, 128])
def test_a_launch_has_one_unit_for_nearly_every_multiprocessor(rows: int) -> None:
    for inputs, outputs in ((4096, 6144), (4096, 4096), (14336, 4096), (2048, 3072), (4096, 28672)):
        blocks = product_blocks(rows, inputs, outputs, "parts", 132)
        assert blocks is not None
        assert blocks.consumers * 64 >= rows
        assert 96 <= -(-outputs // blocks.columns) * blocks.parts <= 132


def test_parts_are_not_too_short() -> None:
    for (inputs, outputs), parts in {(576, 576): 3, (1536, 576): 8, (64, 64): 1}.items():
        blocks = product_blocks(8, inputs, outputs, "parts", 132)
        assert blocks is not None
        assert blocks.parts == parts


def test_what_the_kernel_does_not_take_is_left_to_xla() -> None:
    for shape in ((4, 4096, 4096), (256, 4096, 4096), (60, 4096, 4096), (64, 4000, 4096), (64, 4096, 4000)):
        assert product_blocks(*shape, "parts", 132) is None
    assert product_blocks(64, 4096, 64, "silu", 132) is None  # half of a tile of gate, half of up
    gated = [product_blocks(rows, 4096, 28672, "silu", 132) is None for rows in (128, 192, 256, 512)]
    assert gated == [False, True, False, True]
    assert product_blocks(256, 576, 3072, "silu", 132) is None  # few tiles: not compared


def inputs(rows: int, depth: int, columns: int, dtype="bfloat16") -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows)
    x, kernel = (rng.standard_normal(shape, np.float32) for shape in ((rows, depth), (depth, columns)))
    return jnp.asarray(x, dtype), jnp.asarray(kernel / depth**0.5, dtype)


def lowered(op, *arguments) -> str:
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        return jax.jit(op).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@needs_kernel
def test_lowers_for_cuda_and_layers_share_it() -> None:
    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 32, 4096), (4096, 4096)))
    text = lowered(lambda x, kernel: [split_product(x + i, kernel) for i in range(3)], x, kernel)
    assert text.count("call @product_gpu") == 3
    assert text.count("custom_call @mosaic_gpu") == 1
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        assert jax.eval_shape(split_product, x, kernel).shape == (4, 2, 32, 4096)
        assert jax.eval_shape(gated_product, x, kernel).shape == (2, 32, 2048)


def run_kernel(x: jax.Array, kernel: jax.Array, *, result: Result, blocks: ProductBlocks) -> jax.Array:
    from jpaged.pallas_kernels.product_gpu import product_gpu

    return product_gpu(x, kernel, result=result, blocks=blocks)


def assert_close(got: jax.Array, expected: jax.Array) -> None:
    eps = float(jnp.finfo(got.dtype).eps)
    # Of the order of sums: a value of size 1 is added up from thousands.
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=eps, atol=1e-4)


def expected_of(x: jax.Array, kernel: jax.Array, result: Result) -> jax.Array:
    product = jnp.dot(x, kernel, precision="highest", preferred_element_type=jnp.float32)
    if result != "silu":
        return product
    gate, up = jnp.split(product, 2, axis=-1)
    return jax.nn.silu(gate) * up


@pytest.mark.gpu
@needs_kernel
@pytest.mark.parametrize("result", ["product", "parts", "silu"])
@pytest.mark.parametrize(("rows", "depth", "columns", "blocks"), SMALL)
def test_equals_xla(rows: int, depth: int, columns: int, blocks: ProductBlocks, result) -> None:
    if result != "parts":
        blocks = ProductBlocks(blocks.consumers, blocks.columns, blocks.stages, 1, blocks.num_blocks)
    x, kernel = inputs(rows, depth, columns)
    run = jax.jit(partial(run_kernel, result=result, blocks=blocks))
    got = run(x, kernel)
    np.testing.assert_array_equal(got, run(x, kernel))
    assert_close(got.sum(axis=0) if result == "parts" else got, expected_of(x, kernel, result))


@pytest.mark.gpu
@needs_kernel
@pytest.mark.parametrize(("rows", "depth", "columns"), LARGE)
def test_products_of_a_layer_equal_xla(rows: int, depth: int, columns: int) -> None:
    x, kernel = inputs(rows, depth, columns)
    if product_blocks(rows, depth, columns, "parts", 132) is not None:
        got = jax.jit(split_product)(x, kernel)
        assert_close(got if got.ndim == 2 else got.sum(axis=0), expected_of(x, kernel, "product"))
    if product_blocks(rows, depth, columns, "silu", 132) is not None:  # XLA would round the factors
        assert_close(jax.jit(gated_product)(x, kernel), expected_of(x, kernel, "silu"))
