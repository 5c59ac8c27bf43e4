"""Paged attention on TPUs, by Mosaic: one kernel for decode, prefill chunks and any mix of them.

    q [T, Hq, D] ─ pad heads ─► HBM ─ DMA ─► queries of an item ─┐
    pages ───────────────────── HBM ─ DMA ─► ring of KV blocks ──┼─► decode tiles, then prefill tiles ─ DMA ─► out
    page table ──────────────── HBM ─ DMA ─► ids (scalar memory) ┘

The grid is one step a core. A core walks its decode items, then its prefill items (tpu_plan), and everything that it
needs is fetched ahead of it (pipeline_tpu).

References:
  Jin et al., Ragged Paged Attention, https://arxiv.org/abs/2604.15464, whose one flat loop over ragged sequences this
  shares; Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from .compat import TPU, current_tpu
from .decode_tpu import DecodeTile
from .fit_tpu import KernelSpec, buffers, fit, vmem_limit
from .metadata import PagedMetadata
from .pages import KVPages
from .pipeline_tpu import IDS_AHEAD, Block, Fetch, Items, copy_tokens, walk
from .prefill_tpu import PrefillTile
from .softmax_tpu import Softmax
from .tpu_plan import COUNT, END, FIRST, NUM_FIELDS, POSITION, TOKEN, TPUWork, make_items
from .tpu_tuning import LANES, TABLE_CHUNK
from .xla import AttentionOptions


def _scratch(static: KernelSpec) -> dict[str, Any]:
    """Buffers and semaphores of a core, by name."""
    dma, slots = pltpu.SemaphoreType.DMA, static.blocks.buffers
    return {
        **{name: pltpu.VMEM(shape, dtype) for name, (shape, dtype) in buffers(static).items()},
        "ids": pltpu.SMEM((IDS_AHEAD, 1, TABLE_CHUNK), jnp.int32),
        "ids_sem": dma((IDS_AHEAD,)),
        "ring_sem": dma((slots,)),
        "scale_sem": dma((slots,)),
        "q_sem": dma((slots,)),
        "out_sem": dma((2,)),
        "lse_sem": dma((2,)),
    }


class _Outputs:
    """The way of results to HBM: an entry of the ring is written again once it has left."""

    def __init__(self, items: Items, rings: list[tuple[Any, Any, Any]], limit: int):
        self._items, self._rings, self._limit = items, rings, limit
        self.slots = rings[0][1].shape[0]

    def _copies(self, item: Any, slot: Any, op: str) -> None:
        token, count = self._items(TOKEN, item), self._items(COUNT, item)
        for hbm, ring, sem in self._rings:
            copy_tokens(hbm, token, ring.at[slot], count, sem.at[slot], limit=self._limit, out=True, op=op)

    def reserve(self, block: Block) -> Any:
        """The entry for an item's results, free to be written."""
        slot = lax.rem(block.ordinal, self.slots)

        @pl.when(block.ordinal >= self.slots)
        def _():
            self._copies(block.item - self.slots, slot, "wait")

        return slot

    def send(self, block: Block) -> None:
        self._copies(block.item, lax.rem(block.ordinal, self.slots), "start")

    def drain(self, begin: Any, end: Any) -> None:
        """Waits for the last items of [begin, end)."""
        for back in range(self.slots, 0, -1):

            @pl.when(end - begin >= back)
            def _(back=back):
                self._copies(end - back, lax.rem(end - begin - back, self.slots), "wait")


