"""The Mosaic GPU kernel's consumer for many query rows: 64 of them along M, as in prefill.

    S [64, keys] = Q [64, D] K^T [D, keys]          O [64, D] += P [64, keys] V [keys, D]

A row is reduced within four threads, and weights go from registers into the second product.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import combine_gpu as ends
from .consumer_gpu import LOG2E, LOWEST, WGMMA, Call, Kind, Refs, Tiles, finished, hide_unseen_values, unfinished
from .tuning import TILE_ROWS


def wide_kind(call: Call, refs: Refs, tiles: Tiles) -> Kind:
    """64 query rows along M."""
    me = lax.axis_index("wg")
    q_smem, rows, head_dim, group = tiles.own[0], TILE_ROWS, call.head_dim, call.group
    score_shape, acc_shape = (rows, call.blocks.block_kv), (rows, head_dim)

    def state():
        acc = plgpu.layout_cast(jnp.zeros(acc_shape, jnp.float32), WGMMA)
        top = plgpu.layout_cast(jnp.full((rows,), LOWEST, jnp.float32), WGMMA.reduce(1))
        return acc, top, plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), WGMMA.reduce(1))

    def load_queries(piece):
        live_rows = piece.num_tokens * group
        return ends.load_queries(
            refs.q, piece.token, piece.head, live_rows, group=group, head_dim=head_dim, dtype=call.dtype
        )

    def put_queries(q):
        q_smem[me] = q

    def scores(s_ref, stage):
        plgpu.wgmma(s_ref, q_smem.at[me], call.keys(tiles, stage).T)

    def softmax(s, acc, top, total, _):
        new_top = jnp.maximum(top, s.max(axis=1))
        decay = jnp.exp2(top - new_top)
        p = jnp.exp2(s - lax.broadcast_in_dim(new_top, s.shape, [0]))
        total = total * decay + p.sum(axis=1)
        return acc * lax.broadcast_in_dim(decay, acc.shape, [0]), new_top, total, p.astype(call.dtype)

    def values(acc_ref, weights, stage):
        plgpu.wgmma(acc_ref, weights, call.values(tiles, stage))

    def finish(piece, acc, top, total):
        live_rows = piece.num_tokens * group

        @pl.when(piece.pieces == 1)
        def _():
            sinks = None
            if refs.sinks is not None:
                sinks = ends.load_sinks(refs.sinks, piece.head, group=group) * LOG2E
            factor, lse = finished(top, total, sinks, with_lse=call.with_lse)
            out = acc * lax.broadcast_in_dim(factor, acc.shape, [0])
            ends.store_rows(refs.out, refs.lse, piece.token, piece.head, live_rows, out, lse, group=group)

        @pl.when(piece.pieces > 1)
        def _():
            factor, lse = unfinished(top, total)
            out = acc * lax.broadcast_in_dim(factor, acc.shape, [0])
            ends.store_partial(refs.part, refs.part_lse, piece.slot, live_rows, out, lse)

    hide_unseen = partial(hide_unseen_values, call, tiles)
    return Kind(1, score_shape, state, load_queries, put_queries, scores, softmax, values, finish, hide_unseen)
