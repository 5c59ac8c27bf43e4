"""The Mosaic GPU kernel's shared units: a prefix of pages read once, for the queries of several rows.

    S [64 = members x group, keys] = Q K^T        as in `wide_gpu`, the queries gathered from the members' tokens

A member is a row with one query token. All of them see the whole prefix, so nothing is masked. A piece leaves its
results and counts itself with each member, as the pieces of the member's own unit do; who finds a member complete joins
its results. So nobody waits: a prefix may be done before the rows' own units are, or after.
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false

import dataclasses

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
from .tuning import TILE_ROWS
from .wide_gpu import wide_kind

_SCALAR = plgpu.Layout.WG_SPLAT(())
_REF = plgpu.RefType()
_THREADS = 128
_AT_ONCE = 4  # places that a thread joins together


def load_members_queries(q_ref, records_ref, first_member, head, live_rows, *, group: int, head_dim: int, dtype):
    """The queries of the members from record `first_member` on, [64, D]: rows from `live_rows` on are some others."""
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(_REF, _REF, _SCALAR, _SCALAR, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct((TILE_ROWS, head_dim), dtype, layout=layout),
    )
    def load(_, ref, records, first_member, head, live_rows):
        rows, column = ends.own_rows()
        registers = np.empty((head_dim // 8, 2), dtype=object)
        for half, row in enumerate(rows):
            row = arith.select(ends.less(row, ends.scalar_of(live_rows)), row, ends.i32(0))
            member, query_head = ends.query_of(row, ends.scalar_of(first_member), ends.scalar_of(head), group)
            token = ends.load_global(records, [member, ends.i32(plan.TOKEN)])
            for n in range(head_dim // 8):
                where = [token, query_head, arith.addi(column, ends.i32(8 * n))]
                registers[n, half] = ends.load_global(ref, where, 2)
        shape = layout.to_mgpu().registers_shape((TILE_ROWS, head_dim))
        return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=layout.to_mgpu(), _is_signed=None)

    return load(q_ref, records_ref, first_member, head, live_rows)


def shared_kind(call: Call, refs: Refs, tiles: Tiles) -> Kind:
    """64 query rows of several members along M."""
    group, head_dim = call.group, call.head_dim

    def load_queries(piece: Piece):
        live_rows = piece.num_tokens * group
        return load_members_queries(
            refs.q, refs.records, piece.token, piece.head, live_rows, group=group, head_dim=head_dim, dtype=call.dtype
        )

    def finish(piece: Piece, acc, top, total):
        factor, lse = unfinished(top, total)
        out = acc * lax.broadcast_in_dim(factor, acc.shape, [0])
        ends.store_partial(refs.part, refs.part_lse, piece.slot, piece.num_tokens * group, out, lse)
        join_members(call, refs, tiles, piece)

    wide = wide_kind(call, refs, tiles)
    return dataclasses.replace(wide, load_queries=load_queries, finish=finish, hide_unseen=None)


def join_members(call: Call, refs: Refs, tiles: Tiles, piece: Piece) -> None:
    """Counts this piece as finished with each member, and joins the results of those that are complete by it."""
    arrays = refs.records, refs.part, refs.part_lse, refs.counters, refs.out, refs.lse, refs.sinks
    has = [ref is not None for ref in arrays]
    scalars = piece.token, piece.head, piece.num_tokens, piece.pieces, piece.first_result

    @plgpu.inline_mgpu(arg_types=(*[_REF] * (sum(has) + 1), *[_SCALAR] * len(scalars)))
    def join(_, flags, *args):
        args, i = list(args), ends.i32
        records, part, part_lse, counters, out, lse, sinks = (args.pop(0) if here else None for here in has)
        first_member, head, members, pieces, first_result = map(ends.scalar_of, args)
        index = ir.IndexType.get()

        def field(record: ir.Value, which: int) -> ir.Value:
            return ends.load_global(records, [record, i(which)])

        # The barrier puts all threads' stores before the fences, which make them visible before the counts are.
        utils.warpgroup_barrier()
        thread = ends.thread_index()
        with utils.when(ends.less(thread, members)):
            unit = arith.addi(field(arith.addi(first_member, thread), plan.FOLLOWING), head)
            counter = arith.addi(arith.muli(field(unit, plan.ROW), i(call.num_kv_heads)), head)
            counter = arith.addi(counter, i(call.blocks.num_workers))
            needed = field(unit, plan.PIECES)
            complete = ends.equal(ends.count_one(counters, counter), arith.subi(needed, i(1)))
            with utils.when(complete):
                ends.store_global(i(0), counters, [counter])
            memref.store(arith.select(complete, unit, i(-1)), flags, [arith.index_cast(index, thread)])
        utils.warpgroup_barrier()
        ends.fence()
        results = ends.Results(part, part_lse, out, lse, sinks)
        values = arith.muli(members, i(call.group * call.head_dim))

        def place(value: ir.Value) -> ends.Place:
            here = ends.less(value, values)
            value = arith.select(here, value, i(0))
            row = arith.divui(value, i(call.head_dim))
            column = arith.subi(value, arith.muli(row, i(call.head_dim)))
            member, in_group = arith.divui(row, i(call.group)), arith.remui(row, i(call.group))
            unit = memref.load(flags, [arith.index_cast(index, member)])
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

    join(tiles.flags.at[lax.axis_index("wg")], *[ref for ref in arrays if ref is not None], *scalars)
