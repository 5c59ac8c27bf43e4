"""The gated product of many rows for Hopper in Pallas Mosaic GPU: silu(x @ gate) * (x @ up), at the tensor cores' pace.

    x [T, K]  @  kernel [K, 2 F], gate's columns and then up's   ->   [T, F]

As `product_gpu`, but what bounds it is not the memory. What a product of many rows loses time to, and what is done:

    tiles come from L2, once for every block       a cluster's blocks share a tile of the kernel: each loads a part of
                                                   it into the shared memory of all
    rows or columns leave L2 before all had them   tiles are walked in groups of rows
    a result is stored in small pieces             it goes through shared memory, from where a copy of its own brings
                                                   it out while the next products begin

    loading warp   [ wait until all of the cluster freed a stage | part of kernel tile to all, own rows' tile ]*
    consumer       [ wait for a full stage | acc += x kernel | free the last one, in all of the cluster ]*
                   -> registers -> shared memory -> global memory
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
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
from .product_plan_gpu import DEPTH, GATED_COLUMNS, GATED_ROWS, TILE_ROWS, GatedBlocks
from .product_tiles_gpu import TRANSFORMS, load_tiles

_CONSUMERS = GATED_ROWS // TILE_ROWS
_STAGES = 4
_OUT_COLUMNS = GATED_COLUMNS // 2  # half of a tile's columns are gate's, half up's
_WARPS = 4  # of a warpgroup
_REGISTERS, _LOADING_REGISTERS = 240, 24
_MOST = 60.0  # of -gate / log(2): a pair of divisors can be multiplied, and silu is 0 beside any other value
_WGMMA = plgpu.Layout.WGMMA
_SCALAR = plgpu.Layout.WG_SPLAT(())
_REF = plgpu.RefType()


def _meet() -> None:
    """All threads of a cluster wait for each other; not all lanes of a warp need come at once."""

    @plgpu.inline_mgpu(arg_types=())
    def meet(_):
        utils.inline_ptx("barrier.cluster.arrive.release;", has_side_effects=True)
        utils.inline_ptx("barrier.cluster.wait.acquire;", has_side_effects=True)

    meet()


def _free(freed, stage, *, cluster: int) -> None:
    """Arrives at the stage's barrier, once for each calling warp, in every block of the cluster."""
    if cluster == 1:
        return sync.arrive(freed, stage)

    @plgpu.inline_mgpu(arg_types=(_REF, _SCALAR))
    def arrive(_, ref, stage):
        utils.warp_barrier()
        lane = arith.remui(ends.thread_index(), ends.i32(32))
        barrier = utils.BarrierRef(utils.memref_ptr(ref), ends.scalar_of(stage), None, 1)
        with utils.when(ends.less(lane, ends.i32(cluster))):  # a lane for each block
            there = utils.get_cluster_ptr(barrier.get_ptr(), lane, generic=False)
            # Of the cluster's scope the release would be a fence of the whole GPU, for each tile. What is to be over
            # before the stage is written again are reads of finished matrix instructions, and nothing was written.
            utils.inline_ptx("mbarrier.arrive.shared::cluster.b64 _, [$0];", there, has_side_effects=True)

    arrive(freed, stage)


def _silu_times(gate: ir.Value, up: ir.Value) -> ir.Value:
    """gate / (1 + exp(-gate)) * up of vectors of two, with one reciprocal of both divisors' product."""
    of = lambda v: [vector.extract(v, dynamic_position=[], static_position=[i]) for i in range(2)]  # noqa: E731
    divisors = []
    for x in of(gate):
        power = arith.minimumf(arith.mulf(x, ends.f32(-LOG2E)), ends.f32(_MOST))
        divisors.append(arith.addf(ends.exp2_of(power), ends.f32(1.0)))
    inverse = utils.inline_ptx("rcp.approx.ftz.f32 $0, $1;", arith.mulf(*divisors), result_types=ir.F32Type.get())
    out = [
        arith.mulf(arith.mulf(arith.mulf(inverse, other), x), factor)
        for x, factor, other in zip(of(gate), of(up), divisors[::-1], strict=True)
    ]
    return vector.from_elements(gate.type, out)


