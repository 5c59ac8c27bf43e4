"""Matrix products for Hopper in Pallas Mosaic GPU: rows times a kernel that is read once, at the memory's pace.

    x [T, K]  @  kernel [K, F]   ->   the product [T, F], f32 parts of it [P, T, F], or silu(gate) * up [T, F / 2]

A unit is a tile of `64 * consumers` rows and `columns` columns, over one of `parts` parts of K. A block of threads
stays for the whole launch and walks its units; a warp loads tiles of 64 of K into a ring in shared memory, on into the
next unit while this one is stored, and each computing warpgroup has 64 of the rows:

    loading warp   [ wait for a free stage | kernel tile, rows' tile ]*
    consumer       [ wait for a full stage | acc [64, columns] += x [64, 64] kernel [64, columns] | free the last one ]*
                   -> registers to global memory

The kernel stays as it is stored, [in, out]; the matrix instruction takes it that way round. Of gate and up a tile has
half of its columns each, brought side by side by one copy, so what joins them is done on registers.
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from . import combine_gpu as ends
from . import prefill_barriers_gpu as sync
from .consumer_gpu import LOG2E
from .product_plan_gpu import DEPTH, TILE_ROWS, ProductBlocks, Result
from .product_tiles_gpu import TRANSFORMS, load_tiles

_WARPS = 4  # of a warpgroup
_REGISTERS = {1: (240, 40), 2: (240, 24)}  # of a consumer's and of a loading thread, by consumers of a block
_WGMMA = plgpu.Layout.WGMMA
_SCALAR = plgpu.Layout.WG_SPLAT(())
_REF = plgpu.RefType()


def _silu_times(gate: ir.Value, up: ir.Value) -> ir.Value:
    """gate / (1 + exp(-gate)) * up of vectors of two."""
    out = []
    for i in range(2):
        x, factor = (vector.extract(v, dynamic_position=[], static_position=[i]) for v in (gate, up))
        exponential = ends.exp2_of(arith.mulf(x, ends.f32(-LOG2E)))
        divisor = arith.addf(exponential, ends.f32(1.0))
        inverse = utils.inline_ptx("rcp.approx.ftz.f32 $0, $1;", divisor, result_types=ir.F32Type.get())
        out.append(arith.mulf(arith.mulf(x, inverse), factor))
    return vector.from_elements(gate.type, out)


def _store(out_ref, row, column, part, acc, *, result: Result) -> None:
    """Stores a warpgroup's tile from (row, column) on, but for rows and columns past the last."""

    @plgpu.inline_mgpu(arg_types=(_REF, _SCALAR, _SCALAR, _SCALAR, _WGMMA))
    def put(_, ref, row, column, part, acc):
        first_row, first_column, part = (ends.scalar_of(x) for x in (row, column, part))
        own, pair = ends.own_rows()
        *_, rows, columns = ir.MemRefType(ref.type).shape
        registers = ends.halves(acc)
        if result == "silu":
            half = registers.shape[0] // 2
        width = registers.shape[0] * 8 // (2 if result == "silu" else 1)
        first_column = arith.addi(first_column, pair)
        for which, within in enumerate(own):
            at = arith.addi(first_row, within)
            where = [part, at] if result == "parts" else [at]
            with utils.when(ends.less(at, ends.i32(rows))):
                for n in range(width // 8):
                    value = registers[n, which]
                    if result == "silu":
                        value = _silu_times(value, registers[half + n, which])
                    column = arith.addi(first_column, ends.i32(8 * n))
                    value = ends.rounded(value, ref, 2)
                    if columns % width == 0:
                        ends.store_global(value, ref, [*where, column], 2)
                        continue
                    with utils.when(ends.less(column, ends.i32(columns))):
                        ends.store_global(value, ref, [*where, column], 2)

    put(out_ref, row, column, part, acc)


@functools.partial(jax.jit, static_argnames=("result", "blocks"))
def product_gpu(x, kernel, *, result: Result, blocks: ProductBlocks):
    """The kernel call on x [T, K] and kernel [K, F]; jitted, so that equal layers are lowered once.

    Args:
      x, kernel: of 16 bits; T is a multiple of 8, K and the columns of a result (F, or F / 2 of gate and up) of 64.
      result: "product" of x's dtype; "parts" of it in f32 [P, T, F], whose sum it is; "silu", silu(gate) * up of a
        kernel that holds gate's columns and then up's.
    """
    rows, depth = x.shape
    out_columns, tile_columns = kernel.shape[1], blocks.columns
    if result == "silu":
        out_columns, tile_columns = out_columns // 2, tile_columns // 2
        # The two halves of the columns as an axis of their own, and tiles of 8 x 64.
        kernel = kernel.reshape(depth // 8, 8, 2, out_columns // DEPTH, DEPTH)
    consumers, stages, parts = blocks.consumers, blocks.stages, blocks.parts
    tile_rows = TILE_ROWS * consumers
    row_tiles, column_tiles, depths = -(-rows // tile_rows), -(-out_columns // tile_columns), depth // DEPTH
    units, box_rows = row_tiles * column_tiles * parts, min(rows, tile_rows)
    num_blocks = min(blocks.num_blocks, units)

    def unit_of(nth):
        """First row and column, part, and the range of K tiles of a block's nth unit."""
        unit = lax.axis_index("block") + nth * num_blocks
        rest, row_tile = lax.div(unit, row_tiles), lax.rem(unit, row_tiles)
        column_tile, part = lax.div(rest, parts), lax.rem(rest, parts)
        first, end = lax.div(part * depths, parts), lax.div((part + 1) * depths, parts)
        return row_tile * tile_rows, column_tile * tile_columns, part, first, end

    def body(x_ref, kernel_ref, out_ref, x_smem, kernel_smem, full, freed):
        wg = lax.axis_index("wg")
        count = lax.div(units - 1 - lax.axis_index("block"), num_blocks) + 1
        sync.initialise([(full, stages, 1), (freed, stages, _WARPS * consumers)])

        def load(nth, step):
            row, column, _, first, end = unit_of(nth)

            def tile(k, step):
                stage = lax.rem(step, stages)

                @pl.when(step >= stages)
                def _():
                    sync.wait(freed, stage, lax.div(step, stages) - 1)

                x_tile = x_smem.at[stage] if box_rows == tile_rows else x_smem.at[stage, pl.ds(0, box_rows)]
                load_tiles(kernel_ref, x_ref, kernel_smem.at[stage], x_tile, full, stage, k, row, column)
                return step + 1

            return lax.fori_loop(first, end, tile, step)

        def compute(nth, step):
            row, column, part, first, end = unit_of(nth)

            def accumulate(acc):
                def tile(k, step):
                    stage = lax.rem(step, stages)
                    sync.wait(full, stage, lax.div(step, stages))
                    plgpu.wgmma(acc, x_smem.at[stage, pl.ds(wg * TILE_ROWS, TILE_ROWS)], kernel_smem.at[stage])
                    plgpu.wgmma_wait(1)  # the product before has read its tiles

                    @pl.when(k > first)
                    def _():
                        sync.arrive(freed, lax.rem(step - 1, stages))

                    return step + 1

                last = lax.fori_loop(first, end, tile, step) - 1
                plgpu.wgmma_wait(0)
                sync.arrive(freed, lax.rem(last, stages))
                return acc[...]

            acc = pl.run_scoped(accumulate, plgpu.ACC((TILE_ROWS, blocks.columns), jnp.float32))
            _store(out_ref, row + wg * TILE_ROWS, column, part, acc, result=result)
            return step + (end - first)

        registers, loading_registers = _REGISTERS[consumers]

        @pl.when(wg < consumers)
        def _():
            plgpu.set_max_registers(registers, action="increase")
            lax.fori_loop(0, count, compute, jnp.int32(0))

        @pl.when(wg == consumers)
        def _():
            plgpu.set_max_registers(loading_registers, action="decrease")

            def warp(index):
                @pl.when(index == 0)
                def _():
                    lax.fori_loop(0, count, load, jnp.int32(0))

            plgpu.warp_map(warp)

    shape = (parts, rows, out_columns) if result == "parts" else (rows, out_columns)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32 if result == "parts" else x.dtype),
        scratch_types=[
            plgpu.SMEM((stages, tile_rows, DEPTH), x.dtype, transforms=TRANSFORMS),
            plgpu.SMEM((stages, DEPTH, blocks.columns), kernel.dtype, transforms=TRANSFORMS),
            sync.barriers(stages),
            sync.barriers(stages),
        ],
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=consumers + 1,
        thread_name="wg",
        kernel_name=f"matmul_{result}",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=mgpu.LoweringSemantics.Lane,
        ),
    )(x, kernel)
