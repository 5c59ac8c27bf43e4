"""The Mosaic GPU kernel's consumer for few query rows: keys and values are the 64-row operands, queries the narrow one.

    S^T [64 keys, N] = K [64, D] Q^T [D, N]         O^T [D, N] += V^T [D, 64 keys] P^T [64 keys, N]

Matrix instructions take 64 rows whatever is in them. A decode row has as many as a KV head has query heads, so here
they lie along N, a multiple of 8, and nothing is computed for rows that are not there. The price: a query's maximum is
over rows that four warps hold, and so is only found where one is needed, and weights go through shared memory. A thread
holds keys r and r + 8 of a block, for queries c and c + 1 of each 8.
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false

import functools
import math
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from . import combine_gpu as ends
from .consumer_gpu import LOG2E, LOWEST, WGMMA, Call, Kind, Refs, Tiles, finished, hide_unseen_values, unfinished

_SLACK = 8.0  # of scores above what is called their maximum: weights are at most 2^8, which any dtype holds
WEIGHT_TRANSFORMS = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)  # of P in shared memory


def _array(registers: np.ndarray, shape: tuple[int, int], layout=WGMMA) -> mgpu.FragmentedArray:
    layout = layout.to_mgpu()
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None
    )


def _pairs(x: mgpu.FragmentedArray) -> np.ndarray:
    """Registers of [64, N] as [N / 8, 2]: by 8 queries, and the thread's two keys."""
    return x.registers.reshape(-1, 2)


def _over_keys(values: list[ir.Value], red: ir.Value, op) -> list[ir.Value]:
    """Reduces vectors of two queries over all keys: lanes, then warps; every thread gets the results."""
    thread = ends.thread_index()
    lane, warp = arith.remui(thread, ends.i32(32)), arith.divui(thread, ends.i32(32))
    reduced = []
    for value in values:
        for distance in (4, 8, 16):
            value = op(value, _shuffle(value, distance))
        reduced.append(value)
    index = ir.IndexType.get()
    column = arith.muli(arith.remui(lane, ends.i32(4)), ends.i32(2))
    at = lambda n: arith.index_cast(index, arith.addi(column, ends.i32(8 * n)))  # noqa: E731
    with utils.when(ends.less(lane, ends.i32(4))):
        for n, value in enumerate(reduced):
            vector.store(value, red, [arith.index_cast(index, warp), at(n)])
    utils.warpgroup_barrier()
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    for n in range(len(reduced)):
        parts = [vector.load(pair, red, [utils.c(w, index), at(n)]) for w in range(4)]
        reduced[n] = op(op(parts[0], parts[1]), op(parts[2], parts[3]))
    return reduced


def _shuffle(pair: ir.Value, distance: int) -> ir.Value:
    parts = [vector.extract(pair, dynamic_position=[], static_position=[i]) for i in range(2)]
    parts = [utils.shfl_bfly(x, distance) for x in parts]
    return vector.from_elements(pair.type, parts)


