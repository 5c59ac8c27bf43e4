"""What the kinds of consumer of the Mosaic GPU kernel have in common: how a worker's share is walked.

for each piece:  queries, fetched under the piece before, to shared memory
                 S of the first block
                 for each block but the last:  S of the next | softmax of this one; O += P V
                 fetch the next piece's record and queries;  softmax of the last block; O += P V
                 a whole unit: output; a piece of one: partial results, and who finishes last joins all pieces

Kinds are `narrow_gpu` for few query rows, `wide_gpu` for many, `quantized_gpu` for 8-bit pages. Pieces of units that
several rows share come first, and are of a kind of their own (`shared_prefix_gpu`); `prefix_join_gpu` makes of the
narrow kind one that joins its results with theirs.
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false

import dataclasses
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
      num_kv_heads: of the pages.
      sharing: whether rows may share a prefix.
      partial: where partial results lie.
      blocks: sizes of tiles, and how many there are.
      options: of the layer: scale, window, soft cap.
      with_lse: whether log-sum-exps are asked for.
    """

    group: int
    head_dim: int
    dtype: Any
    page_dtype: Any
    rows: int
    transforms: tuple
    page_size: int
    num_kv_heads: int
    sharing: bool
    partial: plan.PartialRows
    blocks: GPUBlocks
    options: AttentionOptions
    with_lse: bool

    @property
    def quantized(self) -> bool:
        """Whether the pages have scales."""
        return self.page_dtype.itemsize == 1

    def keys(self, tiles: "Tiles", stage: jax.Array) -> Any:
        """K of this warpgroup's tile of 16 bits, [block_kv, D]."""
        return tiles.kv.at[lax.axis_index("wg"), stage, :, pl.ds(0, self.head_dim)]

    def values(self, tiles: "Tiles", stage: jax.Array) -> Any:
        """V of the same."""
        return tiles.kv.at[lax.axis_index("wg"), stage, :, pl.ds(self.head_dim, self.head_dim)]

    @property
    def box(self) -> int:
        """Token slots that one copy brings."""
        return math.gcd(self.page_size, self.blocks.block_kv)


@dataclass(frozen=True)
class Refs:
    """Arrays in global memory; `scales`, `first_pages`, `sinks` and `lse` may be `None`."""

    q: Any
    pages: Any
    scales: Any
    records: Any
    page_table: Any
    counters: Any
    first_pages: Any
    sinks: Any
    out: Any
    lse: Any
    part: Any
    part_lse: Any


@dataclass(frozen=True)
class Tiles:
    """Shared memory and barriers: `own` of a kind of consumer, and what it shares with the loading warps."""

    own: tuple
    kv: Any
    flags: Any
    full: Any
    freed: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Piece:
    """The scalars of a record that a consumer needs.

    Attributes:
      pieces: results that are joined, of which this is one; those of a shared unit are counted.
      slot: where this one's are, if there are others: a row of the partial results.
      first_result: the same of the unit's first.
      counter: where finished pieces are counted.
      shared_pieces, shared_result: those of the shared unit, and where the first of them has this row's; `None` if no
        rows share a prefix.
    """

    head: jax.Array
    token: jax.Array
    num_tokens: jax.Array
    position: jax.Array
    kv_start: jax.Array
    num_blocks: jax.Array
    pieces: jax.Array
    slot: jax.Array
    first_result: jax.Array
    counter: jax.Array
    shared_pieces: jax.Array | None = None
    shared_result: jax.Array | None = None


