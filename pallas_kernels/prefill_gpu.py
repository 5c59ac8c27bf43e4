"""Prefill over pages for Hopper in Pallas Mosaic GPU: warpgroups share K and V tiles and take turns at the products.

A block of threads stays for the whole launch and takes units off a common list (`prefill_plan_gpu`). It holds
`consumers` warpgroups that compute, 64 query rows each, and one whose warps load and count:

    warp 0, 1      K, V: unit -> page ids -> one TMA box a page -> ring of `stages` tiles, which all consumers read
                   (of 8-bit pages, a ring that one more warpgroup converts: `prefill_convert_gpu`)
    warp 2         takes the next unit and puts its number where the others look
    consumer       queries -> S of the last block -> for each block before it:
                       S of this block, O += P V of the block after it | softmax of this block
                   -> O += P V of the first block; next queries under way -> output

Blocks are walked from the last, which needs the causal mask, to the first; the loop over those that need no mask has no
code for one. Consumers issue their products in turns, so that the softmax of one runs under the products of the other.

Reference:
  Shah et al., FlashAttention-3, https://arxiv.org/abs/2407.08608.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import prefill_barriers_gpu as sync
from . import prefill_plan_gpu as plan
from .prefill_consumer_gpu import UNITS_AHEAD as _UNITS_AHEAD
from .prefill_consumer_gpu import Call, RawTiles, Refs, Tiles, consume, read_blocks, take_unit
from .prefill_convert_gpu import VALUE_DTYPE, convert
from .prefill_tuning_gpu import PrefillBlocks, tile_tokens
from .tuning import TILE_ROWS

_WARPS = 4  # of a warpgroup
# Of a thread of a consumer, of the loading and of the converting warpgroup, by consumers of a block.
_REGISTERS = {2: (240, 24), 3: (160, 32)}
_REGISTERS_AND_CONVERTING = {2: (208, 24, 72), 3: (128, 24, 72)}


def _load(refs: Refs, tiles: Tiles, blocks: PrefillBlocks, transforms, page_size: int, k_or_v: int) -> None:
    """The K warp and the V warp: the blocks of each unit from the last to the first.

    The record of the next unit is read before it is needed.
    """
    pages, records, page_table = refs.pages, refs.records, refs.page_table
    bkv = blocks.block_kv
    num_units = records[0, plan.NUM_UNITS]
    to, stages, swizzle = tiles, blocks.stages, blocks.swizzle
    if tiles.raw is not None:
        to, stages, swizzle, transforms = tiles.raw, blocks.raw_stages, None, ()
    smem, full, freed = ((to.k, to.k_full, to.k_freed), (to.v, to.v_full, to.v_freed))[k_or_v]

    def unit_blocks(state):
        i, _, step, head, row, last_page, kv_start, num_blocks = state
        next_unit = take_unit(tiles, i + 1)
        following = read_blocks(records, next_unit, num_units)

        def kv_block(j, step):
            stage = lax.rem(step, stages)
            first, ids = kv_start + (num_blocks - 1 - j) * bkv, []
            for n in range(plan.most_pages(bkv, page_size)):
                kv = first + n * page_size
                ids.append(page_table[row, jnp.minimum(lax.div(kv, page_size), last_page)])

            @pl.when(step >= stages)
            def _():
                sync.wait(freed, stage, lax.div(step, stages) - 1)

            sync.load_tile(
                pages,
                smem.at[stage],
                full,
                stage,
                2 * head + k_or_v,
                ids,
                None if bkv % page_size == 0 else lax.rem(first, page_size),
                page_size=page_size,
                transforms=transforms,
                swizzle=swizzle,
            )
            return step + 1

        step = lax.fori_loop(0, num_blocks, kv_block, step)
        return i + 1, next_unit, step, *following

    first = take_unit(tiles, jnp.int32(0))

    @pl.when(first < num_units)
    def _():
        state = jnp.int32(0), first, jnp.int32(0), *read_blocks(records, first, num_units)
        lax.while_loop(lambda state: state[1] < num_units, unit_blocks, state)


def _count(refs: Refs, tiles: Tiles, blocks: PrefillBlocks) -> None:
    """The counting warp: one unit after the other, until the list is at its end."""
    num_units = refs.records[0, plan.NUM_UNITS]
    last = num_units + blocks.num_blocks - 1

    def take(state):
        i, _ = state
        slot = lax.rem(i, _UNITS_AHEAD)

        @pl.when(i >= _UNITS_AHEAD)
        def _():
            sync.wait(tiles.unit_freed, slot, lax.div(i, _UNITS_AHEAD) - 1)

        unit = sync.count_unit(refs.counters, tiles.units, slot, last)
        sync.arrive(tiles.unit_full, slot)
        return i + 1, unit

    lax.while_loop(lambda state: state[1] < num_units, take, (jnp.int32(0), jnp.int32(-1)))


@functools.partial(jax.jit, static_argnames=("page_size", "blocks", "options"))
def prefill(
    q,
    pages,
    records,
    page_table,
    counters,
    sinks,
    out,
    lse,
    *,
    page_size: int,
    blocks: PrefillBlocks,
    options,
    scales=None,
):
    """Attention of the units in `records`; their tokens' rows of `out` and of `lse` (or `None`) are replaced."""
    _, heads, head_dim = q.shape
    quantized = scales is not None
    group = heads // (pages.shape[2] // 2)
    transforms = (
        plgpu.TilingTransform((8, blocks.swizzle // q.dtype.itemsize)),
        plgpu.SwizzleTransform(blocks.swizzle),
    )
    with_lse, with_sinks = lse is not None, sinks is not None
    call = Call(
        group=group,
        tokens=tile_tokens(group),
        head_dim=head_dim,
        dtype=q.dtype,
        value_dtype=jnp.dtype(VALUE_DTYPE) if quantized else q.dtype,
        page_dtype=pages.dtype,
        transforms=transforms,
        blocks=blocks,
        options=options,
        with_lse=with_lse,
    )

    def body(*args):
        args = iter(args)
        refs = Refs(
            q=next(args),
            pages=next(args),
            scales=next(args) if quantized else None,
            records=next(args),
            page_table=next(args),
            counters=next(args),
            sinks=next(args) if with_sinks else None,
            out=next(args),
            lse=next(args) if with_lse else None,
        )
        shared = [next(args) for _ in range(10)]
        scales_smem = next(args) if quantized else None
        raw = RawTiles(*args) if quantized else None
        tiles = Tiles(*shared, scales=scales_smem, raw=raw)
        wg = lax.axis_index("wg")
        # Of converted tiles each warp says that its part is there; else one thread expects all bytes.
        filling, taking = (_WARPS, _WARPS) if quantized else (1, 0)
        barriers = [
            (tiles.k_full, blocks.stages, filling),
            (tiles.v_full, blocks.stages, filling),
            (tiles.k_freed, blocks.stages, _WARPS * blocks.consumers),
            (tiles.v_freed, blocks.stages, _WARPS * blocks.consumers),
            (tiles.unit_full, _UNITS_AHEAD, 1),
            (tiles.unit_freed, _UNITS_AHEAD, _WARPS * blocks.consumers + 2 + taking),
        ]
        if raw is not None:
            barriers += [(full, blocks.raw_stages, 1) for full in (raw.k_full, raw.v_full)]
            barriers += [(freed, blocks.raw_stages, _WARPS) for freed in (raw.k_freed, raw.v_freed)]
        sync.initialise(barriers)

        consumer_registers, loading_registers, *converting_registers = registers

        @pl.when(wg < blocks.consumers)
        def _():
            plgpu.set_max_registers(consumer_registers, action="increase")
            consume(call, refs, tiles)

        @pl.when(wg == blocks.consumers)
        def _():
            plgpu.set_max_registers(loading_registers, action="decrease")

            def warp(index):
                for k_or_v in range(2):

                    @pl.when(index == k_or_v)
                    def _(k_or_v=k_or_v):
                        _load(refs, tiles, blocks, transforms, page_size, k_or_v)

                @pl.when(index == 2)
                def _():
                    _count(refs, tiles, blocks)

            plgpu.warp_map(warp)

        if quantized:

            @pl.when(wg == blocks.consumers + 1)
            def _():
                plgpu.set_max_registers(converting_registers[0], action="decrease")
                convert(call, refs, tiles, page_size)

    registers = (_REGISTERS_AND_CONVERTING if quantized else _REGISTERS)[blocks.consumers]
    tile_shape, ring = (blocks.block_kv, head_dim), sync.barriers(blocks.stages)
    ahead = sync.barriers(_UNITS_AHEAD)
    of_raw = []
    if quantized:
        raw_tile = plgpu.SMEM((blocks.raw_stages, *tile_shape), pages.dtype)
        of_raw = [plgpu.SMEM((blocks.stages + 1, 2 * blocks.block_kv), jnp.float32), raw_tile, raw_tile]
        of_raw += [sync.barriers(blocks.raw_stages)] * 4
    call_kernel = plgpu.kernel(
        body,
        out_type=(),
        scratch_types=[
            plgpu.SMEM((blocks.query_buffers, blocks.consumers, TILE_ROWS, head_dim), q.dtype, transforms=transforms),
            plgpu.SMEM((blocks.stages, *tile_shape), call.dtype, transforms=transforms),
            plgpu.SMEM((blocks.stages, *tile_shape), call.value_dtype, transforms=transforms),
            plgpu.SMEM((_UNITS_AHEAD,), jnp.int32),
            *[ring] * 4,
            *[ahead] * 2,
            *of_raw,
        ],
        grid=(blocks.num_blocks,),
        grid_names=("block",),
        num_threads=blocks.consumers + len(registers) - 1,
        thread_name="wg",
        kernel_name="paged_attention_prefill",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=128,  # none is used: a row is reduced within four threads
            lowering_semantics=mgpu.LoweringSemantics.Lane,
        ),
    )
    out_ref, lse_ref = jax.new_ref(out), None if lse is None else jax.new_ref(lse)
    operands = [q, pages, scales, records, page_table, counters, sinks, out_ref, lse_ref]
    call_kernel(*[x for x in operands if x is not None])
    return jax.freeze(out_ref), None if lse_ref is None else jax.freeze(lse_ref)
