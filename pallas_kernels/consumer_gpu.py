"""What the two kinds of consumer of the Mosaic GPU kernel share: how a worker's share is walked.

for each piece:  queries, fetched under the piece before, to shared memory
                 S of the first block
                 for each block but the last:  S of the next | softmax of this one; O += P V
                 fetch the next piece's record and queries;  softmax of the last block; O += P V
                 a whole unit: output; a piece of one: partial results, and who finishes last joins all pieces
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import combine_gpu as ends
from . import gpu_plan as plan
from .tuning import GPUBlocks
from .xla import AttentionOptions

LOG2E = math.log2(math.e)
LOWEST = -1e30  # below every score; finite, so that the difference of two of them is 0 and not NaN
WGMMA = plgpu.Layout.WGMMA


@dataclass(frozen=True)
class Call:
    """Static facts of a kernel call.

    Attributes:
      group: query heads of a KV head.
      head_dim: width of a head.
      dtype: of queries.
      page_dtype: of pages.
      rows: rows of a tile, which are query tokens times `group`; a multiple of 8 if they lie along N, else 64.
      transforms: how the tiles of 16 bits in shared memory are laid out.
      page_size: token slots of a page.
    """

    group: int
    head_dim: int
    dtype: Any
    page_dtype: Any
    rows: int
    transforms: tuple
    page_size: int
    blocks: GPUBlocks
    options: AttentionOptions
    with_lse: bool

    @property
    def quantized(self) -> bool:
        """Whether the pages have scales."""
        return self.page_dtype.itemsize == 1

    @property
    def box(self) -> int:
        """Token slots that one copy brings."""
        return math.gcd(self.page_size, self.blocks.block_kv)


@dataclass(frozen=True)
class Refs:
    """Arrays in global memory; `scales`, `sinks` and `lse` may be `None`."""

    q: Any
    pages: Any
    scales: Any
    records: Any
    page_table: Any
    counters: Any
    sinks: Any
    out: Any
    lse: Any
    part: Any
    part_lse: Any


@dataclass(frozen=True)
class Tiles:
    """Shared memory and barriers: `own` of a kind of consumer, and what it shares with the loading warps."""

    own: tuple
    k: Any
    v: Any
    flags: Any
    k_full: Any
    v_full: Any
    k_freed: Any
    v_freed: Any


@dataclass(frozen=True)
class Piece:
    """The scalars of a record that a consumer needs."""

    head: jax.Array
    token: jax.Array
    num_tokens: jax.Array
    position: jax.Array
    kv_start: jax.Array
    num_blocks: jax.Array
    slot: jax.Array
    pieces: jax.Array
    first_worker: jax.Array


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


@dataclass(frozen=True)
class Kind:
    """What a kind of consumer does.

    Attributes:
      keys_axis: axis of the scores along which the keys lie.
      score_shape: shape of a block's scores.
      state: (acc, top, total) before the first block.
      load_queries: (piece) -> array of the tile's queries, in registers.
      put_queries: (array) -> None, to shared memory.
      scores: (accumulator, stage) -> None, issues S; or the scales of the block's keys and values.
      softmax: (scores, acc, top, total, scales of values) -> (acc, top, total, weights); it scales acc to the new
        maximum.
      values: (accumulator, weights, stage or loaded values) -> None, issues O += P V.
      finish: (piece, acc, top, total) -> None, stores a whole unit, or a piece.
      hide_unseen: (piece, first KV token, stage) -> None, zeroes V in slots that no query may see.
      load_values: (stage) -> array of V, in registers; `None` if V is read from shared memory, and so K.
    """

    keys_axis: int
    score_shape: tuple[int, int]
    state: Callable[[], tuple]
    load_queries: Callable
    put_queries: Callable
    scores: Callable
    softmax: Callable
    values: Callable
    finish: Callable
    hide_unseen: Callable
    load_values: Callable | None = None


def positions(shape: tuple[int, int], axis: int, first: jax.Array, group: int = 1) -> jax.Array:
    """Positions along an axis, `group` neighbours sharing one."""
    n = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)
    return (lax.div(n, jnp.full_like(n, group)) if group > 1 else n) + first


def hide_unseen_values(call: Call, tiles: Tiles, piece: Piece, kv: jax.Array, stage: jax.Array) -> None:
    """Zeroes V in slots that no query may see: a weight of 0 does not hide a NaN."""
    window, me = call.options.sliding_window, lax.axis_index("wg")
    unseen = kv + call.blocks.block_kv > piece.position + piece.num_tokens
    if window is not None:
        unseen |= kv < piece.position + 1 - window

    @pl.when(unseen)
    def _():
        v = plgpu.load(tiles.v.at[me, stage], layout=WGMMA)
        keys = positions(v.shape, 0, kv)
        seen = keys < piece.position + piece.num_tokens
        if window is not None:
            seen &= keys > piece.position - window
        tiles.v[me, stage] = jnp.where(seen, v, jnp.zeros_like(v))
        plgpu.commit_smem()


def consume(call: Call, refs: Refs, tiles: Tiles, kind: Kind) -> None:
    """Walks the share of this warpgroup's worker."""
    blocks, window, group = call.blocks, call.options.sliding_window, call.group
    bkv, stages, records = blocks.block_kv, blocks.stages, refs.records
    scale, cap = call.options.scale * LOG2E, call.options.soft_cap
    me, block = lax.axis_index("wg"), lax.axis_index("block")
    in_registers = kind.load_values is not None
    worker = me * blocks.num_blocks + block
    following, count = records[worker, plan.FOLLOWING], records[worker, plan.COUNT]

    @pl.when(me == 0)
    def _():
        ends.zero_padding(refs.out, refs.lse, records[worker, plan.LIVE_TOKENS], block, num_blocks=blocks.num_blocks)

    def fetch(i):
        at = jnp.where(i == 0, worker, following + i - 1)
        record = [records[at, field] for field in _FIELDS]
        return record, kind.load_queries(Piece(*record))

    def mask(s, piece, kv):
        """Scores of keys that a query may not see become -inf: those after it, and those that its window has left."""
        keys = positions(s.shape, kind.keys_axis, kv)
        queries = positions(s.shape, 1 - kind.keys_axis, piece.position, group)
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        return jnp.where(seen, s, -jnp.inf)

    def walk(i, carry):
        step, (record, q) = carry
        piece = Piece(*record)
        kind.put_queries(q)
        plgpu.commit_smem()

        def issue_scores(s_ref, step):
            stage = lax.rem(step, stages)
            plgpu.barrier_wait(tiles.k_full.at[me * stages + stage])
            scales = kind.scores(s_ref, stage)
            if in_registers:
                plgpu.barrier_arrive(tiles.k_freed.at[me * stages + stage])
            return scales

        def attend_to(s, scales, kv, step, state, next_step=None):
            stage = lax.rem(step, stages)
            ring = me * stages + stage
            if scales is not None:
                s *= lax.broadcast_in_dim(scales[0], s.shape, [kind.keys_axis])
            if cap is None:
                s *= scale
            else:  # tanh(x) = 1 - 2 / (1 + e^2x); the hardware's tanh has only 11 bits
                s = cap * LOG2E - (2 * cap * LOG2E) / (1.0 + jnp.exp2(s * (2 * scale / cap)))
            masked = kv + bkv > piece.position + 1
            if window is not None:
                masked |= kv < piece.position + piece.num_tokens - window
            s = lax.cond(masked, lambda x: mask(x, piece, kv), lambda x: x, s)
            acc, top, total, weights = kind.softmax(s, *state, None if scales is None else scales[1])
            if next_step is not None:
                plgpu.wgmma_wait(0)
                if not in_registers:
                    plgpu.barrier_arrive(tiles.k_freed.at[me * stages + lax.rem(next_step, stages)])
            plgpu.barrier_wait(tiles.v_full.at[ring])
            kind.hide_unseen(piece, kv, stage)
            v = stage
            if kind.load_values is not None:
                v = kind.load_values(stage)
                plgpu.barrier_arrive(tiles.v_freed.at[ring])
            acc = pl.run_state(lambda acc_ref: kind.values(acc_ref, weights, v))(plgpu.ACC.init(acc))
            if not in_registers:
                plgpu.barrier_arrive(tiles.v_freed.at[ring])
            return acc, top, total

        def first_scores(s_ref):
            scales = issue_scores(s_ref, step)
            return s_ref[...], scales

        def kv_block(j, carry):
            s, scales, *state = carry

            def overlapped(s_ref):
                next_scales = issue_scores(s_ref, step + j + 1)  # runs while the softmax of this block is computed
                new_state = attend_to(s, scales, piece.kv_start + j * bkv, step + j, state, step + j + 1)
                return s_ref[...], next_scales, *new_state

            return pl.run_scoped(overlapped, plgpu.ACC(kind.score_shape, jnp.float32))

        s, scales = pl.run_scoped(first_scores, plgpu.ACC(kind.score_shape, jnp.float32))
        if not in_registers:
            plgpu.barrier_arrive(tiles.k_freed.at[me * stages + lax.rem(step, stages)])
        last = piece.num_blocks - 1
        s, scales, *state = lax.fori_loop(0, last, kv_block, (s, scales, *kind.state()))
        next_piece = fetch(jnp.minimum(i + 1, count - 1))  # arrives while the last block is computed
        state = attend_to(s, scales, piece.kv_start + last * bkv, step + last, state)
        kind.finish(piece, *state)

        @pl.when(piece.pieces > 1)
        def _():
            ends.join_pieces(
                (refs.part, refs.part_lse, refs.counters, tiles.flags.at[me], refs.out, refs.lse, refs.sinks),
                (piece.token, piece.head, piece.num_tokens * group, piece.pieces, piece.first_worker),
                group=group,
                head_dim=call.head_dim,
            )

        return step + piece.num_blocks, next_piece

    @pl.when(count > 0)
    def _():
        lax.fori_loop(0, count, walk, (jnp.int32(0), fetch(jnp.int32(0))))


def finished(top, total, sinks, *, with_lse: bool):
    """Factor of the outputs and log-sum-exps of whole units; sinks in base 2 or `None`."""
    whole_top, whole = top, total
    if sinks is not None:
        whole_top = jnp.maximum(top, sinks)
        whole = total * jnp.exp2(top - whole_top) + jnp.exp2(sinks - whole_top)
    lse = (whole_top + jnp.log2(whole)) * (1 / LOG2E) if with_lse else None
    return jnp.exp2(top - whole_top) / whole, lse


def unfinished(top, total):
    """The same of pieces, in base 2. One may show nothing to some of its rows: then total is 0, and its log -inf."""
    return 1.0 / jnp.maximum(total, 1e-30), top + jnp.log2(total)
