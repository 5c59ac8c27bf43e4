"""The ends of the Mosaic GPU kernel, thread by thread: loading queries, storing rows, joining the pieces of a unit.

Pallas copies whole tiles, but a unit has as few rows as a KV head has query heads, and their number is data. So these
parts are written on registers: a row's owner loads and stores it, and nobody else does.
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false

import math

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, vector

from .tuning import TILE_ROWS

_ROWS = plgpu.Layout.WGMMA.reduce(1)
_SCALAR = plgpu.Layout.WG_SPLAT(())
_REF = plgpu.RefType()
_THREADS = 128
_AT_ONCE = 16  # pieces whose loads are in flight together


def i32(x: int) -> ir.Value:
    return utils.c(x, ir.IntegerType.get_signless(32))


def f32(x: float) -> ir.Value:
    return utils.c(x, ir.F32Type.get())


def thread_index() -> ir.Value:
    """The thread's number in its warpgroup."""
    ty = ir.IntegerType.get_signless(32)
    return arith.remui(arith.index_cast(ty, gpu.thread_id(gpu.Dimension.x)), i32(_THREADS))


def scalar_of(x: mgpu.FragmentedArray) -> ir.Value:
    return x.registers.flat[0]


def ceil_div(x: ir.Value, y: int) -> ir.Value:
    """Rounds up; at most 0 for an x that is at most 0."""
    return arith.divsi(arith.addi(x, i32(y - 1)), i32(y))


def less(x: ir.Value, y: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.slt, x, y)


def equal(x: ir.Value, y: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, x, y)


def address(ref: ir.Value, indices: list[ir.Value]) -> tuple[ir.Value, ir.Type]:
    """Global address of an element of a row-major array."""
    ty = ir.MemRefType(ref.type)
    strides, _ = ty.get_strides_and_offset()
    offset = utils.dyn_dot(indices, [i32(s) for s in strides])
    pointer = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(ref))
    return utils.getelementptr(pointer, [offset], ty.element_type), ty.element_type


def load_global(ref: ir.Value, indices: list[ir.Value], width: int = 1) -> ir.Value:
    """Loads `width` elements at once; the address must be aligned to them."""
    pointer, element = address(ref, indices)
    ty = element if width == 1 else ir.VectorType.get((width,), element)
    return llvm.load(ty, pointer, alignment=width * utils.bytewidth(element))


def store_global(value: ir.Value, ref: ir.Value, indices: list[ir.Value], width: int = 1) -> None:
    pointer, element = address(ref, indices)
    llvm.store(value, pointer, alignment=width * utils.bytewidth(element))


def exp2_of(x: ir.Value) -> ir.Value:
    return utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", x, result_types=ir.F32Type.get())


def log2_of(x: ir.Value) -> ir.Value:
    return utils.inline_ptx("lg2.approx.ftz.f32 $0, $1;", x, result_types=ir.F32Type.get())


def splat(x: ir.Value, width: int) -> ir.Value:
    return vector.broadcast(ir.VectorType.get((width,), x.type), x)


def query_of(row: ir.Value, token: ir.Value, head: ir.Value, group: int) -> list[ir.Value]:
    """Token and query head of a tile's row."""
    nth = arith.divui(row, i32(group))
    in_group = arith.subi(row, arith.muli(nth, i32(group)))
    return [arith.addi(token, nth), arith.addi(arith.muli(head, i32(group)), in_group)]


def own_rows() -> tuple[list[ir.Value], ir.Value]:
    """The two rows of a 64-row product that a thread holds a part of, and its first column in each 8."""
    lane, warp = arith.remui(thread_index(), i32(32)), arith.divui(thread_index(), i32(32))
    row = arith.addi(arith.muli(warp, i32(16)), arith.divui(lane, i32(4)))
    column = arith.muli(arith.remui(lane, i32(4)), i32(2))
    return [row, arith.addi(row, i32(8))], column


def halves(x: mgpu.FragmentedArray) -> np.ndarray:
    """Registers of a [64, N] product as [N / 8, 2]: for each 8 columns, those of the thread's two rows."""
    return x.registers.reshape(-1, 2)


