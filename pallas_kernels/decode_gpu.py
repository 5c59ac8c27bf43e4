"""Paged attention for Hopper in Pallas Mosaic GPU: one launch, split over the KV, results joined on the way out.

A block of threads holds `consumers` warpgroups that compute and one warpgroup whose warps load, a warp a consumer:

    loading warp   record -> page ids -> one TMA box a page, K and V apart -> ring of `stages` tiles in shared memory
    consumer       record -> queries -> [ wait K | S = Q K^T | running softmax | wait V | O += P V | free the stage ]*
                   -> a whole unit: output; a piece of one: partial results, and who finishes last joins all pieces

The query heads of a KV head, and several query tokens, are the rows of one 64-row matrix product, so every K and V is
read once a tile. Work is cut by `gpu_plan`; scores are base-2 logarithms, so that the exponential is one instruction.

Reference:
  Shah et al., FlashAttention-3, https://arxiv.org/abs/2407.08608 (warp specialisation); Dao et al., Flash-Decoding,
  https://pytorch.org/blog/flash-decoding/ (splitting over the KV).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from . import gpu_plan as plan
from . import swapped_gpu
from .combine_gpu import join_pieces, load_queries, load_sinks, store_partial, store_rows, zero_padding
from .metadata import PagedMetadata
from .pages import KVPages
from .xla import AttentionOptions

_LOG2E = math.log2(math.e)
_WARPS = 4  # of a warpgroup
_CONSUMER_FIELDS = (
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
_LOWEST = -1e30  # below every score; finite, so that the difference of two of them is 0 and not NaN


def _row_tokens(group: int, shape: tuple[int, int]) -> jax.Array:
    """The tile's query token that each row belongs to."""
    rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    return lax.div(rows, jnp.full_like(rows, group)) if group > 1 else rows


def _mask(s, position, kv, *, group, sliding_window):
    """Scores that a query may not see become -inf: keys after it, and those that its window has left."""
    q_positions = _row_tokens(group, s.shape) + position
    kv_positions = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA) + kv
    seen = kv_positions <= q_positions
    if sliding_window is not None:
        seen &= kv_positions > q_positions - sliding_window
    return jnp.where(seen, s, -jnp.inf)


def _consume(refs, scratch, *, blocks, group, head_dim, dtype, options, with_lse):
    """Walks a worker's share: the computing warpgroups."""
    q_ref, _, records, _, counters, sinks_ref, out_ref, lse_ref, part_ref, part_lse_ref = refs
    q_smem, k_smem, v_smem, flags, k_full, v_full, k_freed, v_freed = scratch
    me, block = lax.axis_index("wg"), lax.axis_index("block")
    worker = me * blocks.num_blocks + block
    bkv, stages, rows = blocks.block_kv, blocks.stages, plan.TILE_ROWS
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    scale, cap, window = options.scale * _LOG2E, options.soft_cap, options.sliding_window
    following, count = records[worker, plan.FOLLOWING], records[worker, plan.COUNT]

    @pl.when(me == 0)
    def _():
        zero_padding(out_ref, lse_ref, records[worker, plan.LIVE_TOKENS], block, num_blocks=blocks.num_blocks)

    def fetch(i):
        """The i-th piece's record and queries."""
        at = jnp.where(i == 0, worker, following + i - 1)
        record = [records[at, field] for field in _CONSUMER_FIELDS]
        q = load_queries(q_ref, record[1], record[0], record[2] * group, group=group, head_dim=head_dim, dtype=dtype)
        return record, q

    def piece(i, carry):
        step, (record, q) = carry
        head, token, num_tokens, position, kv_start, num_blocks, slot, pieces, first_worker = record
        live_rows = num_tokens * group
        q_smem[me] = q
        plgpu.commit_smem()

        def issue_scores(s_ref, step):
            stage = lax.rem(step, stages)
            plgpu.barrier_wait(k_full.at[me * stages + stage])
            plgpu.wgmma(s_ref, q_smem.at[me], k_smem.at[me, stage].T)

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
            s = lax.cond(masked, lambda x: _mask(x, position, kv, group=group, sliding_window=window), lambda x: x, s)
            new_top = jnp.maximum(top, s.max(axis=1))
            decay = jnp.exp2(top - new_top)
            p = jnp.exp2(s - lax.broadcast_in_dim(new_top, s.shape, [0]))
            total = total * decay + p.sum(axis=1)
            acc *= lax.broadcast_in_dim(decay, acc.shape, [0])
            p = p.astype(dtype)
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
                v = plgpu.load(v_smem.at[me, stage], layout=plgpu.Layout.WGMMA)
                at_kv = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA) + kv
                seen = at_kv < position + num_tokens
                if window is not None:
                    seen &= at_kv > position - window
                v_smem[me, stage] = jnp.where(seen, v, jnp.zeros_like(v))
                plgpu.commit_smem()

            acc = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, p, v_smem.at[me, stage]))(plgpu.ACC.init(acc))
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

            return pl.run_scoped(overlapped, plgpu.ACC((rows, bkv), jnp.float32))

        s = pl.run_scoped(first_scores, plgpu.ACC((rows, bkv), jnp.float32))
        plgpu.barrier_arrive(k_freed.at[me * stages + lax.rem(step, stages)])
        acc = plgpu.layout_cast(jnp.zeros((rows, head_dim), jnp.float32), plgpu.Layout.WGMMA)
        top = plgpu.layout_cast(jnp.full((rows,), _LOWEST, jnp.float32), row_layout)
        total = plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), row_layout)
        last = num_blocks - 1
        s, acc, top, total = lax.fori_loop(0, last, kv_block, (s, acc, top, total))
        following_piece = fetch(jnp.minimum(i + 1, count - 1))  # arrives while the last block is computed
        acc, top, total = attend_to(s, kv_start + last * bkv, step + last, acc, top, total)

        @pl.when(pieces == 1)
        def _():
            whole_top, whole = top, total
            if sinks_ref is not None:
                sinks = load_sinks(sinks_ref, head, group=group) * _LOG2E
                whole_top = jnp.maximum(top, sinks)
                whole = total * jnp.exp2(top - whole_top) + jnp.exp2(sinks - whole_top)
            factor = jnp.exp2(top - whole_top) / whole
            lse = (whole_top + jnp.log2(whole)) * (1 / _LOG2E) if with_lse else None
            out = acc * lax.broadcast_in_dim(factor, acc.shape, [0])
            store_rows(out_ref, lse_ref, token, head, live_rows, out, lse, group=group)

        @pl.when(pieces > 1)
        def _():
            # A piece may show nothing to some of its rows: then total is 0, and its log -inf.
            factor = 1.0 / jnp.maximum(total, 1e-30)
            out = acc * lax.broadcast_in_dim(factor, acc.shape, [0])
            store_partial(part_ref, part_lse_ref, slot, live_rows, out, top + jnp.log2(total))
            join_pieces(
                (part_ref, part_lse_ref, counters, flags.at[me], out_ref, lse_ref, sinks_ref),
                (token, head, live_rows, pieces, first_worker),
                group=group,
                head_dim=head_dim,
            )

        return step + num_blocks, following_piece

    @pl.when(count > 0)
    def _():
        lax.fori_loop(0, count, piece, (jnp.int32(0), fetch(jnp.int32(0))))


