"""The Mosaic GPU kernel of matrix products: how they are cut, lowered anywhere, run where a Hopper GPU is."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import gated_product, split_product
from jpaged.pallas_kernels.compat import jax_version
from jpaged.pallas_kernels.product_plan_gpu import ProductBlocks, Result, Walk, product_blocks
from tests.kernels.test_decode_gpu import abstract_hopper

needs_kernel = pytest.mark.skipif(jax_version() < (0, 11), reason="the kernel needs jax 0.11")

# Rows that end within a tile, columns that do, parts of unequal length, more units than blocks.
ONE, TWO = ProductBlocks(1, 256, 5, 2, 132, cut=False), ProductBlocks(2, 128, 6, 3, 4, cut=False)
SMALL = ((16, 192, 384, ONE), (64, 320, 128, ONE), (72, 320, 640, TWO), (128, 192, 512, TWO))
# Cut: two tiles of rows, a block too many for them, rows and columns that end within a tile; one tile of rows; shares
# that end with a tile; a block that has all.
CUT = (
    (256, 320, 640, ProductBlocks(2, 128, 6, 1, 4, cut=True)),
    (200, 320, 640, ProductBlocks(2, 256, 4, 1, 5, cut=True)),
    (136, 192, 896, ProductBlocks(3, 128, 5, 1, 3, cut=True)),
    (64, 256, 640, ProductBlocks(1, 256, 5, 1, 2, cut=True)),
    (128, 192, 512, ProductBlocks(2, 128, 6, 1, 2, cut=True)),
    (128, 192, 512, ProductBlocks(2, 128, 6, 1, 1, cut=True)),
)
# What the rule takes.
LARGE = (
    (8, 4096, 4096),
    (64, 4096, 4096),
    (128, 14336, 4096),
    (32, 4096, 6144),
    (24, 2048, 4160),
    (96, 4096, 28672),
    (192, 4096, 28672),
    (256, 4096, 28672),
    (200, 576, 3072),
    (256, 576, 1024),
    (256, 1536, 576),
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
    gated = [product_blocks(rows, 4096, 28672, "silu", 132) is None for rows in (128, 136, 192, 224, 256, 512)]
    assert gated == [False, True, False, True, False, True]


@pytest.mark.parametrize("rows", [136, 192, 256])
def test_small_products_of_more_rows_are_taken_too(rows: int) -> None:
    """Those of SmolLM2-135M, not those of a Llama of 1B."""
    for result, inputs, outputs in (
        ("parts", 576, 960),
        ("parts", 576, 576),
        ("silu", 576, 3072),
        ("parts", 1536, 576),
    ):
        blocks = product_blocks(rows, inputs, outputs, result, 132)
        assert blocks is not None
        assert -(-rows // (64 * blocks.consumers)) * -(-outputs // blocks.columns) * blocks.parts <= 132
    assert product_blocks(rows, 2048, 3072, "parts", 132) is None
    assert product_blocks(264, 576, 960, "parts", 132) is None


def test_tiles_are_cut_where_that_saves_more_than_it_costs() -> None:
    shapes = {
        (128, 4096, 28672): False,  # memory's pace
        (192, 4096, 28672): False,  # one tile of rows of narrow columns: as fast whole
        (256, 4096, 28672): True,
        (256, 1024, 28672): False,  # .3 waves less of a few steps each
        (256, 2048, 28672): True,
        (256, 4096, 33792): False,  # two full waves
        (256, 4096, 34048): True,  # and a tile more
    }
    for shape, cut in shapes.items():
        blocks = product_blocks(*shape, "silu", 132)
        assert blocks is not None
        assert blocks.cut == cut, shape


def tiles_of(rows: int, depth: int, columns: int, blocks: ProductBlocks) -> tuple[int, int, int]:
    return -(-rows // (64 * blocks.consumers)), -(-columns // blocks.columns), depth // 64


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "blocks"),
    [*SMALL, *CUT, *((*s, product_blocks(*s, "silu", 132)) for s in LARGE if s[2] == 28672)],
)
def test_every_step_is_done_once_and_two_pieces_meet(
    rows: int, depth: int, columns: int, blocks: ProductBlocks
) -> None:
    row_tiles, column_tiles, depths = tiles_of(rows, depth, columns, blocks)
    walk = Walk.of(blocks, row_tiles, column_tiles, depths)
    done = np.zeros((row_tiles, column_tiles, depths), int)
    steps, places = np.zeros(walk.num_blocks, int), {}
    numbers = jnp.arange(walk.num_blocks)
    counts = np.asarray(walk.count(numbers))
    for nth in range(counts.max()):
        units = [np.broadcast_to(x, numbers.shape) for x in walk.unit(numbers, nth)]
        meetings = np.asarray(walk.meeting(numbers, units[-2]))
        for block in np.flatnonzero(nth < counts):
            row_tile, column_tile, _, first, end = (int(x[block]) for x in units)
            assert 0 <= first < end <= depths
            done[row_tile, column_tile, first:end] += 1
            steps[block] += end - first
            if blocks.cut and end - first < depths:
                assert first == 0 or nth == 0  # what others wait for comes first
                places.setdefault(int(meetings[block]), []).append((row_tile, column_tile, first, end))
    assert (done == 1).all()
    assert walk.num_blocks <= blocks.num_blocks
    if blocks.cut:
        assert np.ptp(steps) <= 1
        assert all(0 <= place < walk.num_blocks for place in places)
        for one, other in places.values():  # two pieces, whose ranges are a tile's
            assert one[:2] == other[:2]
            assert sorted((*one[2:], *other[2:])) == [0, *[one[2] + other[2]] * 2, depths]


def test_a_product_in_parts_is_not_cut_and_each_tile_of_rows_has_a_block() -> None:
    for blocks in (ProductBlocks(2, 128, 6, 2, 132, cut=True), ProductBlocks(2, 128, 6, 1, 1, cut=True)):
        with pytest.raises(ValueError, match="expected one part"):
            Walk.of(blocks, 2, 8, 4)


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
        blocks = replace(blocks, parts=1)
    x, kernel = inputs(rows, depth, columns)
    run = jax.jit(partial(run_kernel, result=result, blocks=blocks))
    got = run(x, kernel)
    np.testing.assert_array_equal(got, run(x, kernel))
    assert_close(got.sum(axis=0) if result == "parts" else got, expected_of(x, kernel, result))


@needs_kernel
@pytest.mark.parametrize("result", ["product", "silu"])
@pytest.mark.parametrize(("rows", "depth", "columns", "blocks"), CUT)
def test_cut_tiles_lower_for_cuda_and_layers_share_them(
    rows: int, depth: int, columns: int, blocks: ProductBlocks, result: Result
) -> None:
    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, depth), (depth, columns)))
    text = lowered(
        lambda x, kernel: [run_kernel(x + i, kernel, result=result, blocks=blocks) for i in range(3)], x, kernel
    )
    assert text.count("call @product_gpu") == 3
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
@needs_kernel
@pytest.mark.parametrize("result", ["product", "silu"])
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "blocks"),
    [*CUT, *((rows, 4096, 28672, product_blocks(rows, 4096, 28672, "silu", 132)) for rows in (192, 256))],
)
def test_cut_tiles_equal_xla_in_every_call(
    rows: int, depth: int, columns: int, blocks: ProductBlocks, result: Result
) -> None:
    x, kernel = inputs(rows, depth, columns)
    call = partial(run_kernel, kernel=kernel, result=result, blocks=blocks)
    # Calls one after the other with the same counters, and calls in a loop; all of it again and again.
    run = jax.jit(lambda xs: (jnp.stack([call(x) for x in xs]), jax.lax.map(call, xs)))
    xs = jnp.stack([x, -x, x[::-1], x])
    expected = jnp.stack([expected_of(x, kernel, result) for x in xs])
    first, looped = run(xs)
    assert_close(first, expected)
    for _ in range(5):
        for got in (looped, *run(xs)):
            np.testing.assert_array_equal(got, first)


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
