"""The ends of the Mosaic GPU kernel, thread by thread: loading queries, storing rows, joining the pieces of a unit.

Pallas copies whole tiles, but a unit has as few rows as a KV head has query heads, and their number is data. So these
parts are written on registers: a row's owner loads and stores it, and nobody else does.
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, scf, vector

from .tuning import TILE_ROWS

_ROWS = plgpu.Layout.WGMMA.reduce(1)
_SCALAR = plgpu.Layout.WG_SPLAT(())
_REF = plgpu.RefType()
_THREADS = 128
_AT_ONCE, _FEW = 16, 4  # pieces whose loads are in flight together; of units that have no more than a few
WIDTH = 4  # neighbouring outputs that a thread joins


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


def either(
    condition: ir.Value, then: Callable[[], list], otherwise: Callable[[], list], types: list[ir.Type]
) -> list[ir.Value]:
    """The values of one of two functions, each of which is emitted in a branch of its own."""
    choice = scf.IfOp(condition, types, has_else=True)
    for block, values in ((choice.then_block, then), (choice.else_block, otherwise)):
        with ir.InsertionPoint(block):
            scf.yield_(values())
    return list(choice.results)


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


def store_partial(part_ref, part_lse_ref, first_row, live_rows, out, lse) -> None:
    """Stores the rows of a piece: outputs as if there were no others, and base-2 log-sum-exps."""

    @plgpu.inline_mgpu(arg_types=(_REF, _REF, _SCALAR, _SCALAR, plgpu.Layout.WGMMA, _ROWS))
    def store(_, ref, lse_ref, first_row, live_rows, out, lse):
        first_row = scalar_of(first_row)
        _store_own_rows(
            out,
            lse,
            scalar_of(live_rows),
            lambda x, row, column: store_global(x, ref, [arith.addi(first_row, row), column], 2),
            lambda x, row: store_global(x, lse_ref, [arith.addi(first_row, row)]),
        )

    store(part_ref, part_lse_ref, first_row, live_rows, out, lse)


@dataclass(frozen=True)
class Sources:
    """Where the results of a unit's pieces are; scalars. The last `shared_pieces` are those of a shared unit, if any.

    The first of each kind is named; the k-th of the others is 2k - 1 places behind it, of `tile_rows` rows each for
    own pieces and of `TILE_ROWS` for shared ones.
    """

    pieces: ir.Value
    first_result: ir.Value
    shared_pieces: ir.Value | None
    shared_result: ir.Value | None
    tile_rows: int

    def first_row(self, nth: ir.Value) -> ir.Value:
        """Row of the partial results where the nth piece begins."""
        if self.shared_pieces is None or self.shared_result is None:
            return self._row(self.first_result, nth, i32(self.tile_rows))
        own = arith.subi(self.pieces, self.shared_pieces)
        is_own = less(nth, own)
        first = arith.select(is_own, self.first_result, self.shared_result)
        nth = arith.select(is_own, nth, arith.subi(nth, own))
        return self._row(first, nth, arith.select(is_own, i32(self.tile_rows), i32(TILE_ROWS)))

    @staticmethod
    def _row(first: ir.Value, nth: ir.Value, rows: ir.Value) -> ir.Value:
        places = arith.maxsi(arith.subi(arith.muli(nth, i32(2)), i32(1)), i32(0))
        return arith.addi(first, arith.muli(places, rows))


@dataclass(frozen=True)
class Place:
    """Four neighbouring outputs that a thread joins: `row` of the pieces and of the unit's queries."""

    sources: Sources
    row: ir.Value
    column: ir.Value
    token: ir.Value
    query_head: ir.Value
    live: ir.Value


@dataclass(frozen=True)
class Results:
    """Arrays in global memory: of partial results and of finished ones; `lse` and `sinks` may be `None`."""

    part: ir.Value
    part_lse: ir.Value
    out: ir.Value
    lse: ir.Value | None
    sinks: ir.Value | None


def join_pieces(refs, scalars, *, group: int, head_dim: int, tile_rows: int, sharing: bool) -> None:
    """Counts this piece as finished; the last of a unit joins all of them and leaves the counter at 0.

    Args:
      refs: partial outputs and log-sum-exps, counters, ints of shared memory, outputs, log-sum-exps or `None`, sinks or
        `None`.
      scalars: token, head, live rows, pieces, counter, first result; with `sharing` also shared pieces and the first
        result of them.
    """
    has = [ref is not None for ref in refs]

    @plgpu.inline_mgpu(arg_types=(*[_REF] * sum(has), *[_SCALAR] * len(scalars)))
    def join(_, *args):
        args = list(args)
        part, part_lse, counters, flag, out, lse, sinks = (args.pop(0) if here else None for here in has)
        token, head, live_rows, pieces, counter, first_result, *shared = map(scalar_of, args)
        leader = equal(thread_index(), i32(0))
        zero = utils.c(0, ir.IndexType.get())
        # The barrier puts all threads' stores before the leader's fence, which makes them visible before the count is.
        utils.warpgroup_barrier()
        with utils.when(leader):
            memref.store(count_one(counters, counter, acquire=True), flag, [zero])
        utils.warpgroup_barrier()  # what the leader has acquired, all have
        before = memref.load(flag, [zero])
        with utils.when(equal(before, arith.subi(pieces, i32(1)))):
            with utils.when(leader):
                store_global(i32(0), counters, [counter])
            sources = Sources(pieces, first_result, *(shared or (None, None)), tile_rows=tile_rows)
            results = Results(part, part_lse, out, lse, sinks)
            if not sharing:
                _join_unit(results, sources, token, head, live_rows, group, head_dim, _AT_ONCE)
                return
            for those, at_once in ((less(pieces, i32(_FEW + 1)), _FEW), (less(i32(_FEW), pieces), _AT_ONCE)):
                with utils.when(those):
                    _join_unit(results, sources, token, head, live_rows, group, head_dim, at_once)

    join(*[ref for ref in refs if ref is not None], *scalars)


