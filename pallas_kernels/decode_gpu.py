"""Paged attention for Hopper in Pallas Mosaic GPU: one launch, split over the KV, results joined on the way out.

A block of threads holds `consumers` warpgroups that compute and one warpgroup whose warps load, a warp a consumer:

    loading warp   record -> page ids -> one TMA box a page -> ring of `stages` tiles of K and V in shared memory
    consumer       record -> queries -> [ wait | S = Q K^T | running softmax | O += P V | free the stage ]*
                   -> a whole unit: output; a piece of one: partial results, and who finishes last joins all pieces

The query heads of a KV head, and several query tokens, are the query rows of one tile, so every K and V is read once a
tile: as many rows as there are along the narrow side of a matrix instruction in decode steps and over 8-bit pages, else
64 along the other (`consumer_gpu` names the kinds). Work is cut by `gpu_plan`; scores are base-2 logarithms, so that
the exponential is one instruction. A prefix of pages that several rows have in common is read once for all of them
(`shared_prefix_gpu`).

Reference:
  Shah et al., FlashAttention-3, https://arxiv.org/abs/2407.08608 (warp specialisation); Dao et al., Flash-Decoding,
  https://pytorch.org/blog/flash-decoding/ (splitting over the KV).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import gpu_plan as plan
from .consumer_gpu import Call, Refs, Tiles, consume, record_at, shared_part
from .convert_gpu import page_transforms
from .narrow_gpu import WEIGHT_TRANSFORMS, narrow_kind
from .prefix_join_gpu import joining_kind
from .quantized_gpu import quantized_kind
from .read_once_gpu import copy_once
from .shared_prefix_gpu import NOTES, shared_kind
from .tuning import fit_stages, scale_box
from .wide_gpu import wide_kind

_WARPS = 4  # of a warpgroup
_REGISTERS = {1: 240, 2: 232, 3: 152, 4: 104}  # of a consumer's thread, by consumers of a block
_LOADING_REGISTERS = 40


def copies_of_scales(box: int, page_size: int) -> list[tuple[int, int, int]]:
    """The copies of scales that a box of K needs: first scale from the box's first, where to, and how many."""
    width, values_at = scale_box(box, page_size)
    return [(0, 0, width)] if box == page_size else [(0, 0, values_at), (page_size, values_at, values_at)]