def column_max(s, top, red, n: int):
    """The new maxima of the queries, [64, N] with equal rows, from those before and a block's scores."""

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((64, n), jnp.float32, layout=WGMMA),
    )
    def reduce(_, s, top, red):
        s, top = _pairs(s), _pairs(top)
        local = [arith.maximumf(s[i, 0], s[i, 1]) for i in range(n // 8)]
        new = _over_keys(local, red, arith.maximumf)
        out = np.empty((n // 8, 2), dtype=object)
        for i in range(n // 8):
            out[i, 0] = out[i, 1] = arith.maximumf(top[i, 0], new[i])
        return _array(out, (64, n))

    return reduce(s, top, red)


def outgrown(s, top, n: int):
    """1 if some score of a block is more than `_SLACK` above its query's maximum so far, else 0; a barrier."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(WGMMA, WGMMA), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar))
    def look(_, s, top):
        s, top = _pairs(s), _pairs(top)
        above = []
        for i in range(n // 8):
            limit = arith.addf(top[i, 0], ends.splat(ends.f32(_SLACK), 2))
            higher = arith.cmpf(arith.CmpFPredicate.OGT, arith.maximumf(s[i, 0], s[i, 1]), limit)
            above += [vector.extract(higher, dynamic_position=[], static_position=[which]) for which in range(2)]
        integer = ir.IntegerType.get_signless(32)
        found = utils.inline_ptx(
            "{.reg .pred p; setp.ne.u32 p, $1, 0; barrier.cta.red.or.pred p, $2, 128, p; selp.u32 $0, 1, 0, p;}",
            arith.extui(integer, functools.reduce(arith.ori, above)),
            utils.warpgroup_barrier_idx(sync=False),
            result_types=integer,
            has_side_effects=True,
            convergent=True,
        )
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return look(s, top)


def column_sum(total, red, n: int):
    """Sums over all keys, [64, N] with equal rows."""

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((64, n), jnp.float32, layout=WGMMA),
    )
    def reduce(_, total, red):
        total = _pairs(total)
        new = _over_keys([arith.addf(total[i, 0], total[i, 1]) for i in range(n // 8)], red, arith.addf)
        out = np.empty((n // 8, 2), dtype=object)
        for i in range(n // 8):
            out[i, 0] = out[i, 1] = new[i]
        return _array(out, (64, n))

    return reduce(total, red)


def as_rows(x, rows: int, n: int):
    """[64, N] with equal rows as [rows, N]."""
    if rows == 64:
        return x

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct((rows, n), jnp.float32, layout=WGMMA))
    def repeat(_, x):
        return _array(np.concatenate([x.registers] * (rows // 64), axis=0), (rows, n))

    return repeat(x)


def swizzled(row: ir.Value, column: ir.Value, columns: int) -> ir.Value:
    """Byte offset of an element of 16 bits in tiles of 8 x 64, or 8 x 32, whose 16-byte units are swizzled."""
    i, width = ends.i32, 64 if columns % 64 == 0 else 32
    tile = arith.addi(arith.muli(arith.divui(row, i(8)), i(columns // width)), arith.divui(column, i(width)))
    row, column = arith.remui(row, i(8)), arith.remui(column, i(width))
    unit = arith.xori(arith.divui(column, i(8)), row if width == 64 else arith.divui(row, i(2)))
    inside = arith.addi(arith.muli(unit, i(16)), arith.muli(arith.remui(column, i(8)), i(2)))
    return arith.addi(arith.addi(arith.muli(tile, i(16 * width)), arith.muli(row, i(2 * width))), inside)


def put_bytes(value: ir.Value, ref: ir.Value, offset: ir.Value, alignment: int) -> None:
    pointer = utils.getelementptr(utils.memref_ptr(ref), [offset], ir.IntegerType.get_signless(8))
    llvm.store(value, pointer, alignment=alignment)


def put_weights(p, p_smem, n: int, columns: int = 64) -> None:
    """Stores P^T [64 keys, N] as P [N, 64] where the matrix instruction reads it: tiles of so many columns."""

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType(WEIGHT_TRANSFORMS)))
    def put(_, p, ref):
        rows, column = ends.own_rows()
        pairs = _pairs(p)
        for i in range(n // 8):
            for half, key in enumerate(rows):
                for which in range(2):
                    query = arith.addi(column, ends.i32(8 * i + which))
                    value = vector.extract(pairs[i, half], dynamic_position=[], static_position=[which])
                    put_bytes(value, ref, swizzled(query, key, columns), 2)

    put(p, p_smem)


def query_layout(n: int, head_dim: int):
    return plgpu.Layout.WG_STRIDED((n * head_dim,), vec_size=math.gcd(8, n * head_dim // 128))


def load_queries(q_ref, token, head, live_rows, *, n: int, group: int, head_dim: int, dtype):
    """The queries of a tile, [N * D]: rows from `live_rows` on are some other queries."""
    layout = query_layout(n, head_dim)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * 3),
        return_type=plgpu.ShapeDtypeStruct((n * head_dim,), dtype, layout=layout),
    )
    def load(_, ref, token, head, live_rows):
        width = layout.to_mgpu().vec_size
        registers = np.empty((n * head_dim // (128 * width),), dtype=object)
        for i in range(registers.size):
            value = arith.muli(arith.addi(ends.thread_index(), ends.i32(128 * i)), ends.i32(width))
            row = arith.divui(value, ends.i32(head_dim))
            column = arith.subi(value, arith.muli(row, ends.i32(head_dim)))
            row = arith.select(ends.less(row, ends.scalar_of(live_rows)), row, ends.i32(0))
            where = ends.query_of(row, ends.scalar_of(token), ends.scalar_of(head), group)
            registers[i] = ends.load_global(ref, [*where, column], width)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return load(q_ref, token, head, live_rows)


def put_queries(q, q_smem, *, n: int, head_dim: int, transforms) -> None:
    """Stores a tile's queries [N, D] where the matrix instruction reads them."""
    layout = query_layout(n, head_dim)

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(transforms)))
    def put(_, q, ref):
        width = layout.to_mgpu().vec_size
        for i, register in enumerate(q.registers.flat):
            value = arith.muli(arith.addi(ends.thread_index(), ends.i32(128 * i)), ends.i32(width))
            row = arith.divui(value, ends.i32(head_dim))
            column = arith.subi(value, arith.muli(row, ends.i32(head_dim)))
            put_bytes(register, ref, swizzled(row, column, head_dim), 2 * width)

    put(q, q_smem)


def load_sinks(sinks_ref, head, *, n: int, group: int):
    """The sink of each query, [64, N] with equal rows; past the last query some other."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((64, n), jnp.float32, layout=WGMMA),
    )
    def load(_, ref, head):
        _, column = ends.own_rows()
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        out = np.empty((n // 8, 2), dtype=object)
        for i in range(n // 8):
            values = []
            for which in range(2):
                row = arith.addi(column, ends.i32(8 * i + which))
                _, query_head = ends.query_of(row, ends.i32(0), ends.scalar_of(head), group)
                values.append(ends.load_global(ref, [query_head]))
            out[i, 0] = out[i, 1] = vector.from_elements(pair, values)
        return _array(out, (64, n))

    return load(sinks_ref, head)


def store(out_ref, lse_ref, scalars, out, lse, *, group: int | None, adjacent: bool = False) -> None:
    """Stores O^T [D, N], which may have more rows than there is place for, and log-sum-exps [64, N] of equal rows.

    Args:
      scalars: token, head, live rows for finished tiles; first row, any, live rows for pieces (`group` is then `None`).
      lse: `None` if there is no place for them.
      adjacent: rows r and r + 8 of each 16 are 2r and 2r + 1 in D.
    """
    with_lse = lse is not None

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            *[plgpu.RefType()] * with_lse,
            *[plgpu.Layout.WG_SPLAT(())] * 3,
            WGMMA,
            *[WGMMA] * with_lse,
        )
    )
    def put(_, *args):
        args = list(args)
        ref = args.pop(0)
        lse_ref = args.pop(0) if with_lse else None
        first, head, live_rows = (ends.scalar_of(args.pop(0)) for _ in range(3))
        out = args.pop(0)
        head_dim, n = out.shape
        registers = out.registers.reshape(head_dim // 64, n // 8, 2)
        rows, column = ends.own_rows()
        in_16 = arith.remui(rows[0], ends.i32(16))
        first_of_pair = arith.addi(rows[0], in_16)  # 16 * warp + 2r
        element, width = ir.MemRefType(ref.type).element_type, ir.MemRefType(ref.type).shape[-1]
        for i in range(n // 8):
            for which in range(2):
                query = arith.addi(column, ends.i32(8 * i + which))
                with utils.when(ends.less(query, live_rows)):
                    where = [arith.addi(first, query)] if group is None else ends.query_of(query, first, head, group)
                    for tile in range(head_dim // 64):
                        parts = [
                            vector.extract(x, dynamic_position=[], static_position=[which]) for x in registers[tile, i]
                        ]
                        if adjacent:
                            pair = vector.from_elements(ir.VectorType.get((2,), parts[0].type), parts)
                            at = arith.addi(first_of_pair, ends.i32(64 * tile))
                            with utils.when(ends.less(at, ends.i32(width))):
                                ends.store_global(ends.rounded(pair, ref, 2), ref, [*where, at], 2)
                            continue
                        for row, x in zip(rows, parts, strict=True):
                            x = x if element == x.type else arith.truncf(element, x)
                            ends.store_global(x, ref, [*where, arith.addi(row, ends.i32(64 * tile))])
                    if lse_ref is not None:
                        with utils.when(ends.less(ends.thread_index(), ends.i32(4))):
                            x = vector.extract(_pairs(args[0])[i, 0], dynamic_position=[], static_position=[which])
                            ends.store_global(x, lse_ref, where)

    put(out_ref, *[lse_ref] * with_lse, *scalars, out, *[lse] * with_lse)


def narrow_kind(call: Call, refs: Refs, tiles: Tiles) -> Kind:
    """`call.rows` query rows along N."""
    me = lax.axis_index("wg")
    n, head_dim, group, transforms = call.rows, call.head_dim, call.group, call.transforms
    if call.sharing:  # the wide tile of a shared unit is not in use at the same time
        wide, red = (ref.at[me] for ref in tiles.own)
        q_smem, p_smem = wide.at[pl.ds(0, n)], wide.at[pl.ds(n, n), pl.ds(0, call.blocks.block_kv)]
    else:
        q_smem, p_smem, red = (ref.at[me] for ref in tiles.own)
    weight_columns = head_dim if call.sharing else call.blocks.block_kv
    shape = (call.blocks.block_kv, n)

    def state():
        acc = plgpu.layout_cast(jnp.zeros((head_dim, n), jnp.float32), WGMMA)
        top = plgpu.layout_cast(jnp.full(shape, LOWEST, jnp.float32), WGMMA)
        return acc, top, plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)

    def load_tile_queries(piece):
        live_rows = piece.num_tokens * group
        return load_queries(
            refs.q, piece.token, piece.head, live_rows, n=n, group=group, head_dim=head_dim, dtype=call.dtype
        )

    def put_tile_queries(q):
        put_queries(q, q_smem, n=n, head_dim=head_dim, transforms=transforms)

    def scores(s_ref, stage):
        plgpu.wgmma(s_ref, call.keys(tiles, stage), q_smem.T)

    def softmax(s, acc, top, total, _):
        def raise_top(acc, top, total):
            new_top = column_max(s, top, red, n)
            decay = jnp.exp2(top - new_top)
            return acc * as_rows(decay, head_dim, n), new_top, total * decay

        # A maximum over all warps takes longer than to see that it is not needed, as in most blocks but the first.
        acc, top, total = lax.cond(outgrown(s, top, n) > 0, raise_top, lambda *state: state, acc, top, total)
        p = jnp.exp2(s - top)
        put_weights(p.astype(call.dtype), p_smem, n, weight_columns)
        plgpu.commit_smem()
        # A thread adds up its own keys; the sum over all is made once, at the end.
        return acc, top, total + p, None

    def values(acc_ref, _, stage):
        plgpu.wgmma(acc_ref, call.values(tiles, stage).T, p_smem.T)

    def finish(piece, acc, top, total):
        live_rows = piece.num_tokens * group
        total = column_sum(total, red, n)

        @pl.when(piece.pieces == 1)
        def _():
            sinks = None if refs.sinks is None else load_sinks(refs.sinks, piece.head, n=n, group=group) * LOG2E
            factor, lse = finished(top, total, sinks, with_lse=call.with_lse)
            out = acc * as_rows(factor, head_dim, n)
            store(refs.out, refs.lse, (piece.token, piece.head, live_rows), out, lse, group=group)

        @pl.when(piece.pieces > 1)
        def _():
            factor, lse = unfinished(top, total)
            out = acc * as_rows(factor, head_dim, n)
            store(refs.part, refs.part_lse, (piece.slot, piece.head, live_rows), out, lse, group=None)

    hide_unseen = partial(hide_unseen_values, call, tiles)
    return Kind(0, shape, state, load_tile_queries, put_tile_queries, scores, softmax, values, finish, hide_unseen)
