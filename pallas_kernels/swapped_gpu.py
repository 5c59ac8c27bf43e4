"""The Mosaic GPU kernel's consumer for few query rows: keys and values are the 64-row operands, queries the narrow one.

    S^T [64 keys, N] = K [64, D] Q^T [D, N]         O^T [D, N] += V^T [D, 64 keys] P^T [64 keys, N]

Matrix instructions take 64 rows whatever is in them. A decode row has as many as a KV head has query heads, so here
they lie along N, a multiple of 8, and nothing is computed for rows that are not there. The price: a query's maximum is
over rows that four warps hold, and weights go through shared memory. A thread holds keys r and r + 8 of a block, for
queries c and c + 1 of each 8.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector

from . import combine_gpu as ends
from . import gpu_plan as plan

_LOG2E = math.log2(math.e)
_LOWEST = -1e30
_WGMMA = plgpu.Layout.WGMMA
_FIELDS = (
    plan.HEAD,
    plan.TOKEN,
    plan.NUM_TOKENS,
    plan.POSITION,
    plan.KV_START,
    plan.NUM_BLOCKS,
    plan.SLOT,
    plan.PIECES,
    plan.FIRST_WORKER,
)


def _array(registers: np.ndarray, shape: tuple[int, int], layout=_WGMMA) -> mgpu.FragmentedArray:
    layout = layout.to_mgpu()
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None
    )


def _pairs(x: mgpu.FragmentedArray) -> np.ndarray:
    """Registers of [64, N] as [N / 8, 2]: by 8 queries, and the thread's two keys."""
    return x.registers.reshape(-1, 2)


def _over_keys(values: list[ir.Value], red: ir.Value, op) -> list[ir.Value]:
    """Reduces vectors of two queries over all keys: lanes, then warps; every thread gets the results."""
    i32 = ir.IntegerType.get_signless(32)
    thread = ends._thread()
    lane, warp = arith.remui(thread, ends._i32(32)), arith.divui(thread, ends._i32(32))
    reduced = []
    for value in values:
        for distance in (4, 8, 16):
            value = op(value, _shuffle(value, distance))
        reduced.append(value)
    index = ir.IndexType.get()
    column = arith.muli(arith.remui(lane, ends._i32(4)), ends._i32(2))
    at = lambda n: arith.index_cast(index, arith.addi(column, ends._i32(8 * n)))  # noqa: E731
    with utils.when(ends._less(lane, ends._i32(4))):
        for n, value in enumerate(reduced):
            vector.store(value, red, [arith.index_cast(index, warp), at(n)])
    utils.warpgroup_barrier()
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    for n in range(len(reduced)):
        parts = [vector.load(pair, red, [utils.c(w, index), at(n)]) for w in range(4)]
        reduced[n] = op(op(parts[0], parts[1]), op(parts[2], parts[3]))
    del i32
    return reduced


def _shuffle(pair: ir.Value, distance: int) -> ir.Value:
    parts = [vector.extract(pair, dynamic_position=[], static_position=[i]) for i in range(2)]
    parts = [utils.shfl_bfly(x, distance) for x in parts]
    return vector.from_elements(pair.type, parts)


def column_max(s, top, red, n: int):
    """The new maxima of the queries, [64, N] with equal rows, from those before and a block's scores."""

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA, _WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((64, n), jnp.float32, layout=_WGMMA),
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


