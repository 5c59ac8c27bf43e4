"""The Mosaic GPU kernel's consumer for 8-bit pages: keys and values are the 64-row operands, from registers.

    S^T [64 keys, N] = K [64, D] Q^T [D, N]         O^T [D, N] += V^T [D, 64 keys] P^T [64 keys, N]

As `narrow_gpu`, but K and V go through registers, where they become float16 (`convert_gpu`), so a tile in shared memory
is free as soon as V is loaded. N is up to 64, so that the kind also serves many query rows.

A key's scale multiplies its scores. A value's scale would multiply its weight; weights of float16 do not have the
range for it, so it goes into the exponent instead: the running maximum is that of score + log2(scale), and the sum of
the softmax takes the scale out again. Weights are up to 2^15, nearly the largest float16, and not up to 1: then one is
lost only if it is below 2^-40 of the largest, and a hundred thousand of those are nothing.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import convert_gpu as convert
from . import narrow_gpu as narrow
from .consumer_gpu import LOG2E, LOWEST, WGMMA, Call, Kind, Refs, Tiles, finished, unfinished

_HEADROOM = 15.0  # the largest weight's logarithm to base 2; the largest float16's is 16


def quantized_kind(call: Call, refs: Refs, tiles: Tiles) -> Kind:
    """`call.rows` query rows along N."""
    me = lax.axis_index("wg")
    q_smem, p_smem, red, scales_smem = tiles.own
    q_smem, p_smem, red = q_smem.at[me], p_smem.at[me], red.at[me]
    n, head_dim, group, transforms = call.rows, call.head_dim, call.group, call.transforms
    bkv, dtype = call.blocks.block_kv, call.page_dtype
    shape, value_rows = (bkv, n), convert.value_rows(head_dim)

    def state():
        acc = plgpu.layout_cast(jnp.zeros((value_rows, n), jnp.float32), WGMMA)
        top = plgpu.layout_cast(jnp.full(shape, LOWEST, jnp.float32), WGMMA)
        return acc, top, plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)

    def load_queries(piece):
        live_rows = piece.num_tokens * group
        return narrow.load_queries(
            refs.q, piece.token, piece.head, live_rows, n=n, group=group, head_dim=head_dim, dtype=call.dtype
        )

    def put_queries(q):
        convert.put_queries(q, q_smem, n=n, head_dim=head_dim, dtype=dtype, transforms=transforms)

    def scores(s_ref, stage):
        k = convert.load_keys(tiles.kv.at[me, stage], head_dim=head_dim, dtype=dtype)
        scales = convert.load_scales(scales_smem.at[me, stage], box=call.box, page_size=call.page_size)
        plgpu.wgmma(s_ref, k, q_smem.T)
        return scales

    def hide_unseen(piece, kv, stage):
        if dtype == jnp.int8:
            return  # has no NaN
        end = piece.position + piece.num_tokens - kv
        unseen, first = bkv > end, jnp.int32(0)
        window = call.options.sliding_window
        if window is not None:
            first = piece.position + 1 - window - kv
            unseen |= first > 0

        @pl.when(unseen)
        def _():
            convert.zero_values(tiles.kv.at[me, stage], first, end, head_dim=head_dim)
            plgpu.commit_smem()

    def load_values(stage):
        return convert.load_values(tiles.kv.at[me, stage], head_dim=head_dim, dtype=dtype)

    def softmax(s, acc, top, total, scales):
        over = lambda x: lax.broadcast_in_dim(x, shape, [0])  # noqa: E731
        hidden = s == -jnp.inf  # the scale of a slot that nobody sees may be NaN
        s = jnp.where(hidden, s, s + over(jnp.log2(scales)))
        # All that is called top is this much below the maximum: the sum is larger by as much, and both agree.
        new_top = narrow.column_max(s - _HEADROOM, top, red, n)
        decay = jnp.exp2(top - new_top)
        p = jnp.exp2(s - new_top)
        narrow.put_weights(p.astype(jnp.float16), p_smem, n)
        plgpu.commit_smem()
        # A thread adds up its own keys; the sum over all is made once, at the end.
        total = total * decay + jnp.where(hidden, jnp.zeros_like(p), p * over(1.0 / scales))
        return acc * narrow.as_rows(decay, value_rows, n), new_top, total, None

    def values(acc_ref, _, v):
        plgpu.wgmma(acc_ref, v, p_smem.T)

    def finish(piece, acc, top, total):
        live_rows = piece.num_tokens * group
        total = narrow.column_sum(total, red, n)

        @pl.when(piece.pieces == 1)
        def _():
            sinks = None if refs.sinks is None else narrow.load_sinks(refs.sinks, piece.head, n=n, group=group) * LOG2E
            factor, lse = finished(top, total, sinks, with_lse=call.with_lse)
            out = acc * narrow.as_rows(factor, value_rows, n)
            narrow.store(refs.out, refs.lse, (piece.token, piece.head, live_rows), out, lse, group=group, adjacent=True)

        @pl.when(piece.pieces > 1)
        def _():
            factor, lse = unfinished(top, total)
            out = acc * narrow.as_rows(factor, value_rows, n)
            where = piece.slot, piece.head, live_rows
            narrow.store(refs.part, refs.part_lse, where, out, lse, group=None, adjacent=True)

    return Kind(0, shape, state, load_queries, put_queries, scores, softmax, values, finish, hide_unseen, load_values)