def read_piece(call: Call, records: Any, at: jax.Array, worker: jax.Array, *, shared: bool = False) -> Piece:
    """The piece of a record that `worker` walks; `shared` if it is one of a shared unit."""
    partial = call.partial

    def field(which: int) -> jax.Array:
        return records[at, which]

    first_worker, first_result = field(plan.FIRST_WORKER), field(plan.FIRST_RESULT)
    slot = 2 * worker * partial.tile_rows
    if shared:
        slot = partial.shared + 2 * worker * plan.TILE_ROWS
    counter, of_shared = first_worker, {}
    if call.sharing and not shared:
        of_shared = {"shared_pieces": field(plan.SHARED_PIECES), "shared_result": field(plan.SHARED_RESULT)}
        of_row = call.blocks.num_workers + field(plan.ROW) * call.num_kv_heads + field(plan.HEAD)
        counter = jnp.where(of_shared["shared_pieces"] > 0, of_row, first_worker)
    return Piece(
        head=field(plan.HEAD),
        token=field(plan.TOKEN),
        num_tokens=field(plan.NUM_TOKENS),
        position=field(plan.POSITION),
        kv_start=field(plan.KV_START),
        num_blocks=field(plan.NUM_BLOCKS),
        pieces=field(plan.PIECES),
        slot=jnp.where(worker == first_worker, first_result, slot),
        first_result=first_result,
        counter=counter,
        **of_shared,
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
      finish: (piece, acc, top, total, *ahead) -> None, stores a whole unit, or a piece; or whether it has joined all
        pieces, as 1 or 0.
      hide_unseen: (piece, first KV token, stage) -> None, zeroes V in slots that no query may see; `None` if all
        queries see all slots.
      load_values: (stage) -> array of V, in registers; `None` if V is read from shared memory, and so K.
      look_ahead: (piece) -> `ahead`, what `finish` needs and is asked for before the first block; `None` for nothing.
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
    hide_unseen: Callable | None
    load_values: Callable | None = None
    look_ahead: Callable | None = None


def positions(shape: tuple[int, int], axis: int, first: jax.Array, group: int = 1) -> jax.Array:
    """Positions along an axis, `group` neighbours sharing one."""
    n = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)
    return (lax.div(n, jnp.full_like(n, group)) if group > 1 else n) + first


def hide_unseen_values(call: Call, tiles: Tiles, piece: Piece, kv: jax.Array, stage: jax.Array) -> None:
    """Zeroes V in slots that no query may see: a weight of 0 does not hide a NaN."""
    window = call.options.sliding_window
    unseen = kv + call.blocks.block_kv > piece.position + piece.num_tokens
    if window is not None:
        unseen |= kv < piece.position + 1 - window

    @pl.when(unseen)
    def _():
        v = plgpu.load(call.values(tiles, stage), layout=WGMMA)
        keys = positions(v.shape, 0, kv)
        seen = keys < piece.position + piece.num_tokens
        if window is not None:
            seen &= keys > piece.position - window
        call.values(tiles, stage)[...] = jnp.where(seen, v, jnp.zeros_like(v))
        plgpu.commit_smem()