def _produce(refs, scratch, *, blocks, page_size):
    """Loads a worker's share: one warp a consumer."""
    _, pages, records, page_table, *_ = refs
    k_smem, v_smem, _, k_full, v_full, k_freed, v_freed = scratch
    bkv, stages = blocks.block_kv, blocks.stages
    box = math.gcd(page_size, bkv)

    # With two consumers or fewer, K and V have a warp each.
    kinds = 2 if 2 * blocks.consumers <= _WARPS else 1

    def load(consumer, smem, full, freed, which):
        worker = consumer * blocks.num_blocks + lax.axis_index("block")
        following, count = records[worker, plan.FOLLOWING], records[worker, plan.COUNT]

        def piece(i, step):
            at = jnp.where(i == 0, worker, following + i - 1)
            head, row, last_page = (records[at, f] for f in (plan.HEAD, plan.ROW, plan.LAST_PAGE))
            kv_start, num_blocks = records[at, plan.KV_START], records[at, plan.NUM_BLOCKS]

            def kv_block(j, step):
                stage = lax.rem(step, stages)
                ring = consumer * stages + stage
                boxes = []
                for n in range(bkv // box):
                    kv = kv_start + (j * bkv + n * box)
                    column = lax.div(kv, page_size)
                    slots = slice(None) if box == page_size else pl.ds(kv - column * page_size, box)
                    boxes.append((page_table[row, jnp.minimum(column, last_page)], slots))

                @pl.when(step >= stages)
                def _():
                    for k_or_v in which:
                        plgpu.barrier_wait(freed[k_or_v].at[ring])

                for k_or_v in which:
                    for n, (page, slots) in enumerate(boxes):
                        plgpu.copy_gmem_to_smem(
                            pages.at[page, slots, 2 * head + k_or_v],
                            smem[k_or_v].at[consumer, stage, pl.ds(n * box, box)],
                            full[k_or_v].at[ring],
                        )
                return step + 1

            return lax.fori_loop(0, num_blocks, kv_block, step)

        lax.fori_loop(0, count, piece, jnp.int32(0))

    def warp(index):
        for kind in range(kinds):
            first = kind * blocks.consumers

            @pl.when((index >= first) & (index < first + blocks.consumers))
            def _(kind=kind, first=first):
                which = (0, 1) if kinds == 1 else (kind,)
                load(index - first, (k_smem, v_smem), (k_full, v_full), (k_freed, v_freed), which)

    plgpu.warp_map(warp)


@functools.partial(jax.jit, static_argnames=("tokens", "narrow", "page_size", "blocks", "options", "with_lse"))
def attend(q, pages, records, page_table, counters, sinks, *, tokens, narrow, page_size, blocks, options, with_lse):
    """The kernel call of `paged_attention_gpu`; jitted, so that equal layers are lowered once."""
    num_tokens, heads, head_dim = q.shape
    group = heads // (pages.shape[2] // 2)
    tile_rows = tokens * group
    columns = -(-tile_rows // 8) * 8
    box = math.gcd(page_size, blocks.block_kv)
    has = (True, True, True, True, True, sinks is not None)

    def body(*args):
        args = list(args)
        refs = [args.pop(0) if here else None for here in has]
        refs.append(args.pop(0))
        refs.append(args.pop(0) if with_lse else None)
        refs += [args.pop(0), args.pop(0)]
        scratch = args
        wg = lax.axis_index("wg")

        @pl.when(wg < blocks.consumers)
        def _():
            plgpu.set_max_registers(_consumer_registers(blocks.consumers), action="increase")
            consume = functools.partial(swapped_gpu.consume, n=columns, transforms=transforms) if narrow else _consume
            consume(
                refs,
                scratch,
                blocks=blocks,
                group=group,
                head_dim=head_dim,
                dtype=q.dtype,
                options=options,
                with_lse=with_lse,
            )

        @pl.when(wg == blocks.consumers)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            _produce(refs, scratch[-7:], blocks=blocks, page_size=page_size)

    tile = (blocks.consumers, blocks.stages, blocks.block_kv, head_dim)
    transforms = (
        plgpu.TilingTransform((8, blocks.swizzle // q.dtype.itemsize)),
        plgpu.SwizzleTransform(blocks.swizzle),
    )
    rings = blocks.consumers * blocks.stages
    full = plgpu.Barrier(num_arrivals=blocks.block_kv // box, num_barriers=rings)
    freed = plgpu.Barrier(num_arrivals=1, num_barriers=rings)
    out_type = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if with_lse:
        out_type.append(jax.ShapeDtypeStruct((num_tokens, heads), jnp.float32))
    out_type += [
        jax.ShapeDtypeStruct((2 * blocks.num_workers, tile_rows, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((2 * blocks.num_workers, tile_rows), jnp.float32),
    ]
    own = [plgpu.SMEM((blocks.consumers, columns if narrow else plan.TILE_ROWS, head_dim), q.dtype, transforms=transforms)]
    if narrow:
        own.append(plgpu.SMEM((blocks.consumers, columns, blocks.block_kv), q.dtype, transforms=transforms))
        own.append(plgpu.SMEM((blocks.consumers, _WARPS, columns), jnp.float32))
    call = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[
            *own,
            plgpu.SMEM(tile, q.dtype, transforms=transforms),
            plgpu.SMEM(tile, q.dtype, transforms=transforms),
            plgpu.SMEM((blocks.consumers, 1), jnp.int32),
            full,
            full,
            freed,
            freed,
        ],
        grid=(blocks.num_blocks,),
        grid_names=("block",),
        num_threads=blocks.consumers + 1,
        thread_name="wg",
        kernel_name="paged_attention_decode",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=128,  # none is used: a row is reduced within four threads
            lowering_semantics=mgpu.LoweringSemantics.Lane,
        ),
    )
    operands = [q, pages, records, page_table, counters, sinks]
    results = call(*[x for x in operands if x is not None])
    return results[0], results[1] if with_lse else None


def _consumer_registers(consumers: int) -> int:
    return {1: 240, 2: 232, 3: 152}[consumers]


def paged_attention_gpu(
    q: Float[Array, "T Hq D"],
    kv_pages: KVPages,
    meta: PagedMetadata,
    sinks: Float32[Array, " Hq"] | None,
    options: AttentionOptions,
    with_lse: bool,
) -> tuple[Float[Array, "T Hq D"], Float32[Array, "T Hq"] | None]:
    """The Mosaic GPU implementation of `paged_attention`; `meta.work` must be a `GPUWork`."""
    spec, work = kv_pages.spec, meta.work
    num_tokens, _, head_dim = q.shape
    group = q.shape[1] // spec.num_kv_heads
    # No more tokens than rows: a decode step. Its tiles are narrow, which is faster for one token a row.
    narrow = num_tokens <= meta.kv_lens.shape[0] and head_dim % 64 == 0
    tokens = plan.tile_tokens(group, num_tokens, narrow)
    with jax.named_scope("paged_attention"):
        records = plan.make_work_list(
            meta,
            work.q_lens,
            page_size=spec.page_size,
            num_kv_heads=spec.num_kv_heads,
            tokens=tokens,
            sliding_window=options.sliding_window,
            block_kv=work.blocks.block_kv,
            num_workers=work.blocks.num_workers,
            min_share=work.blocks.min_share,
        )
        return attend(
            q,
            kv_pages.data,
            records,
            meta.page_table,
            work.counters,
            sinks,
            tokens=tokens,
            narrow=narrow,
            page_size=spec.page_size,
            blocks=work.blocks,
            options=options,
            with_lse=with_lse,
        )
