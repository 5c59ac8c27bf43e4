"""The Mosaic GPU kernel of the gated product of many rows: lowered anywhere, run where a Hopper GPU is."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import gated_product
from jpaged.pallas_kernels.product_plan_gpu import GatedBlocks, gated_blocks
from tests.kernels.test_product_gpu import assert_close, expected_of, inputs, lowered, needs_kernel

BLOCKS = (GatedBlocks(1, 2048, 132), GatedBlocks(2, 512, 132))

# A tile alone, with K of fewer tiles than the ring; a second tile of 8 rows; rows and columns that end within a tile; a
# last group of fewer row tiles.
SHAPES = ((128, 192, 512), (136, 1024, 256), (520, 320, 640), (1288, 128, 896), (1024, 4096, 1024))


def run_kernel(x: jax.Array, kernel: jax.Array, *, blocks: GatedBlocks) -> jax.Array:
    from jpaged.pallas_kernels.gated_gpu import gated_gpu  # needs jax 0.11

    return gated_gpu(x, kernel, blocks=blocks)


@needs_kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_lowers_for_cuda_and_layers_share_it(blocks: GatedBlocks, dtype: str) -> None:
    x, kernel = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((520, 4096), (4096, 28672)))
    text = lowered(lambda x, kernel: [run_kernel(x + i, kernel, blocks=blocks) for i in range(3)], x, kernel)
    assert text.count("call @gated_gpu") == 3
    assert text.count("custom_call @mosaic_gpu") == 1
    assert f"520x14336x{'bf16' if dtype == 'bfloat16' else 'f16'}" in text


def test_the_last_wave_is_well_filled() -> None:
    for rows in (1024, 2048, 2000, 4096, 8192):
        blocks = gated_blocks(rows, 4096, 28672, 132)
        assert blocks is not None
        tiles = rows / (128 * blocks.cluster) * 28672 / 256
        assert tiles / 66 / math.ceil(tiles / 66) >= 0.9
    for shape in (
        (512, 4096, 28672),
        (1032, 4096, 28672),  # a tile of 8 rows
        (2044, 4096, 28672),
        (2048, 4000, 28672),
        (2048, 4096, 28608),
        (2048, 1984, 16384),  # fewer inputs than measured
        (2048, 4096, 3072),  # two waves, the second half empty
    ):
        assert gated_blocks(*shape, 132) is None


@needs_kernel
def test_many_rows_take_it() -> None:
    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 1024, 4096), (4096, 28672)))
    assert lowered(gated_product, x, kernel).count("call @gated_gpu") == 1


@pytest.mark.gpu
@needs_kernel
@pytest.mark.parametrize("multiprocessors", [4, 6, 132])  # many units for a block, an odd number of them, or one
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
def test_equals_xla(rows: int, depth: int, columns: int, blocks: GatedBlocks, multiprocessors: int) -> None:
    fields = {**vars(blocks), "multiprocessors": multiprocessors}
    x, kernel = inputs(rows, depth, columns)
    run = jax.jit(partial(run_kernel, blocks=GatedBlocks(**fields)))
    got = run(x, kernel)
    np.testing.assert_array_equal(got, run(x, kernel))
    assert_close(got, expected_of(x, kernel, "silu"))
