"""Attention on Hopper: which kernel takes a step's rows, and with which work list.

A step with no more tokens than rows is a decode step, and `decode_gpu` runs all of it. One with more tokens has prefill
chunks: `prefill_gpu` runs them, and `decode_gpu` the decode rows before them; both write to one output. Which rows are
which is data, and so is that there may be none of a kind. Steps too small for prefill's tiles, which are not split over
the KV, are `decode_gpu`'s alone.
"""

import dataclasses
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from . import gpu_plan as plan
from .decode_gpu import attend
from .indices_gpu import arange, div
from .metadata import PagedMetadata
from .pages import KVPages, PageSpec
from .prefill_gpu import prefill
from .prefill_plan_gpu import make_prefill_list, rows_to_split
from .prefill_tuning_gpu import PrefillBlocks, choose_prefill_blocks, fills_the_chip, has_prefill_tiles, tile_tokens
from .xla import AttentionOptions


def choose_tile(num_tokens: int, num_rows: int, group: int, head_dim: int) -> tuple[int, bool]:
    """Query tokens of a tile of `decode_gpu`, and whether its query rows are the narrow side of the products.

    A step with no more tokens than rows is taken for a decode step, whose rows have a token or two each.
    """
    narrow = num_tokens <= num_rows and head_dim % 64 == 0
    return plan.tile_tokens(group, num_tokens, narrow), narrow


