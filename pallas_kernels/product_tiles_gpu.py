"""`load_tiles`: what the products for Hopper ask for, a tile of the kernel and one of the rows for each 64 of K."""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

import math
from typing import Final

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu

from . import combine_gpu as ends
from .product_plan_gpu import DEPTH
from .read_once_gpu import leave_first

_SWIZZLE = 128
TRANSFORMS: Final = plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(_SWIZZLE)
_SCALAR = plgpu.Layout.WG_SPLAT(())
_REF = plgpu.RefType()


def load_tiles(kernel_ref, x_ref, kernel_smem, x_smem, full, stage, k, row, column, *, cluster: int = 1) -> None:
    """In a warp: asks for the tiles of the k-th 64 of K; a kernel of five axes is of gate and up.

    Who else asks for a tile of the kernel does so at the same time, or when L2 has long lost it: those leave L2 first.

    Args:
      kernel_ref, x_ref: in global memory: [K, F], or gate and up as [K / 8, 8, 2, F / 64, 64]; [T, K].
      kernel_smem, x_smem: a stage of the ring, as wide and as high as a tile.
      full: barriers of all stages.
      stage, k, row, column: whose tiles they are.
      cluster: blocks of threads that ask for one tile of the kernel together, for the shared memory of all.
    """

    @plgpu.inline_mgpu(
        arg_types=(_REF, _REF, plgpu.RefType(TRANSFORMS), plgpu.RefType(TRANSFORMS), _REF, *[_SCALAR] * 4)
    )
    def load(ctx, kernel, x, kernel_smem, x_smem, full, *scalars):
        index = ir.IndexType.get()
        stage, k, row, column = (ends.scalar_of(x) for x in scalars)
        full = utils.BarrierRef(utils.memref_ptr(full), stage, None, 1)
        at = lambda x, width, unit: mgpu.ds(  # noqa: E731
            arith.index_cast(index, arith.muli(x, ends.i32(unit)) if unit > 0 else arith.divui(x, ends.i32(-unit))),
            width,
        )
        shape = lambda ref: ir.MemRefType(ref.type).shape  # noqa: E731
        nbytes = 2 * (math.prod(shape(kernel_smem)) + math.prod(shape(x_smem)))  # all that arrives in this block
        columns = shape(kernel_smem)[1] * DEPTH
        axis = gpu.Dimension.x if cluster > 1 else None
        if len(shape(kernel)) == 5:
            halves = columns // 2 // DEPTH
            kernel_slice = (
                at(k, DEPTH // 8, DEPTH // 8),
                slice(None),
                slice(None),
                at(column, halves, -DEPTH),
                slice(None),
            )
            kernel_transform = mgpu.TransposeTransform((0, 2, 3, 1, 4))
            kernel_smem = utils.memref_unfold(kernel_smem, 1, (2, halves))
        else:
            kernel_slice = at(k, DEPTH, DEPTH), at(column, columns, 1)
            kernel_transform = mgpu.TileTransform((8, DEPTH))
        rows_slice = at(row, shape(x_smem)[0] * 8, 1), at(k, DEPTH, DEPTH)
        copies = [
            (kernel, kernel_smem, kernel_slice, kernel_transform, axis),
            (x, x_smem, rows_slice, mgpu.TileTransform((8, DEPTH)), None),
        ]
        with utils.when(utils.single_thread_predicate(scope=utils.ThreadSubset.WARP)):
            full.arrive_expect_tx(nbytes)
            for ref, smem, where, transform, collective in copies:
                ctx.async_copy(
                    src_ref=ref,
                    dst_ref=smem,
                    gmem_slice=where,
                    gmem_transform=(transform,),
                    barrier=full,
                    swizzle=_SWIZZLE,
                    arrive=False,
                    collective=collective,
                    predicate=None,
                )
                if ref is kernel:
                    leave_first()

    load(kernel_ref, x_ref, kernel_smem, x_smem, full, stage, k, row, column)