def _produce(call: Call, refs: Refs, tiles: Tiles) -> None:
    """Loads the shares of this block's workers, a warp each."""
    pages, records, page_table = refs.pages, refs.records, refs.page_table
    blocks, page_size, box = call.blocks, call.page_size, call.box
    bkv, stages = blocks.block_kv, blocks.stages
    boxes = range(bkv // box)
    # Where rows have several query tokens, their tiles read a page one after the other.
    copy = copy_once if refs.q.shape[0] <= page_table.shape[0] else plgpu.copy_gmem_to_smem

    def load(consumer):
        worker = consumer * blocks.num_blocks + lax.axis_index("block")
        following, count = records[worker, plan.FOLLOWING], records[worker, plan.COUNT]
        first_pages = None
        if refs.first_pages is not None:  # asked for together with the record that the page table would wait for
            first_pages = tuple(refs.first_pages[worker, n] for n in boxes)

        def piece(at, step, is_first=None):
            head, row, position = (records[at, f] for f in (plan.HEAD, plan.ROW, plan.POSITION))
            kv_start, num_blocks = records[at, plan.KV_START], records[at, plan.NUM_BLOCKS]
            last_page = lax.div(position + records[at, plan.NUM_TOKENS] - 1, page_size)
            last_page = jnp.minimum(last_page, page_table.shape[1] - 1)  # whatever kv_lens says

            def pages_of(j):
                columns = [lax.div(kv_start + (j * bkv + n * box), page_size) for n in boxes]
                return tuple(page_table[row, jnp.minimum(column, last_page)] for column in columns)

            def kv_block(j, carry):
                step, ids = carry
                stage = lax.rem(step, stages)
                ring = consumer * stages + stage

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(tiles.freed.at[ring])

                for n in boxes:
                    first_slot = lax.rem(kv_start + (j * bkv + n * box), page_size)
                    if call.quantized:
                        first = 2 * page_size * head + (0 if box == page_size else first_slot)
                        for skip, to, count in copies_of_scales(box, page_size):
                            copy(
                                refs.scales.at[ids[n], pl.ds(first + skip, count)],
                                tiles.own[-1].at[consumer, stage, n, pl.ds(to, count)],
                                tiles.full.at[ring],
                            )
                    copy(
                        pages.at[ids[n], slice(None) if box == page_size else pl.ds(first_slot, box), head],
                        tiles.kv.at[consumer, stage, pl.ds(n * box, box)],
                        tiles.full.at[ring],
                    )
                return step + 1, pages_of(j + 1)  # comes while the next stage is waited for

            ids = pages_of(0) if is_first is None else lax.cond(is_first, lambda: first_pages, lambda: pages_of(0))
            return lax.fori_loop(0, num_blocks, kv_block, (step, ids))[0]

        def walk_shared(record, following, count, step):
            return lax.fori_loop(0, count, lambda i, step: piece(record_at(record, following, i), step), step)

        def walk(i, step):
            return piece(record_at(worker, following, i), step, None if first_pages is None else i == 0)

        step = jnp.int32(0)
        if call.sharing:
            step = walk_shared(*shared_part(call, records, worker), step)
        lax.fori_loop(0, count, walk, step)

    def warp(index):
        pl.when(index < blocks.consumers)(lambda: load(index))

    plgpu.warp_map(warp)


@functools.partial(jax.jit, static_argnames=("tokens", "narrow", "page_size", "blocks", "options", "with_lse"))
def attend(
    q,
    pages,
    records,
    page_table,
    counters,
    sinks,
    *,
    tokens,
    narrow,
    page_size,
    blocks,
    options,
    with_lse,
    scales=None,
    first_pages=None,
):
    """The kernel call of `paged_attention_gpu`; jitted, so that equal layers are lowered once.

    Args:
      q: [T, Hq, D].
      pages: `KVPages.data`, K and V of a head side by side: [pages, page_size, 2 * Hkv, D].
      records: i32[R, F], of `gpu_plan.make_work_list`.
      page_table: i32[S, P], `GPUWork`'s.
      counters: i32[W], zeros, and zeros again afterwards.
      sinks: f32[Hq], or `None`.
      tokens: query tokens of a tile.
      narrow: whether query rows lie along N, as over 8-bit pages they always do.
      scales: of 8-bit pages.
      first_pages: i32[W, B], of `attention_gpu.find_first_pages`; `None`: read from the page table.

    Returns:
      outputs [T, Hq, D], and log-sum-exps f32[T, Hq] or `None`.

    Raises:
      NotImplementedError: shared memory has no room for two stages of such tiles.
    """
    num_tokens, heads, head_dim = q.shape
    num_kv_heads = pages.shape[2] // 2
    group = heads // num_kv_heads
    quantized = scales is not None
    sharing = plan.may_share(
        counters.shape[0], blocks, page_table.shape[0], num_kv_heads, group, options.sliding_window
    )
    partial = plan.PartialRows(
        blocks.num_workers, tokens * group, group, page_table.shape[0] if sharing else 0, num_kv_heads
    )
    rows = -(-partial.tile_rows // 8) * 8 if narrow or quantized else plan.TILE_ROWS
    swapped = (narrow or quantized) and not sharing  # the tile of shared units has room for narrow ones
    own_rows = plan.TILE_ROWS if sharing else rows
    fitting = fit_stages(head_dim, pages.dtype.itemsize, page_size, blocks.consumers, own_rows, swapped=swapped)
    if fitting < 2:  # the scores of a block are asked for before the block ahead of it is given back: it would hang
        raise NotImplementedError(
            f"{blocks.consumers} consumers with tiles of {own_rows} rows have room for {fitting} stages, of 2 that are "
            "needed; say at plan_attention how many query heads there are (layers=)"
        )
    blocks = dataclasses.replace(blocks, stages=min(blocks.stages, fitting))
    transforms = (
        plgpu.TilingTransform((8, blocks.swizzle // q.dtype.itemsize)),
        plgpu.SwizzleTransform(blocks.swizzle),
    )
    kernel = Call(
        group=group,
        head_dim=head_dim,
        dtype=q.dtype,
        page_dtype=pages.dtype,
        rows=rows,
        transforms=transforms,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        sharing=sharing,
        partial=partial,
        blocks=blocks,
        options=options,
        with_lse=with_lse,
    )
    box, dtype = kernel.box, jnp.float16 if quantized else q.dtype
    own = [plgpu.SMEM((blocks.consumers, own_rows, head_dim), dtype, transforms=transforms)]
    if swapped:
        own.append(plgpu.SMEM((blocks.consumers, kernel.rows, blocks.block_kv), dtype, transforms=WEIGHT_TRANSFORMS))
    if narrow or quantized:
        own.append(plgpu.SMEM((blocks.consumers, _WARPS, kernel.rows), jnp.float32))
    if quantized:
        shape = blocks.consumers, blocks.stages, blocks.block_kv // box, scale_box(box, page_size)[0]
        own.append(plgpu.SMEM(shape, jnp.float32))
    kind = quantized_kind if quantized else narrow_kind if narrow else wide_kind

    def body(*args):
        args = iter(args)
        refs = Refs(
            q=next(args),
            pages=next(args),
            scales=next(args) if quantized else None,
            records=next(args),
            page_table=next(args),
            counters=next(args),
            first_pages=None if first_pages is None else next(args),
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
            own, shared = kind(kernel, refs, tiles), None
            if sharing:
                shared = shared_kind(kernel, refs, tiles)
                own = joining_kind(own, kernel, refs, tiles) if narrow else own
            consume(kernel, refs, tiles, own, shared)

        @pl.when(wg == blocks.consumers)
        def _():
            plgpu.set_max_registers(_LOADING_REGISTERS, action="decrease")
            _produce(kernel, refs, tiles)

    rings = blocks.consumers * blocks.stages
    copies = blocks.block_kv // box * (1 + len(copies_of_scales(box, page_size)) if quantized else 1)
    tile = plgpu.SMEM(
        (blocks.consumers, blocks.stages, blocks.block_kv, 2 * head_dim),
        pages.dtype,
        transforms=page_transforms(head_dim) if quantized else transforms,
    )
    pages = pages.reshape(*pages.shape[:2], num_kv_heads, 2 * head_dim)  # K and V of a head are one row
    out_type = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if with_lse:
        out_type.append(jax.ShapeDtypeStruct((num_tokens, heads), jnp.float32))
    out_type += [
        jax.ShapeDtypeStruct((partial.total, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((partial.total,), jnp.float32),
    ]
    call = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[
            *own,
            tile,
            plgpu.SMEM((blocks.consumers, NOTES * plan.members_of_a_tile(group) if sharing else 1), jnp.int32),
            plgpu.Barrier(num_arrivals=copies, num_barriers=rings),
            plgpu.Barrier(num_arrivals=1, num_barriers=rings),
        ],
        grid=(blocks.num_blocks,),
        grid_names=("block",),
        num_threads=blocks.consumers + 1,
        thread_name="wg",
        kernel_name="paged_attention_decode",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,  # within four threads, or by shared memory of the kind's own
            lowering_semantics=mgpu.LoweringSemantics.Lane,
        ),
    )
    operands = [q, pages, scales, records, page_table, counters, first_pages, sinks]
    results = call(*[x for x in operands if x is not None])
    return results[0], results[1] if with_lse else None