def prefill_blocks(q_shape: tuple[int, ...], spec: PageSpec, meta: PagedMetadata) -> PrefillBlocks | None:
    """How `prefill_gpu` runs the prefill rows of a step of this shape, or `None` if `decode_gpu` runs them."""
    num_tokens, num_heads, head_dim = q_shape
    multiprocessors = meta.work.blocks.num_blocks
    if num_tokens <= meta.kv_lens.shape[0] or not has_prefill_tiles(head_dim, spec.dtype.itemsize):
        return None
    blocks = choose_prefill_blocks(head_dim, multiprocessors, spec.dtype.itemsize)
    return blocks if fills_the_chip(num_tokens, num_heads // spec.num_kv_heads, spec.num_kv_heads, blocks) else None


def _decode_rows(
    q_shape: tuple[int, ...], spec: PageSpec, meta: PagedMetadata, window: int | None, blocks: PrefillBlocks
) -> Bool[Array, " S"]:
    """The rows of a step with prefill chunks that `decode_gpu` runs: decode rows, and chunks that it has to split."""
    num_rows, group = meta.kv_lens.shape[0], q_shape[1] // spec.num_kv_heads
    decode = jnp.arange(num_rows) < meta.num_decode
    return decode | rows_to_split(
        meta,
        jnp.where(decode, 0, meta.work.q_lens),
        num_kv_heads=spec.num_kv_heads,
        tokens=blocks.consumers * tile_tokens(group),
        split_tokens=choose_tile(num_rows, num_rows, group, spec.head_dim)[0],
        sliding_window=window,
        block_kv=blocks.block_kv,
        multiprocessors=blocks.num_blocks,
    )


def make_records(
    q_shape: tuple[int, ...], spec: PageSpec, meta: PagedMetadata, window: int | None
) -> Int32[Array, "R F"]:
    """The work list of `decode_gpu` for a layer: equal for all layers with as many query heads and the same window."""
    group, num_rows = q_shape[1] // spec.num_kv_heads, meta.kv_lens.shape[0]
    q_lens, num_tokens = meta.work.q_lens, q_shape[0]
    if (blocks := prefill_blocks(q_shape, spec, meta)) is not None:
        q_lens = jnp.where(_decode_rows(q_shape, spec, meta, window, blocks), q_lens, 0)
        num_tokens = num_rows  # as in a decode step
    sharing = plan.may_share(meta.work.counters.shape[0], meta.work.blocks, num_rows, spec.num_kv_heads, group, window)
    return plan.make_work_list(
        meta,
        q_lens,
        meta.work.prefixes if sharing else None,
        num_kv_heads=spec.num_kv_heads,
        group=group,
        tokens=choose_tile(num_tokens, num_rows, group, q_shape[2])[0],
        sliding_window=window,
        block_kv=meta.work.blocks.block_kv,
        consumers=meta.work.blocks.consumers,
        num_blocks=meta.work.blocks.num_blocks,
        full_share=meta.work.blocks.full_share,
    )


def make_prefill_records(
    q_shape: tuple[int, ...], spec: PageSpec, meta: PagedMetadata, window: int | None, blocks: PrefillBlocks
) -> Int32[Array, "U F"]:
    """The work list of `prefill_gpu` for a layer, shared like that of `decode_gpu`."""
    group = q_shape[1] // spec.num_kv_heads
    return make_prefill_list(
        meta,
        jnp.where(_decode_rows(q_shape, spec, meta, window, blocks), 0, meta.work.q_lens),
        page_size=spec.page_size,
        num_kv_heads=spec.num_kv_heads,
        tokens=blocks.consumers * tile_tokens(group),
        sliding_window=window,
        block_kv=blocks.block_kv,
        section_tokens=blocks.section_tokens,
    )


def find_first_pages(records: Int32[Array, "R F"], spec: PageSpec, meta: PagedMetadata) -> Int32[Array, "W B"]:
    """The pages of each worker's first block: known with its record, and not only after it."""
    blocks, page_table, size = meta.work.blocks, meta.work.page_table, spec.page_size
    box = math.gcd(size, blocks.block_kv)

    def field(which: int) -> Array:
        return records[: blocks.num_workers, which, None]

    slots = field(plan.KV_START) + box * arange(blocks.block_kv // box)
    last = jnp.clip(div(field(plan.POSITION) + field(plan.NUM_TOKENS) - 1, size), 0, page_table.shape[1] - 1)
    where = field(plan.ROW), jnp.minimum(div(slots, size), last)
    return page_table.at[where].get(mode="clip", wrap_negative_indices=False)


def make_lists(q_shape: tuple[int, ...], spec: PageSpec, meta: PagedMetadata, window: int | None) -> plan.WorkLists:
    """All work lists of a layer."""
    blocks = prefill_blocks(q_shape, spec, meta)
    prefill_records = None if blocks is None else make_prefill_records(q_shape, spec, meta, window, blocks)
    records = make_records(q_shape, spec, meta, window)
    return plan.WorkLists(records, prefill_records, find_first_pages(records, spec, meta))


def with_lists(meta: PagedMetadata, spec: PageSpec, layers: Iterable[tuple[int, int | None]]) -> PagedMetadata:
    """The metadata with the lists of layers of so many query heads and such a window; `meta.work` is a `GPUWork`."""
    lists = dict(meta.work.lists)
    for num_heads, window in layers:
        q_shape = (meta.positions.shape[0], num_heads, spec.head_dim)
        lists[plan.lists_key(num_heads, spec.num_kv_heads, window)] = make_lists(q_shape, spec, meta, window)
    return dataclasses.replace(meta, work=dataclasses.replace(meta.work, lists=lists))


def paged_attention_gpu(
    q: Float[Array, "T Hq D"],
    kv_pages: KVPages,
    meta: PagedMetadata,
    sinks: Float32[Array, " Hq"] | None,
    options: AttentionOptions,
    with_lse: bool,
) -> tuple[Float[Array, "T Hq D"], Float32[Array, "T Hq"] | None]:
    """The Mosaic GPU implementation of `paged_attention`; `meta.work` must be a `GPUWork`.

    Raises:
      ValueError: it was made for other pages.
    """
    spec, window = kv_pages.spec, options.sliding_window
    meta.work.check(spec)
    if sinks is not None:  # a buffer of its own, as the plan's page table has: a layer's row of many may not be aligned
        sinks = jnp.maximum(sinks, jnp.finfo(sinks.dtype).min)
    lists = meta.work.lists.get(plan.lists_key(q.shape[1], spec.num_kv_heads, window))
    lists = make_lists(q.shape, spec, meta, window) if lists is None else lists
    first_pages, listed = lists.first_pages, (lists.records, lists.prefill_records)
    return attend_listed(q, kv_pages, meta, *listed, sinks, options, with_lse, first_pages=first_pages)


def attend_listed(
    q: Float[Array, "T Hq D"],
    kv_pages: KVPages,
    meta: PagedMetadata,
    records: Int32[Array, "R F"],
    prefill_records: Int32[Array, "U F"] | None,
    sinks: Float32[Array, " Hq"] | None,
    options: AttentionOptions,
    with_lse: bool,
    *,
    first_pages: Int32[Array, "W B"] | None = None,
) -> tuple[Float[Array, "T Hq D"], Float32[Array, "T Hq"] | None]:
    """The kernels of `paged_attention_gpu`, with the work lists of the layer."""
    spec, work, num_rows = kv_pages.spec, meta.work, meta.kv_lens.shape[0]
    blocks = prefill_blocks(q.shape, spec, meta)
    tokens, narrow = choose_tile(
        q.shape[0] if blocks is None else num_rows, num_rows, q.shape[1] // spec.num_kv_heads, q.shape[2]
    )
    with jax.named_scope("paged_attention"):
        out, lse = attend(
            q,
            kv_pages.data,
            records,
            work.page_table,
            work.counters,
            sinks,
            tokens=tokens,
            narrow=narrow,
            page_size=spec.page_size,
            blocks=work.blocks,
            options=options,
            with_lse=with_lse,
            scales=kv_pages.scales,
            first_pages=first_pages,
        )
        if blocks is None:
            return out, lse
        return prefill(
            q,
            kv_pages.data,
            prefill_records,
            work.page_table,
            work.counters,
            sinks,
            out,
            lse,
            page_size=spec.page_size,
            blocks=blocks,
            options=options,
            scales=kv_pages.scales,
        )
