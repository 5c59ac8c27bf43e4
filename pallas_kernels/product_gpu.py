"""Matrix products for Hopper in Pallas Mosaic GPU: few rows times a kernel that is read from memory once.

    x [T, K]  @  kernel [K, F]   ->   the product [T, F], f32 parts of it [P, T, F], or silu(gate) * up [T, F / 2]

A unit is a tile of `64 * consumers` rows and `columns` columns, over one of `parts` parts of K. A block of threads
stays for the whole launch and walks its units; a warp loads tiles of 64 of K into a ring in shared memory, on into the
next unit while this one is stored, and each computing warpgroup has 64 of the rows:

    loading warp   [ wait for a free stage | kernel tile, rows' tile ]*
    consumer       [ wait for a full stage | acc [64, columns] += x [64, 64] kernel [64, columns] | free the last one ]*
                   -> registers to global memory

With `cut` a block has an equal share of all steps instead, which may begin and end within a tile. A tile that two
blocks have a piece of is finished by whoever comes second, each warpgroup by itself: it adds the sums that the first
has left in global memory.

The kernel stays as it is stored, [in, out]; the matrix instruction takes it that way round. Of gate and up a tile has
half of its columns each, brought side by side by one copy, so what joins them is done on registers.
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
from jaxlib.mlir.dialects import arith, memref, vector

from . import combine_gpu as ends
from . import prefill_barriers_gpu as sync
from .consumer_gpu import LOG2E
from .product_plan_gpu import DEPTH, TILE_ROWS, ProductBlocks, Result, Walk
from .product_tiles_gpu import TRANSFORMS, load_tiles

_WARPS = 4  # of a warpgroup
# Of a consumer's and of a loading thread, by consumers of a block.
_REGISTERS = {1: (240, 40), 2: (240, 24), 3: (152, 56)}
_THREADS = 128  # of a warpgroup
_LOADS = 16  # of 16 bytes of a piece, in flight together: beside the sums there are no registers for all
_COMPLETE = 3  # of a tile's counter: two pieces came, and the sums of one are there
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


def _elements(*vectors: ir.Value) -> list[ir.Value]:
    size = lambda x: ir.VectorType(x.type).shape[0]  # noqa: E731
    return [vector.extract(x, dynamic_position=[], static_position=[i]) for x in vectors for i in range(size(x))]


def _await_sums(counters: ir.Value, place: ir.Value) -> None:
    """In a thread: waits until who came first has stored its sums, which it does already."""
    utils.inline_ptx(
        "{ .reg .pred p; .reg .b32 now; again: ld.acquire.gpu.global.b32 now, [$0]; "
        f"setp.ne.s32 p, now, {_COMPLETE}; @p bra again; }}",
        ends.address(counters, [place])[0],
        has_side_effects=True,
    )


def _join_pieces(pieces_ref, counters_ref, flag_ref, place, whole, acc):
    """Brings the two pieces of a tile together; who comes first leaves its sums, who comes second adds them to its own.

    Both orders give the same bits, and the counter is 0 again afterwards.

    Args:
      pieces_ref: f32[places, columns / 8, threads, 4], what comes first.
      counters_ref: i32[places]: how many came, and one more when the sums of the first are there.
      flag_ref: an int of shared memory.
      place: where the pieces meet.
      whole: 1 if there is no other piece; then nothing is done.

    Returns:
      the sums, and whether they are those of a whole tile: 0 if the other piece's warpgroup has them, else 1.
    """

    @plgpu.inline_mgpu(
        arg_types=(_REF, _REF, _REF, _SCALAR, _SCALAR, _WGMMA),
        return_type=(
            plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=_WGMMA),
            plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR),
        ),
    )
    def join(_, pieces, counters, flag, place, whole, acc):
        place, whole, own = ends.scalar_of(place), ends.scalar_of(whole), ends.halves(acc)
        leader, zero = ends.equal(ends.thread_index(), ends.i32(0)), utils.c(0, ir.IndexType.get())
        types = [*(x.type for x in own.flat), whole.type]
        four = ir.VectorType.get((4,), ir.F32Type.get())
        where = lambda n: [place, ends.i32(n), ends.thread_index(), ends.i32(0)]  # noqa: E731

        def leave() -> list[ir.Value]:
            for n, pairs in enumerate(own):
                ends.store_global(vector.from_elements(four, _elements(*pairs)), pieces, where(n), 4)
            utils.warpgroup_barrier()  # puts all threads' stores before the leader's fence
            with utils.when(leader):
                ends.count_one(counters, place)
            return [*own.flat, ends.i32(0)]

        def add(before: ir.Value) -> list[ir.Value]:
            with utils.when(leader):
                with utils.when(ends.equal(before, ends.i32(1))):
                    _await_sums(counters, place)
                ends.store_global(ends.i32(0), counters, [place])
            utils.warpgroup_barrier()  # what the leader has acquired, all have
            sums = []
            for first in range(0, len(own), _LOADS):
                some = own[first : first + _LOADS]
                loaded = [ends.load_global(pieces, where(first + n), 4) for n in range(len(some))]
                for pairs, other in zip(some, map(_elements, loaded), strict=True):
                    others = (vector.from_elements(pairs[0].type, half) for half in (other[:2], other[2:]))
                    sums += [arith.addf(mine, half) for mine, half in zip(pairs, others, strict=True)]
            return [*sums, ends.i32(1)]

        def arrive() -> list[ir.Value]:
            with utils.when(leader):
                memref.store(ends.count_one(counters, place, acquire=True), flag, [zero])
            utils.warpgroup_barrier()
            before = memref.load(flag, [zero])
            return ends.either(ends.equal(before, ends.i32(0)), leave, lambda: add(before), types)

        *sums, done = ends.either(ends.equal(whole, ends.i32(1)), lambda: [*own.flat, whole], arrive, types)
        registers = np.array(sums, dtype=object).reshape(acc.registers.shape)
        return (
            mgpu.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None),
            mgpu.FragmentedArray.splat(done, (), is_signed=True),
        )

    return join(pieces_ref, counters_ref, flag_ref, place, whole, acc)


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
    consumers, stages = blocks.consumers, blocks.stages
    tile_rows = TILE_ROWS * consumers
    walk = Walk.of(blocks, -(-rows // tile_rows), -(-out_columns // tile_columns), depth // DEPTH)
    box_rows = min(rows, tile_rows)

    def unit_of(nth):
        """First row and column, part, and the range of K tiles of a block's nth unit."""
        row_tile, column_tile, *others = walk.unit(lax.axis_index("block"), nth)
        return row_tile * tile_rows, column_tile * tile_columns, *others

    def body(x_ref, kernel_ref, *refs):
        refs = list(refs)
        counters_ref = refs.pop(0) if blocks.cut else None
        out_ref, pieces_ref = refs.pop(0), refs.pop(0) if blocks.cut else None
        x_smem, kernel_smem, full, freed, *flags = refs
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        count = walk.count(block)
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
            store = functools.partial(_store, out_ref, row + wg * TILE_ROWS, column, part, result=result)
            if blocks.cut:
                place = walk.meeting(block, first) * consumers + wg
                whole = (end - first == walk.depths).astype(jnp.int32)
                acc, done = _join_pieces(pieces_ref, counters_ref, flags[0].at[pl.ds(wg, 1)], place, whole, acc)
                pl.when(done == 1)(lambda: store(acc))
            else:
                store(acc)
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

    shape = (blocks.parts, rows, out_columns) if result == "parts" else (rows, out_columns)
    out_type = [jax.ShapeDtypeStruct(shape, jnp.float32 if result == "parts" else x.dtype)]
    operands, flags = [x, kernel], []
    if blocks.cut:
        places = walk.num_blocks * consumers
        # Each call leaves zeros, so calls may share them, and XLA makes them once for all that are in one program or in
        # one round of a loop. But no two calls may run at the same time. Layers do not: each reads what the one before
        # it gave. Calls that do not, XLA puts one after the other unless it is told to let a graph's kernels overlap.
        operands.append(jnp.zeros(places, jnp.int32))
        out_type.append(jax.ShapeDtypeStruct((places, blocks.columns // 8, _THREADS, 4), jnp.float32))
        flags.append(plgpu.SMEM((consumers,), jnp.int32))
    product, *_ = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[
            plgpu.SMEM((stages, tile_rows, DEPTH), x.dtype, transforms=TRANSFORMS),
            plgpu.SMEM((stages, DEPTH, blocks.columns), kernel.dtype, transforms=TRANSFORMS),
            sync.barriers(stages),
            sync.barriers(stages),
            *flags,
        ],
        grid=(walk.num_blocks,),
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
    )(*operands)
    return product
