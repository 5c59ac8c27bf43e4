"""The Mosaic GPU kernel's shared units: a prefix of pages read once, for the queries of several rows.

    S [64 = members x group, keys] = Q K^T        as in `wide_gpu`, the queries gathered from the members' tokens

A member is a row with one query token. All of them see the whole prefix, so nothing is masked. A piece leaves its
results and counts itself with each member. Mostly the worker of a member's own unit finds all of them, and joins
(`prefix_join_gpu`). One whose own unit has ended before, or was cut, has pieces of it that are counted as well: who
finds it complete joins its results.
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false

import dataclasses
import functools

import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from . import combine_gpu as ends
from . import gpu_plan as plan
from .consumer_gpu import Call, Kind, Piece, Refs, Tiles, unfinished
from .narrow_gpu import put_queries, query_layout
from .tuning import TILE_ROWS
from .wide_gpu import wide_kind

_SCALAR = plgpu.Layout.WG_SPLAT(())
_REF = plgpu.RefType()
_THREADS = 128
_AT_ONCE = 4  # places that a thread joins together
NOTES = 2  # ints a member: where the record of its own unit is, and its counter
_UNIT, _COUNTER = range(NOTES)


def load_members_queries(q_ref, records_ref, first_member, head, live_rows, *, group: int, head_dim: int, dtype):
    """The queries of the members from record `first_member` on, [64 * D]: rows from `live_rows` on are some others."""
    layout = query_layout(TILE_ROWS, head_dim)

    @plgpu.inline_mgpu(
        arg_types=(_REF, _REF, _SCALAR, _SCALAR, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct((TILE_ROWS * head_dim,), dtype, layout=layout),
    )
    def load(_, ref, records, first_member, head, live_rows):
        width = layout.to_mgpu().vec_size
        registers = np.empty((TILE_ROWS * head_dim // (_THREADS * width),), dtype=object)
        for n in range(registers.size):
            value = arith.muli(arith.addi(ends.thread_index(), ends.i32(_THREADS * n)), ends.i32(width))
            row = arith.divui(value, ends.i32(head_dim))
            column = arith.subi(value, arith.muli(row, ends.i32(head_dim)))
            row = arith.select(ends.less(row, ends.scalar_of(live_rows)), row, ends.i32(0))
            member, query_head = ends.query_of(row, ends.scalar_of(first_member), ends.scalar_of(head), group)
            token = ends.load_global(records, [member, ends.i32(plan.TOKEN)])
            registers[n] = ends.load_global(ref, [token, query_head, column], width)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return load(q_ref, records_ref, first_member, head, live_rows)


def shared_kind(call: Call, refs: Refs, tiles: Tiles) -> Kind:
    """64 query rows of several members along M."""
    group, head_dim = call.group, call.head_dim

    def load_queries(piece: Piece):
        live_rows = piece.num_tokens * group
        queries = load_members_queries(
            refs.q, refs.records, piece.token, piece.head, live_rows, group=group, head_dim=head_dim, dtype=call.dtype
        )
        note_members(call, refs, tiles, piece)
        return queries

    def put_tile_queries(q):
        wide = tiles.own[0].at[lax.axis_index("wg")]
        put_queries(q, wide, n=TILE_ROWS, head_dim=head_dim, transforms=call.transforms)

    def finish(piece: Piece, acc, top, total):
        factor, lse = unfinished(top, total)
        out = acc * lax.broadcast_in_dim(factor, acc.shape, [0])
        ends.store_partial(refs.part, refs.part_lse, piece.slot, piece.num_tokens * group, out, lse)
        join_members(call, refs, tiles, piece)

    wide = wide_kind(call, refs, tiles)
    return dataclasses.replace(
        wide, load_queries=load_queries, put_queries=put_tile_queries, finish=finish, hide_unseen=None
    )


def _note(member: ir.Value, which: int) -> list[ir.Value]:
    """Indices of a member's note."""
    at = arith.addi(arith.muli(member, ends.i32(NOTES)), ends.i32(which))
    return [arith.index_cast(ir.IndexType.get(), at)]


def note_members(call: Call, refs: Refs, tiles: Tiles, piece: Piece) -> None:
    """Fetches what a member's count takes while the piece's keys and values come; a thread reads its own notes."""

    @plgpu.inline_mgpu(arg_types=(_REF, _REF, *[_SCALAR] * 3))
    def note(_, notes, records, first_member, head, members):
        i, thread = ends.i32, ends.thread_index()
        first_member, head, members = map(ends.scalar_of, (first_member, head, members))
        utils.warpgroup_barrier()  # nobody reads the notes of the piece before
        with utils.when(ends.less(thread, members)):
            member = arith.addi(first_member, thread)
            row, unit = (ends.load_global(records, [member, i(which)]) for which in (plan.ROW, plan.FOLLOWING))
            unit = arith.addi(unit, head)
            counter = arith.addi(arith.muli(row, i(call.num_kv_heads)), head)
            memref.store(unit, notes, _note(thread, _UNIT))
            memref.store(arith.addi(counter, i(call.blocks.num_workers)), notes, _note(thread, _COUNTER))

    note(tiles.flags.at[lax.axis_index("wg")], refs.records, piece.token, piece.head, piece.num_tokens)


