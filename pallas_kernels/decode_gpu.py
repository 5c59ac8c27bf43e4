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

from . import gpu_plan as plan
from .consumer_gpu import Call, Refs, Tiles, consume
from .narrow_gpu import narrow_kind
from .tuning import GPUBlocks
from .wide_gpu import wide_kind

_WARPS = 4  # of a warpgroup
_REGISTERS = {1: 240, 2: 232}  # of a consumer's thread, by consumers of a block
_LOADING_REGISTERS = 40


def _produce(refs: Refs, tiles: Tiles, blocks: GPUBlocks, page_size: int) -> None:
    """Loads the shares of this block's workers: K and V by a warp each, or one warp for both."""
    pages, records, page_table = refs.pages, refs.records, refs.page_table
    bkv, stages = blocks.block_kv, blocks.stages
    box = math.gcd(page_size, bkv)

    # With two consumers or fewer, K and V have a warp each.
    kinds = 2 if 2 * blocks.consumers <= _WARPS else 1

    smem, full, freed = (tiles.k, tiles.v), (tiles.k_full, tiles.v_full), (tiles.k_freed, tiles.v_freed)

    def load(consumer, which):
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
                load(index - first, which)

    plgpu.warp_map(warp)


@functools.partial(jax.jit, static_argnames=("tokens", "narrow", "page_size", "blocks", "options", "with_lse"))
def attend(q, pages, records, page_table, counters, sinks, *, tokens, narrow, page_size, blocks, options, with_lse):
    """The kernel call of `paged_attention_gpu`; jitted, so that equal layers are lowered once."""
    num_tokens, heads, head_dim = q.shape
    group = heads // (pages.shape[2] // 2)
    tile_rows = tokens * group
    box = math.gcd(page_size, blocks.block_kv)
    transforms = (
        plgpu.TilingTransform((8, blocks.swizzle // q.dtype.itemsize)),
        plgpu.SwizzleTransform(blocks.swizzle),
    )
    kernel = Call(
        group=group,
        head_dim=head_dim,
        dtype=q.dtype,
        rows=-(-tile_rows // 8) * 8 if narrow else plan.TILE_ROWS,
        transforms=transforms,
        blocks=blocks,
        options=options,
        with_lse=with_lse,
    )
    own = [plgpu.SMEM((blocks.consumers, kernel.rows, head_dim), q.dtype, transforms=transforms)]
    if narrow:
        own.append(plgpu.SMEM((blocks.consumers, kernel.rows, blocks.block_kv), q.dtype, transforms=transforms))
        own.append(plgpu.SMEM((blocks.consumers, _WARPS, kernel.rows), jnp.float32))

    def body(*args):
        args = iter(args)
        refs = Refs(
            q=next(args),
            pages=next(args),
            records=next(args),
            page_table=next(args),
            counters=next(args),
            sinks=None if sinks is None else next(args),
            out=next(args),
            lse=next(args) if with_lse else None,
            part=next(args),
            part_lse=next(args),
        )
        tiles = Tiles(tuple(next(args) for _ in own), *args)
        wg = lax.axis_index("wg")

        @pl.when(wg < blocks.consumers)
        def _():
            plgpu.set_max_registers(_REGISTERS[blocks.consumers], action="increase")
            consume(kernel, refs, tiles, (narrow_kind if narrow else wide_kind)(kernel, refs, tiles))

        @pl.when(wg == blocks.consumers)
        def _():
            plgpu.set_max_registers(_LOADING_REGISTERS, action="decrease")
            _produce(refs, tiles, blocks, page_size)

    tile = (blocks.consumers, blocks.stages, blocks.block_kv, head_dim)
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