def column_sum(total, red, n: int):
    """Sums over all keys, [64, N] with equal rows."""

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((64, n), jnp.float32, layout=_WGMMA),
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

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA,), return_type=plgpu.ShapeDtypeStruct((rows, n), jnp.float32, layout=_WGMMA)
    )
    def repeat(_, x):
        return _array(np.concatenate([x.registers] * (rows // 64), axis=0), (rows, n))

    return repeat(x)


def _swizzled(row: ir.Value, column: ir.Value, columns: int) -> ir.Value:
    """Byte offset of an element of 16 bits in tiles of 8 x 64 whose 16-byte units are swizzled."""
    i = ends._i32
    tile = arith.addi(
        arith.muli(arith.divui(row, i(8)), i(columns // 64)), arith.divui(column, i(64))
    )
    row, column = arith.remui(row, i(8)), arith.remui(column, i(64))
    unit = arith.xori(arith.divui(column, i(8)), row)
    inside = arith.addi(arith.muli(unit, i(16)), arith.muli(arith.remui(column, i(8)), i(2)))
    return arith.addi(arith.addi(arith.muli(tile, i(1024)), arith.muli(row, i(128))), inside)


def _put(value: ir.Value, ref: ir.Value, offset: ir.Value, alignment: int) -> None:
    pointer = utils.getelementptr(utils.memref_ptr(ref), [offset], ir.IntegerType.get_signless(8))
    llvm.store(value, pointer, alignment=alignment)


def put_weights(p, p_smem, n: int, transforms) -> None:
    """Stores P^T [64 keys, N] as P [N, 64] where the matrix instruction reads it."""

    @plgpu.inline_mgpu(arg_types=(_WGMMA, plgpu.RefType(transforms)))
    def put(_, p, ref):
        rows, column = ends._own_rows()
        pairs = _pairs(p)
        for i in range(n // 8):
            for half, key in enumerate(rows):
                for which in range(2):
                    query = arith.addi(column, ends._i32(8 * i + which))
                    value = vector.extract(pairs[i, half], dynamic_position=[], static_position=[which])
                    _put(value, ref, _swizzled(query, key, 64), 2)

    put(p, p_smem)


def _query_layout(n: int, head_dim: int):
    return plgpu.Layout.WG_STRIDED((n * head_dim,), vec_size=min(8, n * head_dim // 128))


def load_queries(q_ref, token, head, live_rows, *, n: int, group: int, head_dim: int, dtype):
    """The queries of a tile, [N * D]: rows from `live_rows` on are some other queries."""
    layout = _query_layout(n, head_dim)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * 3),
        return_type=plgpu.ShapeDtypeStruct((n * head_dim,), dtype, layout=layout),
    )
    def load(_, ref, token, head, live_rows):
        width = layout.to_mgpu().vec_size
        registers = np.empty((n * head_dim // (128 * width),), dtype=object)
        for i in range(registers.size):
            value = arith.muli(arith.addi(ends._thread(), ends._i32(128 * i)), ends._i32(width))
            row = arith.divui(value, ends._i32(head_dim))
            column = arith.subi(value, arith.muli(row, ends._i32(head_dim)))
            row = arith.select(ends._less(row, ends._scalar(live_rows)), row, ends._i32(0))
            where = ends._query(row, ends._scalar(token), ends._scalar(head), group)
            registers[i] = ends._load(ref, [*where, column], width)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return load(q_ref, token, head, live_rows)


def put_queries(q, q_smem, *, n: int, head_dim: int, transforms) -> None:
    """Stores a tile's queries [N, D] where the matrix instruction reads them."""
    layout = _query_layout(n, head_dim)

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(transforms)))
    def put(_, q, ref):
        width = layout.to_mgpu().vec_size
        for i, register in enumerate(q.registers.flat):
            value = arith.muli(arith.addi(ends._thread(), ends._i32(128 * i)), ends._i32(width))
            row = arith.divui(value, ends._i32(head_dim))
            column = arith.subi(value, arith.muli(row, ends._i32(head_dim)))
            _put(register, ref, _swizzled(row, column, head_dim), 2 * width)

    put(q, q_smem)


def load_sinks(sinks_ref, head, *, n: int, group: int):
    """The sink of each query, [64, N] with equal rows; past the last query some other."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((64, n), jnp.float32, layout=_WGMMA),
    )
    def load(_, ref, head):
        _, column = ends._own_rows()
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        out = np.empty((n // 8, 2), dtype=object)
        for i in range(n // 8):
            values = []
            for which in range(2):
                row = arith.addi(column, ends._i32(8 * i + which))
                _, query_head = ends._query(row, ends._i32(0), ends._scalar(head), group)
                values.append(ends._load(ref, [query_head]))
            out[i, 0] = out[i, 1] = vector.from_elements(pair, values)
        return _array(out, (64, n))

    return load(sinks_ref, head)


def store(out_ref, lse_ref, scalars, out, lse, *, group: int | None) -> None:
    """Stores O^T [D, N] and log-sum-exps [64, N] of equal rows.

    Args:
      scalars: token, head, live rows for finished tiles; slot, 0, live rows for pieces (`group` is then `None`).
      lse: `None` if there is no place for them.
    """
    with_lse = lse is not None

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            *[plgpu.RefType()] * with_lse,
            *[plgpu.Layout.WG_SPLAT(())] * 3,
            _WGMMA,
            *[_WGMMA] * with_lse,
        )
    )
    def put(_, *args):
        args = list(args)
        ref = args.pop(0)
        lse_ref = args.pop(0) if with_lse else None
        first, head, live_rows = (ends._scalar(args.pop(0)) for _ in range(3))
        out = args.pop(0)
        head_dim, n = out.shape
        registers = out.registers.reshape(head_dim // 64, n // 8, 2)
        rows, column = ends._own_rows()
        element = ir.MemRefType(ref.type).element_type
        for i in range(n // 8):
            for which in range(2):
                query = arith.addi(column, ends._i32(8 * i + which))
                with utils.when(ends._less(query, live_rows)):
                    where = [first, query] if group is None else ends._query(query, first, head, group)
                    for tile in range(head_dim // 64):
                        for half, row in enumerate(rows):
                            x = vector.extract(
                                registers[tile, i, half], dynamic_position=[], static_position=[which]
                            )
                            x = x if element == x.type else arith.truncf(element, x)
                            ends._store(x, ref, [*where, arith.addi(row, ends._i32(64 * tile))])
                    if lse_ref is not None:
                        with utils.when(ends._less(ends._thread(), ends._i32(4))):
                            x = vector.extract(
                                _pairs(args[0])[i, 0], dynamic_position=[], static_position=[which]
                            )
                            ends._store(x, lse_ref, where)

    put(out_ref, *[lse_ref] * with_lse, *scalars, out, *[lse] * with_lse)


def consume(refs, scratch, *, n, blocks, group, head_dim, dtype, options, with_lse, transforms):
    """Walks a worker's share: the computing warpgroups."""
    q_ref, _, records, _, counters, sinks_ref, out_ref, lse_ref, part_ref, part_lse_ref = refs
    q_smem, p_smem, red, k_smem, v_smem, flags, k_full, v_full, k_freed, v_freed = scratch
    me, block = lax.axis_index("wg"), lax.axis_index("block")
    worker = me * blocks.num_blocks + block
    bkv, stages = blocks.block_kv, blocks.stages
    scale, cap, window = options.scale * _LOG2E, options.soft_cap, options.sliding_window
    following, count = records[worker, plan.FOLLOWING], records[worker, plan.COUNT]
    shape = (bkv, n)

    @pl.when(me == 0)
    def _():
        ends.zero_padding(out_ref, lse_ref, records[worker, plan.LIVE_TOKENS], block, num_blocks=blocks.num_blocks)

    def fetch(i):
        at = jnp.where(i == 0, worker, following + i - 1)
        record = [records[at, field] for field in _FIELDS]
        q = load_queries(
            q_ref, record[1], record[0], record[2] * group, n=n, group=group, head_dim=head_dim, dtype=dtype
        )
        return record, q

    def piece(i, carry):
        step, (record, q) = carry
        head, token, num_tokens, position, kv_start, num_blocks, slot, pieces, first_worker = record
        live_rows = num_tokens * group
        put_queries(q, q_smem.at[me], n=n, head_dim=head_dim, transforms=transforms)
        plgpu.commit_smem()

        def issue_scores(s_ref, step):
            stage = lax.rem(step, stages)
            plgpu.barrier_wait(k_full.at[me * stages + stage])
            plgpu.wgmma(s_ref, k_smem.at[me, stage], q_smem.at[me].T)

        def mask(s, kv):
            columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_WGMMA)
            if group > 1:
                columns = lax.div(columns, jnp.full_like(columns, group))
            keys = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA) + kv
            seen = keys <= columns + position
            if window is not None:
                seen &= keys > columns + position - window
            return jnp.where(seen, s, -jnp.inf)

        def attend_to(s, kv, step, acc, top, total, next_step=None):
            stage = lax.rem(step, stages)
            ring = me * stages + stage
            if cap is None:
                s *= scale
            else:  # tanh(x) = 1 - 2 / (1 + e^2x); the hardware's tanh has only 11 bits
                s = cap * _LOG2E - (2 * cap * _LOG2E) / (1.0 + jnp.exp2(s * (2 * scale / cap)))
            masked = kv + bkv > position + 1
            if window is not None:
                masked |= kv < position + num_tokens - window
            s = lax.cond(masked, lambda x: mask(x, kv), lambda x: x, s)
            new_top = column_max(s, top, red.at[me], n)
            decay = jnp.exp2(top - new_top)
            p = jnp.exp2(s - new_top)
            total = total * decay + p
            put_weights(p.astype(dtype), p_smem.at[me], n, transforms)
            plgpu.commit_smem()
            acc *= as_rows(decay, head_dim, n)
            if next_step is not None:
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(k_freed.at[me * stages + lax.rem(next_step, stages)])
            plgpu.barrier_wait(v_full.at[ring])

            # A weight of 0 does not hide a NaN in a slot that no query may see.
            unseen = kv + bkv > position + num_tokens
            if window is not None:
                unseen |= kv < position + 1 - window

            @pl.when(unseen)
            def _():
                v = plgpu.load(v_smem.at[me, stage], layout=_WGMMA)
                keys = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=_WGMMA) + kv
                seen = keys < position + num_tokens
                if window is not None:
                    seen &= keys > position - window
                v_smem[me, stage] = jnp.where(seen, v, jnp.zeros_like(v))
                plgpu.commit_smem()

            def values(acc_ref):
                plgpu.wgmma(acc_ref, v_smem.at[me, stage].T, p_smem.at[me].T)

            acc = pl.run_state(values)(plgpu.ACC.init(acc))
            plgpu.barrier_arrive(v_freed.at[ring])
            return acc, new_top, total

        def first_scores(s_ref):
            issue_scores(s_ref, step)
            return s_ref[...]

        def kv_block(j, carry):
            s, acc, top, total = carry

            def overlapped(s_ref):
                issue_scores(s_ref, step + j + 1)  # runs while the softmax of this block is computed
                state = attend_to(s, kv_start + j * bkv, step + j, acc, top, total, step + j + 1)
                return s_ref[...], *state

            return pl.run_scoped(overlapped, plgpu.ACC(shape, jnp.float32))

        s = pl.run_scoped(first_scores, plgpu.ACC(shape, jnp.float32))
        plgpu.barrier_arrive(k_freed.at[me * stages + lax.rem(step, stages)])
        acc = plgpu.layout_cast(jnp.zeros((head_dim, n), jnp.float32), _WGMMA)
        top = plgpu.layout_cast(jnp.full(shape, _LOWEST, jnp.float32), _WGMMA)
        total = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _WGMMA)
        last = num_blocks - 1
        s, acc, top, total = lax.fori_loop(0, last, kv_block, (s, acc, top, total))
        following_piece = fetch(jnp.minimum(i + 1, count - 1))  # arrives while the last block is computed
        acc, top, total = attend_to(s, kv_start + last * bkv, step + last, acc, top, total)
        total = column_sum(total, red.at[me], n)

        @pl.when(pieces == 1)
        def _():
            whole_top, whole = top, total
            if sinks_ref is not None:
                sinks = load_sinks(sinks_ref, head, n=n, group=group) * _LOG2E
                whole_top = jnp.maximum(top, sinks)
                whole = total * jnp.exp2(top - whole_top) + jnp.exp2(sinks - whole_top)
            factor = jnp.exp2(top - whole_top) / whole
            lse = (whole_top + jnp.log2(whole)) * (1 / _LOG2E) if with_lse else None
            out = acc * as_rows(factor, head_dim, n)
            store(out_ref, lse_ref, (token, head, live_rows), out, lse, group=group)

        @pl.when(pieces > 1)
        def _():
            # A piece may show nothing to some queries: then total is 0, and its log -inf.
            out = acc * as_rows(1.0 / jnp.maximum(total, 1e-30), head_dim, n)
            store(part_ref, part_lse_ref, (slot, head, live_rows), out, top + jnp.log2(total), group=None)
            ends.join_pieces(
                (part_ref, part_lse_ref, counters, flags.at[me], out_ref, lse_ref, sinks_ref),
                (token, head, live_rows, pieces, first_worker),
                group=group,
                head_dim=head_dim,
            )

        return step + num_blocks, following_piece

    @pl.when(count > 0)
    def _():
        lax.fori_loop(0, count, piece, (jnp.int32(0), fetch(jnp.int32(0))))
