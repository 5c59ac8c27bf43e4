"""The ends of the Mosaic GPU kernel, thread by thread: loading queries, storing rows, joining the pieces of a unit.

Pallas copies whole tiles, but a unit has as few rows as a KV head has query heads, and their number is data. So these
parts are written on registers: a row's owner loads and stores it, and nobody else does.
"""

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


def _i32(x: int) -> ir.Value:
    return utils.c(x, ir.IntegerType.get_signless(32))


def _f32(x: float) -> ir.Value:
    return utils.c(x, ir.F32Type.get())


def _thread() -> ir.Value:
    """The thread's number in its warpgroup."""
    i32 = ir.IntegerType.get_signless(32)
    return arith.remui(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)), _i32(_THREADS))


def _scalar(x: mgpu.FragmentedArray) -> ir.Value:
    return x.registers.flat[0]


def _ceil_div(x: ir.Value, y: int) -> ir.Value:
    """Rounds up; at most 0 for an x that is at most 0."""
    return arith.divsi(arith.addi(x, _i32(y - 1)), _i32(y))


def _less(x: ir.Value, y: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.slt, x, y)


def _equal(x: ir.Value, y: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, x, y)


def _address(ref: ir.Value, indices: list[ir.Value]) -> tuple[ir.Value, ir.Type]:
    """Global address of an element of a row-major array."""
    ty = ir.MemRefType(ref.type)
    strides, _ = ty.get_strides_and_offset()
    offset = utils.dyn_dot(indices, [_i32(s) for s in strides])
    pointer = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(ref))
    return utils.getelementptr(pointer, [offset], ty.element_type), ty.element_type


def _load(ref: ir.Value, indices: list[ir.Value], width: int = 1) -> ir.Value:
    """Loads `width` elements at once; the address must be aligned to them."""
    pointer, element = _address(ref, indices)
    ty = element if width == 1 else ir.VectorType.get((width,), element)
    return llvm.load(ty, pointer, alignment=width * utils.bytewidth(element))


def _store(value: ir.Value, ref: ir.Value, indices: list[ir.Value], width: int = 1) -> None:
    pointer, element = _address(ref, indices)
    llvm.store(value, pointer, alignment=width * utils.bytewidth(element))


def _exp2(x: ir.Value) -> ir.Value:
    return utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", x, result_types=ir.F32Type.get())


def _log2(x: ir.Value) -> ir.Value:
    return utils.inline_ptx("lg2.approx.ftz.f32 $0, $1;", x, result_types=ir.F32Type.get())


def _splat(x: ir.Value, width: int) -> ir.Value:
    return vector.broadcast(ir.VectorType.get((width,), x.type), x)


def _query(row: ir.Value, token: ir.Value, head: ir.Value, group: int) -> list[ir.Value]:
    """Token and query head of a tile's row."""
    nth = arith.divui(row, _i32(group))
    in_group = arith.subi(row, arith.muli(nth, _i32(group)))
    return [arith.addi(token, nth), arith.addi(arith.muli(head, _i32(group)), in_group)]


def _own_rows() -> tuple[list[ir.Value], ir.Value]:
    """The two rows of a 64-row product that a thread holds a part of, and its first column in each 8."""
    lane, warp = arith.remui(_thread(), _i32(32)), arith.divui(_thread(), _i32(32))
    row = arith.addi(arith.muli(warp, _i32(16)), arith.divui(lane, _i32(4)))
    column = arith.muli(arith.remui(lane, _i32(4)), _i32(2))
    return [row, arith.addi(row, _i32(8))], column


