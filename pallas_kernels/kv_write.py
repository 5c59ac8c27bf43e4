"""`write_kv`: the K and V of a step's tokens go to their slots, in place on the donated pool."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .metadata import PagedMetadata
from .pages import KVPages, PageSpec
from .quantization import quantize


def write_kv_xla(
    k: Float[Array, "T Hkv D"], v: Float[Array, "T Hkv D"], kv_pages: KVPages, meta: PagedMetadata
) -> KVPages:
    """The XLA implementation of `write_kv`, for the pages of any back end.

    Slots outside the pool are dropped. Where slots repeat (the null slot 0 of padding), any of the writes may win.

    On TPU it is in place for pages that are stored for it and are not quantised; XLA would copy some of the others.
    """
    with jax.named_scope("write_kv"):
        spec, scales, slots = kv_pages.spec, kv_pages.scales, meta.slot_mapping
        if k.shape[0] == 1:
            # Twice the same token: XLA turns a scatter of one index into another op, before which it copies the pool.
            k, v, slots = jnp.repeat(k, 2, axis=0), jnp.repeat(v, 2, axis=0), jnp.repeat(slots, 2)
        rows = _rows(slots, spec)
        kv = jnp.stack([k, v], axis=2)
        if scales is not None:
            kv, kv_scales = quantize(kv, spec.dtype)
            by_row = scales.reshape(spec.scales_by_row_shape)
            page, row = rows // spec.page_rows, rows % spec.page_rows
            by_row = by_row.at[page, :, row].set(kv_scales.reshape(-1, by_row.shape[1]), mode="drop")
            scales = by_row.reshape(scales.shape)
        # One index a row: merging the first two axes is free, as the last ones keep their tiles.
        flat = kv_pages.data.reshape(-1, *spec.row_shape)
        flat = flat.at[rows].set(kv.reshape(-1, *spec.row_shape).astype(spec.dtype), mode="drop")
        return dataclasses.replace(kv_pages, data=flat.reshape(spec.data_shape), scales=scales)


def _rows(slots: Array, spec: PageSpec) -> Array:
    """The rows of the pool that tokens fill, `spec.rows_per_token` for each slot, in the tokens' order."""
    if spec.rows_per_token == 1:
        return slots
    return (slots[:, None] * spec.rows_per_token + jnp.arange(spec.rows_per_token, dtype=slots.dtype)).reshape(-1)