def fence() -> None:
    utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)


def count_one(counters: ir.Value, counter: ir.Value, *, acquire: bool = False) -> ir.Value:
    """Adds 1 to a counter, after all that came before is visible; returns what it was.

    With `acquire`, what others did before they counted is visible after it.
    """
    pointer, _ = address(counters, [counter])
    if not acquire:
        fence()
    return utils.inline_ptx(
        f"atom.global.add.{'acq_rel' if acquire else 'relaxed'}.gpu.u32 $0, [$1], 1;",
        pointer,
        result_types=ir.IntegerType.get_signless(32),
        has_side_effects=True,
    )


def _join_unit(results, sources, token, head, live_rows, group, head_dim, at_once) -> None:
    """Joins a unit, four neighbouring outputs a thread at a time."""
    values = arith.muli(live_rows, i32(head_dim))

    @utils.fori(ceil_div(values, WIDTH * _THREADS), [])
    def _(trip, _):
        value = arith.muli(arith.addi(arith.muli(trip, i32(_THREADS)), thread_index()), i32(WIDTH))
        live = less(value, values)
        with utils.when(live):
            row = arith.divui(value, i32(head_dim))
            column = arith.subi(value, arith.muli(row, i32(head_dim)))
            join_places(results, [Place(sources, row, column, *query_of(row, token, head, group), live)], at_once)
        return []


def join_places(results: Results, places: list[Place], at_once: int) -> None:
    """Joins and stores outputs of some places, with the loads of `at_once` pieces of each in flight together.

    In a fixed order, so that results repeat bit by bit. Those of rows that share a prefix are also the same for all
    `at_once`: if there are more pieces than that, their largest log-sum-exp is found first, and no sum is scaled anew.
    What is not live is not stored, and has no pieces.
    """
    most = functools.reduce(arith.maxsi, [place.sources.pieces for place in places])
    batches = ceil_div(most, at_once)

    def load_batch(batch: ir.Value, place: Place) -> tuple[list[ir.Value], list[ir.Value]]:
        """Rows of the partial results, and their log-sum-exps; -inf past the last piece."""
        rows, lses = [], []
        for i in range(at_once):
            nth = arith.addi(arith.muli(batch, i32(at_once)), i32(i))
            live = less(nth, place.sources.pieces)
            rows.append(arith.addi(place.sources.first_row(arith.select(live, nth, i32(0))), place.row))
            lses.append(arith.select(live, load_global(results.part_lse, [rows[-1]]), f32(-math.inf)))
        return rows, lses

    tops = [f32(-1e30) for _ in places]
    if places[0].sources.shared_pieces is not None:

        @utils.fori(arith.select(less(i32(at_once), most), batches, i32(0)), tops)
        def largest(batch, tops):
            lses = [load_batch(batch, place)[1] for place in places]
            return [functools.reduce(arith.maximumf, x, top) for top, x in zip(tops, lses, strict=True)]

        tops = largest.results

    start = [x for top in tops for x in (top, f32(0.0), splat(f32(0.0), WIDTH))]

    @utils.fori(batches, start)
    def joined(batch, carry):
        loaded = []
        for place in places:
            rows, lses = load_batch(batch, place)
            loaded.append((lses, [load_global(results.part, [row, place.column], WIDTH) for row in rows]))
        after = []
        for n, (lses, outs) in enumerate(loaded):
            top, total, acc = carry[3 * n : 3 * n + 3]
            new_top = functools.reduce(arith.maximumf, lses, top)
            decay = exp2_of(arith.subf(top, new_top))
            total, acc = arith.mulf(total, decay), arith.mulf(acc, splat(decay, WIDTH))
            for x, piece in zip(lses, outs, strict=True):
                weight = exp2_of(arith.subf(x, new_top))
                total = arith.addf(total, weight)
                acc = llvm.intr_fma(piece, splat(weight, WIDTH), acc)  # the same bits in each copy of this code
            after += [new_top, total, acc]
        return after

    for n, place in enumerate(places):
        with utils.when(place.live):
            _store_joined(results, place, *joined.results[3 * n : 3 * n + 3])


def _store_joined(results: Results, place: Place, top: ir.Value, total: ir.Value, acc: ir.Value) -> None:
    where = [place.token, place.query_head]
    if results.sinks is not None:
        sink = arith.mulf(load_global(results.sinks, where[1:]), f32(math.log2(math.e)))
        new_top = arith.maximumf(top, sink)
        decay = exp2_of(arith.subf(top, new_top))
        total = llvm.intr_fma(total, decay, exp2_of(arith.subf(sink, new_top)))
        acc, top = arith.mulf(acc, splat(decay, WIDTH)), new_top
    acc = arith.divf(acc, splat(total, WIDTH))
    store_global(rounded(acc, results.out, WIDTH), results.out, [*where, place.column], WIDTH)
    if results.lse is not None:
        with utils.when(equal(place.column, i32(0))):
            store_global(arith.mulf(arith.addf(top, log2_of(total)), f32(math.log(2))), results.lse, where)


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
