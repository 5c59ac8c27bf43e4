"""The Mosaic GPU kernel's own units of rows that share a prefix: joined in registers with what the shared units left.

    O^T [D, N], lse [N] of the row's own tokens, in registers        those of the prefix, f32 in global memory
                            \\_______________ joined, stored _______________/

A prefix is mostly done when a row's own unit begins, or ends: every worker has as much of it, and does that first. Then
nothing is counted, and no result is written that is read again. The results of the prefix are asked for when the unit
begins, and are there when it ends: in the middle of a step, when the memory is busy, a load takes microseconds. If the
prefix is not done, the worker looks again for a while, but not for ever: no progress depends on it. Who finds it undone
even then leaves a piece like any other. The arithmetic is that of `combine_gpu.join_places`, step by step, so a result
has the same bits either way.
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false, reportOptionalOperand=false

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from . import combine_gpu as ends
from .consumer_gpu import WGMMA, Call, Kind, Piece, Refs, Tiles, unfinished
from .narrow_gpu import as_rows, column_sum
from .tuning import TILE_ROWS

_SCALAR = plgpu.Layout.WG_SPLAT(())
_REF = plgpu.RefType()
_THREADS = 128
_LOADS = 80  # values that a thread loads together
FIRST_LOOKS, LAST_LOOKS = 4, 32  # at a prefix that is not done: when a unit begins, and when it ends; some 0.7 us each

_LOOK = """{
.reg .pred done, again;
.reg .u32 value, looks, found;
mov.u32 found, 0;
mov.u32 looks, $3;
setp.eq.u32 again, looks, 0;
@again bra FOUND;
LOOK:
ld.acquire.gpu.global.u32 value, [$1];
setp.eq.u32 done, value, $2;
selp.u32 found, 1, 0, done;
@done bra FOUND;
sub.u32 looks, looks, 1;
setp.ne.u32 again, looks, 0;
@again bra LOOK;
FOUND:
mov.u32 $0, found;
}"""


def joining_kind(kind: Kind, call: Call, refs: Refs, tiles: Tiles) -> Kind:
    """A narrow kind whose `finish` joins whole units of rows that share a prefix, and says whether it has."""
    red = tiles.own[-1].at[lax.axis_index("wg")]

    def look(piece: Piece, looks: int):
        done = functools.partial(prefix_is_done, refs, tiles, piece, looks)
        return lax.cond(piece.shared_pieces > 0, done, lambda: jnp.int32(0))

    def load(piece: Piece):
        return load_first_pieces(call, refs, piece)

    def nothing():
        return plgpu.layout_cast(jnp.zeros((_THREADS * pieces_at_once(call)[1],), jnp.float32), _loaded_layout(call))

    def look_ahead(piece: Piece):
        done = look(piece, FIRST_LOOKS)
        return done, lax.cond(done > 0, lambda: load(piece), nothing)

    def finish(piece: Piece, acc, top, total, done_before, loaded):
        done = lax.cond(done_before > 0, lambda: done_before, lambda: look(piece, LAST_LOOKS))

        @pl.when(done > 0)
        def _():
            of_prefix = lax.cond(done_before > 0, lambda: loaded, lambda: load(piece))
            factor, lse = unfinished(top, column_sum(total, red, call.rows))
            join_own(call, refs, piece, acc * as_rows(factor, call.head_dim, call.rows), lse, of_prefix)

        @pl.when(done == 0)
        def _():
            kind.finish(piece, acc, top, total)

        return done

    return dataclasses.replace(kind, finish=finish, look_ahead=look_ahead)


def prefix_is_done(refs: Refs, tiles: Tiles, piece: Piece, looks: int) -> jax.Array:
    """1 if `piece` is a whole unit, and all that is joined with it is there; its counter is then 0 again. Else 0."""

    @plgpu.inline_mgpu(
        arg_types=(_REF, _REF, *[_SCALAR] * 3), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)
    )
    def find(_, counters, flag, counter, pieces, shared_pieces):
        i, zero = ends.i32, utils.c(0, ir.IndexType.get())
        counter, pieces, shared_pieces = map(ends.scalar_of, (counter, pieces, shared_pieces))
        whole = ends.equal(arith.subi(pieces, shared_pieces), i(1))
        utils.warpgroup_barrier()  # nobody reads what the flag said before
        # One thread looks, and the barrier hands on what it has seen. Nobody but this worker counts any more once the
        # pieces of the prefix are there. Through shared memory, as `shared_prefix_gpu.any_member` says.
        with utils.when(ends.equal(ends.thread_index(), i(0))):
            found = utils.inline_ptx(
                _LOOK,
                ends.address(counters, [counter])[0],
                shared_pieces,
                arith.select(whole, i(looks), i(0)),
                result_types=ir.IntegerType.get_signless(32),
                has_side_effects=True,
            )
            memref.store(found, flag, [zero])
            with utils.when(ends.less(i(0), found)):
                ends.store_global(i(0), counters, [counter])
        utils.warpgroup_barrier()
        return mgpu.FragmentedArray.splat(memref.load(flag, [zero]), (), is_signed=True)

    flag = tiles.flags.at[lax.axis_index("wg")]
    return find(refs.counters, flag, piece.counter, piece.pieces, piece.shared_pieces)


def pieces_at_once(call: Call) -> tuple[int, int]:
    """Pieces that a thread loads together, and how many values of them: by query a log-sum-exp and some outputs."""
    values = call.rows // 4 * (1 + call.head_dim // 32)
    at_once = max(1, _LOADS // values)
    return at_once, at_once * values


def _loaded_layout(call: Call):
    return plgpu.Layout.WG_STRIDED((_THREADS * pieces_at_once(call)[1],), vec_size=1)


@dataclasses.dataclass(frozen=True)
class _Prefix:
    """What a thread reads of the results of a prefix.

    Attributes:
      pieces: of the prefix.
      rows: of the first one's results, by the thread's queries; some other row for queries that are not there.
      columns: of the outputs.
      at_once: pieces of a batch.
    """

    part: ir.Value
    part_lse: ir.Value
    pieces: ir.Value
    rows: list[ir.Value]
    columns: list[ir.Value]
    at_once: int

    def log_sum_exps(self, batch: ir.Value) -> tuple[list[list[ir.Value]], list[list[ir.Value]]]:
        """By piece and query: rows of the partial results, and their log-sum-exps; -inf past the last piece."""
        i, rows, found = ends.i32, [], []
        for k in range(self.at_once):
            nth = arith.addi(arith.muli(batch, i(self.at_once)), i(k))
            live = ends.less(nth, self.pieces)
            places = arith.maxsi(arith.subi(arith.muli(nth, i(2)), i(1)), i(0))
            offset = arith.select(live, arith.muli(places, i(TILE_ROWS)), i(0))
            rows.append([arith.addi(row, offset) for row in self.rows])
            loaded = [ends.load_global(self.part_lse, [row]) for row in rows[-1]]
            found.append([arith.select(live, x, ends.f32(-math.inf)) for x in loaded])
        return rows, found

    def outputs(self, rows: list[list[ir.Value]]) -> list[list[list[ir.Value]]]:
        """By piece, query and column."""
        return [
            [[ends.load_global(self.part, [row, x]) for x in self.columns] for row in of_piece] for of_piece in rows
        ]


def _prefix(call: Call, part, part_lse, live_rows, pieces, first_row) -> _Prefix:
    rows, _ = ends.own_rows()
    columns = [arith.addi(row, ends.i32(64 * tile)) for tile in range(call.head_dim // 64) for row in rows]
    first = [arith.addi(first_row, arith.select(ends.less(q, live_rows), q, ends.i32(0))) for q in _queries(call)]
    return _Prefix(part, part_lse, pieces, first, columns, pieces_at_once(call)[0])


def _queries(call: Call) -> list[ir.Value]:
    """A thread's queries of a tile."""
    _, first = ends.own_rows()
    return [arith.addi(first, ends.i32(8 * n + which)) for n in range(call.rows // 8) for which in range(2)]


def load_first_pieces(call: Call, refs: Refs, piece: Piece):
    """The first pieces of the prefix, in registers: by piece and query, the log-sum-exp and the thread's columns."""
    layout, (_, values) = _loaded_layout(call), pieces_at_once(call)

    @plgpu.inline_mgpu(
        arg_types=(_REF, _REF, *[_SCALAR] * 3),
        return_type=plgpu.ShapeDtypeStruct((_THREADS * values,), jnp.float32, layout=layout),
    )
    def load(_, part, part_lse, *scalars):
        prefix = _prefix(call, part, part_lse, *map(ends.scalar_of, scalars))
        rows, lses = prefix.log_sum_exps(ends.i32(0))
        found = [
            x
            for of_piece in zip(lses, prefix.outputs(rows), strict=True)
            for lse, out in zip(*of_piece, strict=True)
            for x in (lse, *out)
        ]
        registers = np.empty((values,), dtype=object)
        for n, x in enumerate(found):
            registers[n] = ends.splat(x, 1)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return load(refs.part, refs.part_lse, piece.num_tokens * call.group, piece.shared_pieces, piece.shared_result)


def join_own(call: Call, refs: Refs, piece: Piece, out, lse, loaded) -> None:
    """Joins a row's results with those of its prefix, and stores them.

    Args:
      out: O^T [D, N], as if there were no prefix.
      lse: base-2 log-sum-exps, [64, N] with equal rows.
      loaded: of `load_first_pieces`.
    """
    arrays = refs.part, refs.part_lse, refs.out, refs.lse, refs.sinks
    has = [ref is not None for ref in arrays]
    scalars = piece.token, piece.head, piece.num_tokens * call.group, piece.shared_pieces, piece.shared_result
    tiles, n = call.head_dim // 64, call.rows

    @plgpu.inline_mgpu(arg_types=(*[_REF] * sum(has), *[_SCALAR] * len(scalars), WGMMA, WGMMA, _loaded_layout(call)))
    def join(_, *args):
        args, i = list(args), ends.i32
        part, part_lse, out_ref, lse_ref, sinks = (args.pop(0) if here else None for here in has)
        out, lse, loaded = args[len(scalars) :]
        token, head, live_rows, pieces, first_row = map(ends.scalar_of, args[: len(scalars)])
        results = ends.Results(part, part_lse, out_ref, lse_ref, sinks)
        prefix, queries = _prefix(call, part, part_lse, live_rows, pieces, first_row), _queries(call)
        batches, width = ends.ceil_div(pieces, prefix.at_once), 2 + len(prefix.columns)

        own_lses = [_element(pair, which) for pair in lse.registers.reshape(-1, 2)[: n // 8, 0] for which in range(2)]
        outs = out.registers.reshape(tiles, n // 8, 2)
        own_outs = [[_element(x, which) for x in outs[:, k].flat] for k in range(n // 8) for which in range(2)]

        # If the pieces are more than one batch, the largest log-sum-exp is found first, and no sum is scaled anew.
        @utils.fori(arith.select(ends.less(i(prefix.at_once), pieces), batches, i(0)), own_lses)
        def largest(batch, tops):
            _, found = prefix.log_sum_exps(batch)
            return [functools.reduce(arith.maximumf, [x[q] for x in found], top) for q, top in enumerate(tops)]

        start = []
        for own_lse, top, acc in zip(own_lses, largest.results, own_outs, strict=True):
            weight = ends.exp2_of(arith.subf(own_lse, top))
            start += [top, weight, *[arith.mulf(x, weight) for x in acc]]

        def add(lses, outputs, carry):
            after = []
            for q in range(len(queries)):
                top, total, *acc = carry[q * width : (q + 1) * width]
                new_top = functools.reduce(arith.maximumf, [x[q] for x in lses], top)
                decay = ends.exp2_of(arith.subf(top, new_top))
                total, acc = arith.mulf(total, decay), [arith.mulf(x, decay) for x in acc]
                for of_piece, x in zip(lses, outputs, strict=True):
                    weight = ends.exp2_of(arith.subf(of_piece[q], new_top))
                    total = arith.addf(total, weight)
                    acc = [llvm.intr_fma(x, weight, y) for x, y in zip(x[q], acc, strict=True)]
                after += [new_top, total, *acc]
            return after

        first = np.array([_element(x, 0) for x in loaded.registers.flat], dtype=object)
        first = first.reshape(prefix.at_once, len(queries), width - 1)

        @utils.fori(arith.subi(batches, i(1)), add(first[:, :, 0].tolist(), first[:, :, 1:].tolist(), start))
        def joined(batch, carry):
            rows, lses = prefix.log_sum_exps(arith.addi(batch, i(1)))
            return add(lses, prefix.outputs(rows), carry)

        for q, query in enumerate(queries):
            with utils.when(ends.less(query, live_rows)):
                where = ends.query_of(query, token, head, call.group)
                _store(results, where, prefix.columns, joined.results[q * width : (q + 1) * width])

    join(*[ref for ref in arrays if ref is not None], *scalars, out, lse, loaded)


def _element(x: ir.Value, which: int) -> ir.Value:
    return vector.extract(x, dynamic_position=[], static_position=[which])


def _store(results: ends.Results, where: list[ir.Value], columns: list[ir.Value], joined: list[ir.Value]) -> None:
    """Stores a query's outputs of the thread's columns; `joined` begins with top and total, then a value a column."""
    top, total, *acc = joined
    if results.sinks is not None:
        sink = arith.mulf(ends.load_global(results.sinks, where[1:]), ends.f32(math.log2(math.e)))
        new_top = arith.maximumf(top, sink)
        decay = ends.exp2_of(arith.subf(top, new_top))
        total = llvm.intr_fma(total, decay, ends.exp2_of(arith.subf(sink, new_top)))
        acc, top = [arith.mulf(x, decay) for x in acc], new_top
    element = ir.MemRefType(results.out.type).element_type
    for column, x in zip(columns, acc, strict=True):
        x = arith.divf(x, total)
        ends.store_global(x if element == x.type else arith.truncf(element, x), results.out, [*where, column])
    if results.lse is not None:
        with utils.when(ends.less(ends.thread_index(), ends.i32(4))):
            lse = arith.mulf(arith.addf(top, ends.log2_of(total)), ends.f32(math.log(2)))
            ends.store_global(lse, results.lse, where)