def _halves(x: mgpu.FragmentedArray) -> np.ndarray:
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
        rows, column = _own_rows()
        registers = np.empty((head_dim // 8, 2), dtype=object)
        for half, row in enumerate(rows):
            row = arith.select(_less(row, _scalar(live_rows)), row, _i32(0))
            where = _query(row, _scalar(token), _scalar(head), group)
            for n in range(head_dim // 8):
                registers[n, half] = _load(ref, [*where, arith.addi(column, _i32(8 * n))], 2)
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
        for half, row in enumerate(_own_rows()[0]):
            _, query_head = _query(row, _i32(0), _scalar(head), group)
            registers[half] = _splat(_load(ref, [query_head]), 1)
        shape = _ROWS.to_mgpu().registers_shape((TILE_ROWS,))
        return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=_ROWS.to_mgpu(), _is_signed=None)

    return load(sinks_ref, head)


def _store_own_rows(out, lse, live_rows, store_pair, store_lse) -> None:
    """Calls the two functions for all that the thread holds of live rows."""
    rows, column = _own_rows()
    first_lane = _equal(column, _i32(0))
    for half, row in enumerate(rows):
        with utils.when(_less(row, live_rows)):
            for n, pair in enumerate(_halves(out)[:, half]):
                store_pair(pair, row, arith.addi(column, _i32(8 * n)))
            if lse is not None:
                with utils.when(first_lane):
                    value = vector.extract(lse.registers.flat[half], dynamic_position=[], static_position=[0])
                    store_lse(value, row)


def _round(x: ir.Value, ref: ir.Value, width: int) -> ir.Value:
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
        token, head, live_rows = (_scalar(args.pop(0)) for _ in range(3))
        out, lse = args[0], args[1] if with_lse else None
        _store_own_rows(
            out,
            lse,
            live_rows,
            lambda x, row, column: _store(_round(x, ref, 2), ref, [*_query(row, token, head, group), column], 2),
            lambda x, row: _store(x, lse_ref, _query(row, token, head, group)),
        )

    store(out_ref, *[lse_ref] * with_lse, token, head, live_rows, out, *[lse] * with_lse)


def store_partial(part_ref, part_lse_ref, slot, live_rows, out, lse) -> None:
    """Stores the rows of a piece: outputs as if there were no others, and base-2 log-sum-exps."""

    @plgpu.inline_mgpu(arg_types=(_REF, _REF, _SCALAR, _SCALAR, plgpu.Layout.WGMMA, _ROWS))
    def store(_, ref, lse_ref, slot, live_rows, out, lse):
        slot = _scalar(slot)
        _store_own_rows(
            out,
            lse,
            _scalar(live_rows),
            lambda x, row, column: _store(x, ref, [slot, row, column], 2),
            lambda x, row: _store(x, lse_ref, [slot, row]),
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
        token, head, live_rows, pieces, first_worker = map(_scalar, args)
        i32 = ir.IntegerType.get_signless(32)
        thread = _thread()
        leader = _equal(thread, _i32(0))
        zero = utils.c(0, ir.IndexType.get())
        # The barrier puts all threads' stores before the leader's fence, which makes them visible before the count is.
        utils.warpgroup_barrier()
        with utils.when(leader):
            counter, _ = _address(counters, [first_worker])
            utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
            before = utils.inline_ptx(
                "atom.global.add.relaxed.gpu.u32 $0, [$1], 1;", counter, result_types=i32, has_side_effects=True
            )
            memref.store(before, flag, [zero])
        utils.warpgroup_barrier()
        before = memref.load(flag, [zero])
        with utils.when(_equal(before, arith.subi(pieces, _i32(1)))):
            utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
            with utils.when(leader):
                _store(_i32(0), counters, [first_worker])
            _join(part, part_lse, out, lse, sinks, token, head, live_rows, pieces, first_worker, group, head_dim)

    join(*[ref for ref in refs if ref is not None], *scalars)


def _join(part, part_lse, out, lse, sinks, token, head, live_rows, pieces, first_worker, group, head_dim) -> None:
    """Four neighbouring outputs a thread at a time, and `_AT_ONCE` pieces."""
    width = 4
    values = arith.muli(live_rows, _i32(head_dim))
    trips = _ceil_div(values, width * _THREADS)

    @utils.fori(trips, [])
    def _(trip, _):
        value = arith.muli(arith.addi(arith.muli(trip, _i32(_THREADS)), _thread()), _i32(width))
        with utils.when(_less(value, values)):
            row = arith.divui(value, _i32(head_dim))
            column = arith.subi(value, arith.muli(row, _i32(head_dim)))
            start = [_f32(-1e30), _f32(0.0), _splat(_f32(0.0), width)]

            @utils.fori(_ceil_div(pieces, _AT_ONCE), start)
            def joined(batch, carry):
                top, total, acc = carry
                lses, outs = [], []
                for i in range(_AT_ONCE):
                    nth = arith.addi(arith.muli(batch, _i32(_AT_ONCE)), _i32(i))
                    live = _less(nth, pieces)
                    nth = arith.select(live, nth, _i32(0))
                    slot = arith.muli(arith.addi(first_worker, nth), _i32(2))
                    slot = arith.select(_equal(nth, _i32(0)), arith.addi(slot, _i32(1)), slot)
                    lses.append(arith.select(live, _load(part_lse, [slot, row]), _f32(-math.inf)))
                    outs.append(_load(part, [slot, row, column], width))
                new_top = top
                for x in lses:
                    new_top = arith.maximumf(new_top, x)
                decay = _exp2(arith.subf(top, new_top))
                total, acc = arith.mulf(total, decay), arith.mulf(acc, _splat(decay, width))
                for x, piece in zip(lses, outs, strict=True):
                    weight = _exp2(arith.subf(x, new_top))
                    total = arith.addf(total, weight)
                    acc = arith.addf(acc, arith.mulf(piece, _splat(weight, width)))
                return [new_top, total, acc]

            top, total, acc = joined.results
            where = _query(row, token, head, group)
            if sinks is not None:
                sink = arith.mulf(_load(sinks, where[1:]), _f32(math.log2(math.e)))
                new_top = arith.maximumf(top, sink)
                decay = _exp2(arith.subf(top, new_top))
                total = arith.addf(arith.mulf(total, decay), _exp2(arith.subf(sink, new_top)))
                acc, top = arith.mulf(acc, _splat(decay, width)), new_top
            acc = arith.divf(acc, _splat(total, width))
            _store(_round(acc, out, width), out, [*where, column], width)
            if lse is not None:
                with utils.when(_equal(column, _i32(0))):
                    _store(arith.mulf(arith.addf(top, _log2(total)), _f32(math.log(2))), lse, where)
        return []


def zero_padding(out_ref, lse_ref, live_tokens, block, *, num_blocks: int) -> None:
    """Zeroes the outputs of tokens after the last row's; a block of threads takes every `num_blocks`-th."""
    with_lse = lse_ref is not None

    @plgpu.inline_mgpu(arg_types=(_REF, *[_REF] * with_lse, _SCALAR, _SCALAR))
    def zero(_, *args):
        args = list(args)
        out, lse = args.pop(0), args.pop(0) if with_lse else None
        live_tokens, block = map(_scalar, args)
        num_tokens, heads, head_dim = ir.MemRefType(out.type).shape
        first = arith.addi(live_tokens, block)
        count = _ceil_div(arith.subi(_i32(num_tokens), first), num_blocks)
        width = 4
        zeros = _splat(utils.c(0.0, ir.MemRefType(out.type).element_type), width)

        @utils.fori(count, [])
        def _(nth, _):
            token = arith.addi(first, arith.muli(nth, _i32(num_blocks)))

            @utils.fori(_i32(-(-heads * head_dim // (width * _THREADS))), [])
            def _(trip, _):
                value = arith.muli(arith.addi(arith.muli(trip, _i32(_THREADS)), _thread()), _i32(width))
                with utils.when(_less(value, _i32(heads * head_dim))):
                    head = arith.divui(value, _i32(head_dim))
                    column = arith.subi(value, arith.muli(head, _i32(head_dim)))
                    _store(zeros, out, [token, head, column], width)
                return []

            if lse is not None:

                @utils.fori(_i32(-(-heads // _THREADS)), [])
                def _(trip, _):
                    head = arith.addi(arith.muli(trip, _i32(_THREADS)), _thread())
                    with utils.when(_less(head, _i32(heads))):
                        _store(_f32(-math.inf), lse, [token, head])
                    return []

            return []

    zero(out_ref, *[lse_ref] * with_lse, live_tokens, block)