def _kernel(static: KernelSpec, *refs: Any) -> None:
    names = ["items", "bounds", "q", "table", "data"]
    names += ["scales"] if static.spec.quantized else []
    names += ["sink_scalars", "sink_rows"] if static.with_sinks else []
    names += ["out_hbm"] + (["lse_hbm"] if static.with_lse else [])
    inputs = dict(zip(names, refs, strict=False))
    scratch = dict(zip(_scratch(static), refs[len(names) :], strict=True))
    get, blocks, cores = scratch.get, static.blocks, static.blocks.cores
    items = Items(inputs["items"], inputs["items"].shape[0] // NUM_FIELDS)
    fetch = Fetch(
        spec=static.spec,
        blocks=blocks,
        sliding_window=static.options.sliding_window,
        chunks=static.chunks,
        items=items,
        table=inputs["table"],
        data=inputs["data"],
        scales=inputs.get("scales"),
        ids=scratch["ids"],
        ring=scratch["ring"],
        scale_ring=get("scale_ring"),
        ids_sem=scratch["ids_sem"],
        ring_sem=scratch["ring_sem"],
        scale_sem=scratch["scale_sem"],
    )
    bounds, core = inputs["bounds"], pl.program_id(0)

    def range_of(phase: int) -> tuple[Any, Any, Any]:
        first = phase * (cores + 1) + core
        return bounds[first], bounds[first + 1], bounds[2 * (cores + 1) + phase * cores + core]

    def outputs(kind: str, limit: int) -> _Outputs:
        rings = [(inputs["out_hbm"], scratch[kind + "out"], scratch["out_sem"])]
        if static.with_lse:
            rings.append((inputs["lse_hbm"], scratch[kind + "lse"], scratch["lse_sem"]))
        return _Outputs(items, rings, limit)

    def queries(ring: Any, limit: int):
        def copy(item, slot, op):
            token, count, sem = items(TOKEN, item), items(COUNT, item), scratch["q_sem"].at[slot]
            copy_tokens(inputs["q"], token, ring.at[slot], count, sem, limit=limit, out=False, op=op)

        return copy

    def run(phase: int, ring: Any, limit: int, out: _Outputs, start: Any, add: Any, finish: Any) -> None:
        begin, end, total = range_of(phase)
        fetch_queries = queries(ring, limit)

        def compute(block: Block) -> None:
            @pl.when(block.block == items(FIRST, block.item))
            def _():
                fetch_queries(block.item, block.q_slot, "wait")
                start(block)

            add(block)

            @pl.when(block.block + 1 == items(END, block.item))
            def _():
                finish(block, out.reserve(block))
                out.send(block)

        walk(fetch, begin, total, fetch_queries, compute)
        out.drain(begin, end)

    _run_decode(static, inputs, scratch, fetch, partial(run, 0, scratch["q"], 1, outputs("", 1)))
    if static.has_prefill:
        tiles = partial(run, 1, scratch["tile_q"], blocks.block_q, outputs("tile_", blocks.block_q))
        _run_prefill(static, inputs, scratch, fetch, tiles)


def _run_decode(static: KernelSpec, inputs: dict, scratch: dict, fetch: Fetch, run: Any) -> None:
    tile = DecodeTile(
        spec=static.spec,
        options=static.options,
        group=static.group,
        pages=static.blocks.pages,
        width=static.width,
        dtype=static.dtype,
        state=Softmax(scratch["top"], scratch["total"], scratch["acc"]),
    )
    ring, scale_ring, window = fetch.ring, fetch.scale_ring, static.options.sliding_window

    def start(block: Block) -> None:
        tile.state.start(..., inputs["sink_rows"][...] if static.with_sinks else None)

    def add(block: Block) -> None:
        position, offset = fetch.items(POSITION, block.item), block.block * fetch.block_kv
        q = scratch["q"][block.q_slot, 0].astype(static.dtype)
        begin = jnp.int32(0) if window is None else position - (window - 1) - offset
        stop = jnp.minimum(position + 1 - offset, fetch.block_kv)
        whole = (stop == fetch.block_kv) & (begin <= 0)

        @pl.when(whole)
        def _():
            tile.add_whole(q, ring, scale_ring, block.slot)

        @pl.when(jnp.logical_not(whole))
        def _():
            tile.add_part(q, ring, scale_ring, block.slot, begin, stop)

    def finish(block: Block, slot: Any) -> None:
        out, lse = tile.state.finish(...)
        scratch["out"][slot, 0] = out.astype(static.q_dtype)
        if static.with_lse:
            scratch["lse"][slot, 0] = lse

    run(start, add, finish)


def _prefill_tile(static: KernelSpec, scratch: dict, block_q: int) -> PrefillTile:
    """A tile of block_q tokens, in the first part of buffers that are made for the largest."""
    rows = pl.ds(0, static.group * block_q)
    return PrefillTile(
        spec=static.spec,
        options=static.options,
        group=static.group,
        heads=static.heads,
        block_q=block_q,
        block_k=static.blocks.block_k,
        width=static.width,
        dtype=static.dtype,
        q=scratch["heads_q"].at[:, rows],
        q_rows=scratch["q_rows"],
        kv_rows=scratch["kv_rows"],
        state=Softmax(*(scratch[name].at[:, rows] for name in ("tile_top", "tile_total", "tile_acc"))),
    )


def _run_prefill(static: KernelSpec, inputs: dict, scratch: dict, fetch: Fetch, run: Any) -> None:
    long, short = static.blocks.block_q, static.blocks.short_q
    ring, scale_ring, window = fetch.ring, fetch.scale_ring, static.options.sliding_window

    def with_tile(block: Block, use: Any) -> None:
        """`use(tile)` with the smallest tile that holds the item's tokens."""
        if not 0 < short < long:
            use(_prefill_tile(static, scratch, long))
            return
        is_short = fetch.items(COUNT, block.item) <= short
        for size in (short, long):

            @pl.when(is_short == (size == short))
            def _(size=size):
                use(_prefill_tile(static, scratch, size))

    def start(block: Block) -> None:
        def use(tile: PrefillTile) -> None:
            tile.start(scratch["tile_q"].at[block.q_slot, pl.ds(0, tile.block_q)], inputs.get("sink_scalars"))

        with_tile(block, use)

    def add(block: Block) -> None:
        position, count = fetch.items(POSITION, block.item), fetch.items(COUNT, block.item)
        offset, stop = block.block * fetch.block_kv, position + count
        whole = offset + fetch.block_kv <= position + 1
        if window is not None:
            whole &= offset > stop - 1 - window

        def use(tile: PrefillTile) -> None:
            if tile.block_q < long:  # waits for the memory in any case: masks cost it nothing, a second copy code
                tile.add(ring, scale_ring, block.slot, position, offset, stop, whole=False)
                return
            for kind in (True, False):

                @pl.when(whole == kind)
                def _(kind=kind):
                    tile.add(ring, scale_ring, block.slot, position, offset, stop, whole=kind)

        with_tile(block, use)

    def finish(block: Block, slot: Any) -> None:
        def use(tile: PrefillTile) -> None:
            tokens = pl.ds(0, tile.block_q)
            lse = scratch["tile_lse"].at[slot, tokens] if static.with_lse else None
            tile.finish(scratch["tile_out"].at[slot, tokens], lse)

        with_tile(block, use)

    run(start, add, finish)


@partial(jax.jit, static_argnames=("options", "with_lse", "chip", "interpret"))
def _attend(q, kv_pages: KVPages, meta: PagedMetadata, sinks, *, options, with_lse, chip: TPU, interpret):
    spec, work = kv_pages.spec, meta.work
    num_tokens, num_heads, head_dim = q.shape
    static = KernelSpec(
        spec=spec,
        blocks=work.blocks,
        options=options,
        num_heads=num_heads,
        num_rows=meta.kv_lens.shape[0],
        num_tokens=num_tokens,
        chunks=work.page_table.shape[0] // meta.kv_lens.shape[0],
        q_dtype=q.dtype,
        with_lse=with_lse,
        with_sinks=sinks is not None,
    )
    static = fit(static, chip)
    blocks = static.blocks
    items, bounds = make_items(
        meta, work.q_lens, blocks, page_size=spec.page_size, sliding_window=options.sliding_window
    )
    padded = jnp.pad(q, ((0, 0), (0, static.heads - num_heads), (0, static.width - head_dim)))
    hbm, vmem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.VMEM)
    inputs: list[Any] = [padded, work.page_table, kv_pages.data]
    specs = [hbm] * 3
    if kv_pages.scales is not None:
        inputs, specs = [*inputs, kv_pages.scales], [*specs, hbm]
    if sinks is not None:
        rows = jnp.broadcast_to(jnp.pad(sinks, (0, static.heads - num_heads))[:, None], (static.heads, LANES))
        inputs = [*inputs, sinks, rows]
        specs = [*specs, pl.BlockSpec(memory_space=pltpu.SMEM), vmem]
    shapes = [jax.ShapeDtypeStruct(padded.shape, q.dtype)]
    if with_lse:
        shapes.append(jax.ShapeDtypeStruct((num_tokens, static.heads, LANES), jnp.float32))
    scratch = _scratch(static)
    out, *lse = pl.pallas_call(
        partial(_kernel, static),
        out_shape=shapes,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(blocks.cores,),
            in_specs=specs,
            out_specs=[hbm] * len(shapes),
            scratch_shapes=list(scratch.values()),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel" if blocks.cores > 1 else "arbitrary",),
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
            vmem_limit_bytes=vmem_limit(chip),
        ),
        interpret=interpret,
        name=f"paged_attention_p{blocks.pages}x{spec.page_size}_q{blocks.block_q}",
    )(items, bounds, *inputs)
    live = jnp.arange(num_tokens, dtype=jnp.int32) < meta.cu_q_lens[-1]
    out = jnp.where(live[:, None, None], out[:, :num_heads, static.width - head_dim :], jnp.zeros((), q.dtype))
    return out, jnp.where(live[:, None], lse[0][:, :num_heads, 0], -jnp.inf) if with_lse else None


def paged_attention_tpu(
    q: Float[Array, "T Hq D"],
    kv_pages: KVPages,
    meta: PagedMetadata,
    sinks: Float32[Array, " Hq"] | None,
    options: AttentionOptions,
    with_lse: bool,
    interpret: Any = False,
) -> tuple[Float[Array, "T Hq D"], Float32[Array, "T Hq"] | None]:
    """The Mosaic TPU implementation of `paged_attention`; `meta.work` must be a `TPUWork`."""
    assert isinstance(meta.work, TPUWork)
    chip = current_tpu() or TPU("none", 4, 1, 128 << 20)
    with jax.named_scope("paged_attention"):
        return _attend(q, kv_pages, meta, sinks, options=options, with_lse=with_lse, chip=chip, interpret=interpret)