def _gated(acc, dtype):
    """silu(gate) * up of a warpgroup's tile."""
    shape = TILE_ROWS, _OUT_COLUMNS

    @plgpu.inline_mgpu(arg_types=(_WGMMA,), return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=_WGMMA))
    def gated(_, acc):
        registers = acc.registers.reshape(2, _OUT_COLUMNS // 8, 2)  # gate or up, eights of columns, rows
        out = np.empty_like(registers[0])
        ty = ir.VectorType.get((2,), utils.dtype_to_ir_type(dtype))
        for where in np.ndindex(out.shape):
            out[where] = arith.truncf(ty, _silu_times(registers[0][where], registers[1][where]))
        layout = _WGMMA.to_mgpu()
        return mgpu.FragmentedArray(
            _registers=out.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None
        )

    return gated(acc)


@functools.partial(jax.jit, static_argnames=("blocks",))
def gated_gpu(x, kernel, *, blocks: GatedBlocks):
    """The kernel call on x [T, K] and kernel [K, 2 F]; jitted, so that equal layers are lowered once.

    Args:
      x, kernel: of 16 bits; T is a multiple of 8 and at least that of a block's tile, K and F are multiples of 64.
    """
    rows, depth = x.shape
    out_columns = kernel.shape[1] // 2
    # The two halves of the columns as an axis of their own, and tiles of 8 x 64.
    kernel = kernel.reshape(depth // 8, 8, 2, out_columns // DEPTH, DEPTH)
    cluster, depths = blocks.cluster, depth // DEPTH
    unit_rows = GATED_ROWS * cluster
    row_tiles, column_tiles = -(-rows // unit_rows), -(-out_columns // _OUT_COLUMNS)
    group = max(1, min(blocks.group_rows // unit_rows, row_tiles))
    units = row_tiles * column_tiles
    num_blocks = min(blocks.multiprocessors // cluster, units)  # or clusters of them

    def unit_of(nth):
        """First row and column of a block's nth unit: down a group of row tiles, then on to the next columns."""
        unit = lax.axis_index("block") + nth * num_blocks
        first = lax.div(unit, group * column_tiles) * group
        tiles = jnp.minimum(row_tiles - first, group)
        within = lax.rem(unit, group * column_tiles)
        row = (first + lax.rem(within, tiles)) * unit_rows
        if cluster > 1:
            row += lax.axis_index("rank") * GATED_ROWS
        return row, lax.div(within, tiles) * _OUT_COLUMNS

    def body(x_ref, kernel_ref, out_ref, x_smem, kernel_smem, out_smem, full, freed):
        wg = lax.axis_index("wg")
        count = lax.div(units - 1 - lax.axis_index("block"), num_blocks) + 1
        sync.initialise([(full, _STAGES, 1), (freed, _STAGES, _WARPS * _CONSUMERS * cluster)])
        if cluster > 1:
            _meet()

        def load(nth, step):
            row, column = unit_of(nth)

            def tile(k, step):
                stage = lax.rem(step, _STAGES)

                @pl.when(step >= _STAGES)
                def _():
                    sync.wait(freed, stage, lax.div(step, _STAGES) - 1)

                smem = kernel_smem.at[stage], x_smem.at[stage]
                load_tiles(kernel_ref, x_ref, *smem, full, stage, k, row, column, cluster=cluster)
                return step + 1

            return lax.fori_loop(0, depths, tile, step)

        def compute(nth, _):
            row, column = unit_of(nth)
            first_step, own = nth * depths, wg * TILE_ROWS

            def accumulate(acc):
                def tile(k, _):
                    step = first_step + k
                    stage = lax.rem(step, _STAGES)
                    sync.wait(full, stage, lax.div(step, _STAGES))
                    plgpu.wgmma(acc, x_smem.at[stage, pl.ds(own, TILE_ROWS)], kernel_smem.at[stage])
                    plgpu.wgmma_wait(1)  # the product before has read its tiles

                    @pl.when(k > 0)
                    def _():
                        _free(freed, lax.rem(step - 1, _STAGES), cluster=cluster)

                lax.fori_loop(0, depths, tile, None)
                plgpu.wgmma_wait(0)
                _free(freed, lax.rem(first_step + depths - 1, _STAGES), cluster=cluster)
                return acc[...]

            value = _gated(pl.run_scoped(accumulate, plgpu.ACC((TILE_ROWS, GATED_COLUMNS), jnp.float32)), x.dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the copy before has read what is overwritten now
            out_smem[wg] = value
            plgpu.commit_smem()
            # What lies past the last row or column is not stored.
            where = pl.ds(row + own, TILE_ROWS), pl.ds(column, _OUT_COLUMNS)
            plgpu.copy_smem_to_gmem(out_smem.at[wg], out_ref.at[where])

        @pl.when(wg < _CONSUMERS)
        def _():
            plgpu.set_max_registers(_REGISTERS, action="increase")
            lax.fori_loop(0, count, compute, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(wg == _CONSUMERS)
        def _():
            plgpu.set_max_registers(_LOADING_REGISTERS, action="decrease")

            def warp(index):
                @pl.when(index == 0)
                def _():
                    lax.fori_loop(0, count, load, jnp.int32(0))

            plgpu.warp_map(warp)

        if cluster > 1:
            _meet()  # nobody is gone while another block arrives at its barriers

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, out_columns), x.dtype),
        scratch_types=[
            plgpu.SMEM((_STAGES, GATED_ROWS, DEPTH), x.dtype, transforms=TRANSFORMS),
            plgpu.SMEM((_STAGES, DEPTH, GATED_COLUMNS), kernel.dtype, transforms=TRANSFORMS),
            plgpu.SMEM((_CONSUMERS, TILE_ROWS, _OUT_COLUMNS), x.dtype, transforms=TRANSFORMS),
            sync.barriers(_STAGES),
            sync.barriers(_STAGES),
        ],
        grid=(num_blocks,),
        grid_names=("block",),
        cluster=(cluster,) if cluster > 1 else (),
        cluster_names=("rank",) if cluster > 1 else (),
        num_threads=_CONSUMERS + 1,
        thread_name="wg",
        kernel_name="matmul_gated",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=mgpu.LoweringSemantics.Lane,
        ),
    )(x, kernel)