def any_member(condition: ir.Value, notes: ir.Value, most: int) -> ir.Value:
    """Whether it holds for a thread of the first `most`: a barrier. Takes the notes of their counters for the votes.

    A branch on what a reducing barrier returns is divergent to the compiler, which then waits after each matrix
    instruction of the kernel; one on what all threads load from one place of shared memory is not.
    """
    i32, i, thread = ir.IntegerType.get_signless(32), ends.i32, ends.thread_index()
    vote = utils.inline_ptx(
        "{.reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.u32 $0, 1, 0, p;}",
        arith.extui(i32, condition),
        result_types=i32,
        has_side_effects=True,
    )
    with utils.when(arith.andi(ends.equal(arith.remui(thread, i(32)), i(0)), ends.less(thread, i(most)))):
        memref.store(vote, notes, _note(thread, _COUNTER))
    utils.warpgroup_barrier()
    votes = [memref.load(notes, _note(i(first), _COUNTER)) for first in range(0, most, 32)]
    return ends.less(i(0), functools.reduce(arith.ori, votes))


def join_members(call: Call, refs: Refs, tiles: Tiles, piece: Piece) -> None:
    """Counts this piece as finished with each member, and joins the results of those that are complete by it."""
    arrays = refs.records, refs.part, refs.part_lse, refs.counters, refs.out, refs.lse, refs.sinks
    has = [ref is not None for ref in arrays]
    scalars = piece.head, piece.num_tokens, piece.pieces, piece.first_result

    @plgpu.inline_mgpu(arg_types=(*[_REF] * (sum(has) + 1), *[_SCALAR] * len(scalars)))
    def join(_, notes, *args):
        args, i = list(args), ends.i32
        records, part, part_lse, counters, out, lse, sinks = (args.pop(0) if here else None for here in has)
        head, members, pieces, first_result = map(ends.scalar_of, args)

        # The barrier puts all threads' stores before the fences, which make them visible before the counts are.
        utils.warpgroup_barrier()
        thread = ends.thread_index()
        is_member = ends.less(thread, members)
        with utils.when(is_member):
            unit, counter = (memref.load(notes, _note(thread, which)) for which in (_UNIT, _COUNTER))
            needed = ends.load_global(records, [unit, i(plan.PIECES)])
            complete = ends.equal(ends.count_one(counters, counter), arith.subi(needed, i(1)))
            with utils.when(complete):
                ends.store_global(i(0), counters, [counter])
            memref.store(arith.select(complete, unit, i(-1)), notes, _note(thread, _UNIT))
        mine = memref.load(notes, _note(arith.select(is_member, thread, i(0)), _UNIT))
        complete = arith.andi(is_member, ends.less(i(-1), mine))
        found = any_member(complete, notes, plan.members_of_a_tile(call.group))
        with utils.when(found):
            ends.fence()
            results = ends.Results(part, part_lse, out, lse, sinks)
            _join_complete(call, results, records, notes, head, members, pieces, first_result)

    join(tiles.flags.at[lax.axis_index("wg")], *[ref for ref in arrays if ref is not None], *scalars)


def _join_complete(call: Call, results: ends.Results, records, notes, head, members, pieces, first_result) -> None:
    """Joins the results of the members that the notes have a unit of."""
    i, thread = ends.i32, ends.thread_index()

    def field(record: ir.Value, which: int) -> ir.Value:
        return ends.load_global(records, [record, i(which)])

    values = arith.muli(members, i(call.group * call.head_dim))

    def place(value: ir.Value) -> ends.Place:
        here = ends.less(value, values)
        value = arith.select(here, value, i(0))
        row = arith.divui(value, i(call.head_dim))
        column = arith.subi(value, arith.muli(row, i(call.head_dim)))
        member, in_group = arith.divui(row, i(call.group)), arith.remui(row, i(call.group))
        unit = memref.load(notes, _note(member, _UNIT))
        live = arith.andi(here, ends.less(i(-1), unit))
        unit = arith.maxsi(unit, i(0))
        member_row = arith.addi(first_result, arith.muli(member, i(call.group)))
        sources = ends.Sources(
            pieces=arith.select(live, field(unit, plan.PIECES), i(0)),
            first_result=field(unit, plan.FIRST_RESULT),
            shared_pieces=pieces,
            shared_result=member_row,
            tile_rows=call.partial.tile_rows,
        )
        query_head = arith.addi(arith.muli(head, i(call.group)), in_group)
        return ends.Place(sources, in_group, column, field(unit, plan.TOKEN), query_head, live)

    @utils.fori(ends.ceil_div(values, _AT_ONCE * ends.WIDTH * _THREADS), [])
    def _(trip, _):
        first = arith.addi(arith.muli(trip, i(_AT_ONCE * _THREADS)), thread)
        places = [place(arith.muli(arith.addi(first, i(n * _THREADS)), i(ends.WIDTH))) for n in range(_AT_ONCE)]
        live = places[0].live
        for other in places[1:]:
            live = arith.ori(live, other.live)
        with utils.when(live):
            ends.join_places(results, places, _AT_ONCE)
        return []