def consume(call: Call, refs: Refs, tiles: Tiles, kind: Kind, shared: Kind | None = None) -> None:
    """Walks the share of this warpgroup's worker; `shared` is the kind of units that several rows share."""
    blocks, window, group = call.blocks, call.options.sliding_window, call.group
    bkv, stages, records = blocks.block_kv, blocks.stages, refs.records
    scale, cap = call.options.scale * LOG2E, call.options.soft_cap
    me, block = lax.axis_index("wg"), lax.axis_index("block")
    worker = me * blocks.num_blocks + block
    following, count = records[worker, plan.FOLLOWING], records[worker, plan.COUNT]

    @pl.when(me == 0)
    def _():
        ends.zero_padding(refs.out, refs.lse, records[worker, plan.LIVE_TOKENS], block, num_blocks=blocks.num_blocks)

    def record_of(i):
        return record_at(worker, following, i)

    def mask(kind, s, piece, kv):
        """Scores of keys that a query may not see become -inf: those after it, and those that its window has left."""
        keys = positions(s.shape, kind.keys_axis, kv)
        queries = positions(s.shape, 1 - kind.keys_axis, piece.position, group)
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        return jnp.where(seen, s, -jnp.inf)

    def issue_scores(kind, s_ref, step):
        stage = lax.rem(step, stages)
        plgpu.barrier_wait(tiles.full.at[me * stages + stage])
        return kind.scores(s_ref, stage)

    def attend_to(kind, piece, s, scales, kv, step, state, *, issued=False):
        stage = lax.rem(step, stages)
        ring = me * stages + stage
        if scales is not None:
            s *= lax.broadcast_in_dim(scales[0], s.shape, [kind.keys_axis])
        if cap is None:
            s *= scale
        else:  # tanh(x) = 1 - 2 / (1 + e^2x); the hardware's tanh has only 11 bits
            s = cap * LOG2E - (2 * cap * LOG2E) / (1.0 + jnp.exp2(s * (2 * scale / cap)))
        if kind.hide_unseen is not None:
            masked = kv + bkv > piece.position + 1
            if window is not None:
                masked |= kv < piece.position + piece.num_tokens - window
            s = lax.cond(masked, lambda x: mask(kind, x, piece, kv), lambda x: x, s)
        acc, top, total, weights = kind.softmax(s, *state, None if scales is None else scales[1])
        if issued:
            plgpu.wgmma_wait(0)
        if kind.hide_unseen is not None:
            kind.hide_unseen(piece, kv, stage)
        v = stage
        if kind.load_values is not None:
            v = kind.load_values(stage)
            plgpu.barrier_arrive(tiles.freed.at[ring])
        acc = pl.run_state(lambda acc_ref: kind.values(acc_ref, weights, v))(plgpu.ACC.init(acc))
        if kind.load_values is None:
            plgpu.barrier_arrive(tiles.freed.at[ring])
        return acc, top, total

    def attend_all(kind, piece, q, step, before_last):
        """The state after all blocks of a piece, and what `before_last`, which runs before the last one, returns."""
        kind.put_queries(q)
        plgpu.commit_smem()

        def first_scores(s_ref):
            scales = issue_scores(kind, s_ref, step)
            return s_ref[...], scales

        def kv_block(j, carry):
            s, scales, *state = carry

            def overlapped(s_ref):
                next_scales = issue_scores(kind, s_ref, step + j + 1)  # runs under the softmax of this block
                kv = piece.kv_start + j * bkv
                new_state = attend_to(kind, piece, s, scales, kv, step + j, state, issued=True)
                return s_ref[...], next_scales, *new_state

            return pl.run_scoped(overlapped, plgpu.ACC(kind.score_shape, jnp.float32))

        s, scales = pl.run_scoped(first_scores, plgpu.ACC(kind.score_shape, jnp.float32))
        last = piece.num_blocks - 1
        s, scales, *state = lax.fori_loop(0, last, kv_block, (s, scales, *kind.state()))
        found = before_last()
        return attend_to(kind, piece, s, scales, piece.kv_start + last * bkv, step + last, state), found

    def walk_shared(i, step):
        piece = read_piece(call, records, record_at(first_shared, shared_following, i), worker, shared=True)
        state, _ = attend_all(shared, piece, shared.load_queries(piece), step, lambda: None)
        shared.finish(piece, *state)
        return step + piece.num_blocks

    def fetch(i):
        piece = read_piece(call, records, record_of(i), worker)
        return piece, kind.load_queries(piece)

    def walk(i, carry):
        step, (piece, q) = carry
        ahead = () if kind.look_ahead is None else kind.look_ahead(piece)
        # The next piece arrives while the last block is computed.
        state, next_piece = attend_all(kind, piece, q, step, lambda: fetch(jnp.minimum(i + 1, count - 1)))
        joined = kind.finish(piece, *state, *ahead)
        unjoined = piece.pieces > 1
        if joined is not None:
            unjoined &= joined == 0

        @pl.when(unjoined)
        def _():
            scalars = piece.token, piece.head, piece.num_tokens * group, piece.pieces, piece.counter, piece.first_result
            ends.join_pieces(
                (refs.part, refs.part_lse, refs.counters, tiles.flags.at[me], refs.out, refs.lse, refs.sinks),
                scalars if shared is None else (*scalars, piece.shared_pieces, piece.shared_result),
                group=group,
                head_dim=call.head_dim,
                tile_rows=call.partial.tile_rows,
                sharing=shared is not None,
            )

        return step + piece.num_blocks, next_piece

    step = jnp.int32(0)
    first = None
    if shared is not None:
        # Fetched ahead of the shared units; a worker without a part of its own gets some other queries.
        piece = read_piece(call, records, worker, worker)
        piece = dataclasses.replace(piece, token=jnp.where(count > 0, piece.token, 0))
        first = piece, kind.load_queries(piece)
        first_shared, shared_following, shared_count = shared_part(call, records, worker)
        step = lax.fori_loop(0, shared_count, walk_shared, step)

    @pl.when(count > 0)
    def _():
        lax.fori_loop(0, count, walk, (step, first or fetch(jnp.int32(0))))


def record_at(first: jax.Array, following: jax.Array, i: jax.Array) -> jax.Array:
    """The record of a worker's i-th piece."""
    return jnp.where(i == 0, first, following + i - 1)


def shared_part(call: Call, records: Any, worker: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A worker's part of the shared units: its first record, where the others begin, and how many pieces it has."""
    behind = plan.num_shared_records(call.partial.num_rows, call.num_kv_heads, call.blocks.num_workers)
    record = records.shape[0] - behind + worker
    return record, records[record, plan.FOLLOWING], records[record, plan.COUNT]


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
