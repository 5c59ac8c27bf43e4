"""`write_kv`: the K and V of a step's tokens go to their slots, in place on the donated pool."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .metadata import PagedMetadata
from .pages import KVPages
from .quantization import quantize


def scatter_kv(k: Float[Array, "T Hkv D"], v: Float[Array, "T Hkv D"], kv_pages: KVPages, slots: Array) -> KVPages:
    """Writes token t's K and V to slot `slots[t]` of pages in the [N, K, 2 * Hkv, D] shape; XLA updates in place.

    Slots outside the pool are dropped. Where slots repeat (the null slot 0 of padding), any of the writes may win.
    """
    spec = kv_pages.spec
    if k.shape[0] == 1:
        # Twice the same token: XLA turns a scatter of one index into another op, before which it copies the pool.
        k, v, slots = jnp.repeat(k, 2, axis=0), jnp.repeat(v, 2, axis=0), jnp.repeat(slots, 2)
    tokens, heads = k.shape[0], 2 * spec.num_kv_heads
    kv = jnp.stack([k, v], axis=2).reshape(tokens, heads, spec.head_dim)
    scales = kv_pages.scales
    if scales is not None:
        kv, kv_scales = quantize(kv, spec.dtype)
        by_head = scales.reshape(spec.num_pages, heads, spec.page_size)
        by_head = by_head.at[slots // spec.page_size, :, slots % spec.page_size].set(kv_scales, mode="drop")
        scales = by_head.reshape(scales.shape)
    # One index a token: merging the first two axes is free, as the last two keep their tiles.
    flat = kv_pages.data.reshape(spec.num_pages * spec.page_size, heads, spec.head_dim)
    flat = flat.at[slots].set(kv.astype(spec.dtype), mode="drop")
    return dataclasses.replace(kv_pages, data=flat.reshape(spec.data_shape), scales=scales)


def write_kv_xla(
    k: Float[Array, "T Hkv D"], v: Float[Array, "T Hkv D"], kv_pages: KVPages, meta: PagedMetadata
) -> KVPages:
    """The XLA implementation of `write_kv`."""
    with jax.named_scope("write_kv"):
        return scatter_kv(k, v, kv_pages, meta.slot_mapping)