def load_queries(q_ref, token, head, live_rows, *, group: int, head_dim: int, dtype):
    """The queries of a tile, [64, D]: rows from `live_rows` on are some other queries."""
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(_REF, _SCALAR, _SCALAR, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct((TILE_ROWS, head_dim), dtype, layout=layout),
    )
    def load(_, ref, token, head, live_rows):
        rows, column = own_rows()
        registers = np.empty((head_dim // 8, 2), dtype=object)
        for half, row in enumerate(rows):
            row = arith.select(less(row, scalar_of(live_rows)), row, i32(0))
            where = query_of(row, scalar_of(token), scalar_of(head), group)
            for n in range(head_dim // 8):
                registers[n, half] = load_global(ref, [*where, arith.addi(column, i32(8 * n))], 2)
        shape = layout.to_mgpu().registers_shape((TILE_ROWS, head_dim))
        return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=layout.to_mgpu(), _is_signed=None)

    return load(q_ref, token, head, live_rows)


def load_sinks(sinks_ref, head, *, group: int):
    """The sink of each row's query head, [64]."""

    @plgpu.inline_mgpu(
        arg_types=(_REF, _SCALAR), return_type=plgpu.ShapeDtypeStruct((TILE_ROWS,), jnp.float32, layout=_ROWS)
    )
    def load(_, ref, head):
        registers = np.empty((2,), dtype=object)
        for half, row in enumerate(own_rows()[0]):
            _, query_head = query_of(row, i32(0), scalar_of(head), group)
            registers[half] = splat(load_global(ref, [query_head]), 1)
        shape = _ROWS.to_mgpu().registers_shape((TILE_ROWS,))
        return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=_ROWS.to_mgpu(), _is_signed=None)

    return load(sinks_ref, head)


def _store_own_rows(out, lse, live_rows, store_pair, store_lse) -> None:
    """Calls the two functions for all that the thread holds of live rows."""
    rows, column = own_rows()
    first_lane = equal(column, i32(0))
    for half, row in enumerate(rows):
        with utils.when(less(row, live_rows)):
            for n, pair in enumerate(halves(out)[:, half]):
                store_pair(pair, row, arith.addi(column, i32(8 * n)))
            if lse is not None:
                with utils.when(first_lane):
                    value = vector.extract(lse.registers.flat[half], dynamic_position=[], static_position=[0])
                    store_lse(value, row)


def rounded(x: ir.Value, ref: ir.Value, width: int) -> ir.Value:
    element = ir.MemRefType(ref.type).element_type
    return x if element == ir.F32Type.get() else arith.truncf(ir.VectorType.get((width,), element), x)


def store_rows(out_ref, lse_ref, token, head, live_rows, out, lse, *, group: int) -> None:
    """Stores the finished rows of a tile, and their log-sum-exps if there is a place for them."""
    with_lse = lse_ref is not None

    @plgpu.inline_mgpu(
        arg_types=(_REF, *[_REF] * with_lse, _SCALAR, _SCALAR, _SCALAR, plgpu.Layout.WGMMA, *[_ROWS] * with_lse)
    )
    def store(_, *args):
        args = list(args)
        ref = args.pop(0)
        lse_ref = args.pop(0) if with_lse else None
        token, head, live_rows = (scalar_of(args.pop(0)) for _ in range(3))
        out, lse = args[0], args[1] if with_lse else None
        _store_own_rows(
            out,
            lse,
            live_rows,
            lambda x, row, column: store_global(
                rounded(x, ref, 2), ref, [*query_of(row, token, head, group), column], 2
            ),
            lambda x, row: store_global(x, lse_ref, query_of(row, token, head, group)),
        )

    store(out_ref, *[lse_ref] * with_lse, token, head, live_rows, out, *[lse] * with_lse)


def store_partial(part_ref, part_lse_ref, slot, live_rows, out, lse) -> None:
    """Stores the rows of a piece: outputs as if there were no others, and base-2 log-sum-exps."""

    @plgpu.inline_mgpu(arg_types=(_REF, _REF, _SCALAR, _SCALAR, plgpu.Layout.WGMMA, _ROWS))
    def store(_, ref, lse_ref, slot, live_rows, out, lse):
        slot = scalar_of(slot)
        _store_own_rows(
            out,
            lse,
            scalar_of(live_rows),
            lambda x, row, column: store_global(x, ref, [slot, row, column], 2),
            lambda x, row: store_global(x, lse_ref, [slot, row]),
        )

    store(part_ref, part_lse_ref, slot, live_rows, out, lse)


def join_pieces(refs, scalars, *, group: int, head_dim: int) -> None:
    """Counts this piece as finished; the last of a unit joins all of them and leaves the counter at 0.

    Args:
      refs: partial outputs and log-sum-exps, counters, one int of shared memory, outputs, log-sum-exps or `None`, sinks
        or `None`.
      scalars: token, head, live rows, pieces, first worker.
    """
    has = [ref is not None for ref in refs]

    @plgpu.inline_mgpu(arg_types=(*[_REF] * sum(has), *[_SCALAR] * 5))
    def join(_, *args):
        args = list(args)
        part, part_lse, counters, flag, out, lse, sinks = (args.pop(0) if here else None for here in has)
        token, head, live_rows, pieces, first_worker = map(scalar_of, args)
        leader = equal(thread_index(), i32(0))
        zero = utils.c(0, ir.IndexType.get())
        # The barrier puts all threads' stores before the leader's fence, which makes them visible before the count is.
        utils.warpgroup_barrier()
        with utils.when(leader):
            counter, _ = address(counters, [first_worker])
            utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
            before = utils.inline_ptx(
                "atom.global.add.relaxed.gpu.u32 $0, [$1], 1;",
                counter,
                result_types=ir.IntegerType.get_signless(32),
                has_side_effects=True,
            )
            memref.store(before, flag, [zero])
        utils.warpgroup_barrier()
        before = memref.load(flag, [zero])
        with utils.when(equal(before, arith.subi(pieces, i32(1)))):
            utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
            with utils.when(leader):
                store_global(i32(0), counters, [first_worker])
            _join(part, part_lse, out, lse, sinks, token, head, live_rows, pieces, first_worker, group, head_dim)

    join(*[ref for ref in refs if ref is not None], *scalars)


def _join(part, part_lse, out, lse, sinks, token, head, live_rows, pieces, first_worker, group, head_dim) -> None:
    """Four neighbouring outputs a thread at a time, and `_AT_ONCE` pieces."""
    width = 4
    values = arith.muli(live_rows, i32(head_dim))
    trips = ceil_div(values, width * _THREADS)

    @utils.fori(trips, [])
    def _(trip, _):
        value = arith.muli(arith.addi(arith.muli(trip, i32(_THREADS)), thread_index()), i32(width))
        with utils.when(less(value, values)):
            row = arith.divui(value, i32(head_dim))
            column = arith.subi(value, arith.muli(row, i32(head_dim)))
            start = [f32(-1e30), f32(0.0), splat(f32(0.0), width)]

            @utils.fori(ceil_div(pieces, _AT_ONCE), start)
            def joined(batch, carry):
                top, total, acc = carry
                lses, outs = [], []
                for i in range(_AT_ONCE):
                    nth = arith.addi(arith.muli(batch, i32(_AT_ONCE)), i32(i))
                    live = less(nth, pieces)
                    nth = arith.select(live, nth, i32(0))
                    slot = arith.muli(arith.addi(first_worker, nth), i32(2))
                    slot = arith.select(equal(nth, i32(0)), arith.addi(slot, i32(1)), slot)
                    lses.append(arith.select(live, load_global(part_lse, [slot, row]), f32(-math.inf)))
                    outs.append(load_global(part, [slot, row, column], width))
                new_top = top
                for x in lses:
                    new_top = arith.maximumf(new_top, x)
                decay = exp2_of(arith.subf(top, new_top))
                total, acc = arith.mulf(total, decay), arith.mulf(acc, splat(decay, width))
                for x, piece in zip(lses, outs, strict=True):
                    weight = exp2_of(arith.subf(x, new_top))
                    total = arith.addf(total, weight)
                    acc = arith.addf(acc, arith.mulf(piece, splat(weight, width)))
                return [new_top, total, acc]

            top, total, acc = joined.results
            where = query_of(row, token, head, group)
            if sinks is not None:
                sink = arith.mulf(load_global(sinks, where[1:]), f32(math.log2(math.e)))
                new_top = arith.maximumf(top, sink)
                decay = exp2_of(arith.subf(top, new_top))
                total = arith.addf(arith.mulf(total, decay), exp2_of(arith.subf(sink, new_top)))
                acc, top = arith.mulf(acc, splat(decay, width)), new_top
            acc = arith.divf(acc, splat(total, width))
            store_global(rounded(acc, out, width), out, [*where, column], width)
            if lse is not None:
                with utils.when(equal(column, i32(0))):
                    store_global(arith.mulf(arith.addf(top, log2_of(total)), f32(math.log(2))), lse, where)
        return []


def zero_padding(out_ref, lse_ref, live_tokens, block, *, num_blocks: int) -> None:
    """Zeroes the outputs of tokens after the last row's; a block of threads takes every `num_blocks`-th."""
    with_lse = lse_ref is not None

    @plgpu.inline_mgpu(arg_types=(_REF, *[_REF] * with_lse, _SCALAR, _SCALAR))
    def zero(_, *args):
        args = list(args)
        out, lse = args.pop(0), args.pop(0) if with_lse else None
        live_tokens, block = map(scalar_of, args)
        num_tokens, heads, head_dim = ir.MemRefType(out.type).shape
        first = arith.addi(live_tokens, block)
        count = ceil_div(arith.subi(i32(num_tokens), first), num_blocks)
        width = 4
        zeros = splat(utils.c(0.0, ir.MemRefType(out.type).element_type), width)

        @utils.fori(count, [])
        def _(nth, _):
            token = arith.addi(first, arith.muli(nth, i32(num_blocks)))

            @utils.fori(i32(-(-heads * head_dim // (width * _THREADS))), [])
            def _(trip, _):
                value = arith.muli(arith.addi(arith.muli(trip, i32(_THREADS)), thread_index()), i32(width))
                with utils.when(less(value, i32(heads * head_dim))):
                    head = arith.divui(value, i32(head_dim))
                    column = arith.subi(value, arith.muli(head, i32(head_dim)))
                    store_global(zeros, out, [token, head, column], width)
                return []

            if lse is not None:

                @utils.fori(i32(-(-heads // _THREADS)), [])
                def _(trip, _):
                    head = arith.addi(arith.muli(trip, i32(_THREADS)), thread_index())
                    with utils.when(less(head, i32(heads))):
                        store_global(f32(-math.inf), lse, [token, head])
                    return []

            return []

    zero(out_ref, *[lse_ref] * with_lse, live_tokens, block)
