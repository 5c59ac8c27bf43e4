"""Attention on Hopper: which kernel takes a step's rows, and with which work list."""

import jax
from jaxtyping import Array, Float, Float32, Int32

from . import gpu_plan as plan
from .decode_gpu import attend
from .metadata import PagedMetadata
from .pages import KVPages, PageSpec
from .xla import AttentionOptions


def choose_tile(num_tokens: int, num_rows: int, group: int, head_dim: int) -> tuple[int, bool]:
    """Query tokens of a tile, and whether its query rows are the narrow side of the products.

    A step with no more tokens than rows is taken for a decode step, whose rows have a token or two each.
    """
    narrow = num_tokens <= num_rows and head_dim % 64 == 0
    return plan.tile_tokens(group, num_tokens, narrow), narrow


def make_records(
    q_shape: tuple[int, ...], spec: PageSpec, meta: PagedMetadata, window: int | None
) -> Int32[Array, "R F"]:
    """The work list of a layer: equal for all layers with as many query heads and the same window."""
    group = q_shape[1] // spec.num_kv_heads
    return plan.make_work_list(
        meta,
        meta.work.q_lens,
        page_size=spec.page_size,
        num_kv_heads=spec.num_kv_heads,
        tokens=choose_tile(q_shape[0], meta.kv_lens.shape[0], group, q_shape[2])[0],
        sliding_window=window,
        block_kv=meta.work.blocks.block_kv,
        num_workers=meta.work.blocks.num_workers,
        min_share=meta.work.blocks.min_share,
    )


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
    tokens, narrow = choose_tile(q.shape[0], meta.kv_lens.shape[0], q.shape[1] // spec.num_kv_heads, q.shape[2])
    with jax.named_scope("paged_attention"):
        return attend(
            q,
            kv_pages.data,
            make_records(q.shape, spec, meta, options.sliding_window),
            work.page_table,
            work.counters,
            sinks,
            tokens=tokens,
            narrow=narrow,
            page_size=spec.page_size,
            blocks=work.blocks,
            options=options,
            with_lse=with_lse,
        )
