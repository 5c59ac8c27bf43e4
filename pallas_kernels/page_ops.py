"""Whole pages: copy (copy-on-write, compaction), gather (inspection, swap-out), scatter (swap-in)."""

import dataclasses
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from .pages import KVPages
from .quantization import dequantize, quantize


def copy_pages(kv_pages: KVPages, src: Int32[Array, " n"], dst: Int32[Array, " n"]) -> KVPages:
    """Copies page `src[i]` to page `dst[i]`, scales included; all are read before any is written.

    Pad with 0 to 0: the null page's contents do not matter. Other entries of `dst` must differ.

    Example:
      >>> import jax.numpy as jnp
      >>> from jpaged.pallas_kernels import PageSpec, make_pages
      >>> pages = make_pages(PageSpec(num_pages=4, page_size=2, num_kv_heads=1, head_dim=2, dtype="float32"))
      >>> pages = scatter_pages(pages, jnp.array([1]), jnp.ones((1, 2, 1, 2)), jnp.ones((1, 2, 1, 2)))
      >>> float(copy_pages(pages, jnp.array([1]), jnp.array([3])).data[3].sum())
      8.0
    """
    scales = None if kv_pages.scales is None else kv_pages.scales[src]
    return _set_pages(kv_pages, dst, kv_pages.data[src], scales)


def replace_pages(pool: Array, page_ids: Int32[Array, " n"], pages: Array, implementation: str) -> Array:
    """Replaces pages of one stored array (K and V, or scales) by stored ones [n, ...], in place if donated.

    Ids outside the pool are dropped.

    Args:
      implementation: the back end that the pool is stored for.
    """
    if implementation == "mosaic_gpu":
        from .write_pages_gpu import replace_pages_gpu, shape_objection  # needs jax 0.11

        if shape_objection(pool) is None:
            return replace_pages_gpu(pool, page_ids, pages)
    if implementation != "mosaic_tpu":
        return pool.at[page_ids].set(pages, mode="drop")

    # XLA's scatter on TPU wants bytes in smaller tiles than a pool of them has, and would copy the pool.
    def replace(i: Array, pool: Array) -> Array:
        at = jnp.clip(page_ids[i], 0, pool.shape[0] - 1)
        page = jnp.where(at == page_ids[i], pages[i], pool[at])
        return lax.dynamic_update_index_in_dim(pool, page, at, 0)

    return lax.fori_loop(0, page_ids.shape[0], replace, pool)


def _set_pages(kv_pages: KVPages, page_ids: Int32[Array, " n"], data: Array, scales: Array | None) -> KVPages:
    replace = partial(replace_pages, implementation=kv_pages.spec.implementation)
    if kv_pages.scales is not None and scales is not None:
        scales = replace(kv_pages.scales, page_ids, scales)
    return dataclasses.replace(kv_pages, data=replace(kv_pages.data, page_ids, data), scales=scales)


def gather_pages(
    kv_pages: KVPages, page_ids: Int32[Array, " n"]
) -> tuple[Float[Array, "n K Hkv D"], Float[Array, "n K Hkv D"]]:
    """Reads K and V of whole pages: the pages' dtype, or f32 where they are quantised.

    Example:
      >>> from jpaged.pallas_kernels import PageSpec, make_pages
      >>> pages = make_pages(PageSpec(num_pages=4, page_size=2, num_kv_heads=1, head_dim=2, dtype="int8"))
      >>> k, v = gather_pages(pages, jnp.array([1, 3]))
      >>> k.shape, k.dtype.name
      ((2, 2, 1, 2), 'float32')
    """
    scales = None if kv_pages.scales is None else kv_pages.scales[page_ids]
    kv, scales = kv_pages.spec.to_logical(kv_pages.data[page_ids], scales)
    if scales is not None:
        kv = dequantize(kv, scales)
    return kv[..., 0, :], kv[..., 1, :]


def scatter_pages(
    kv_pages: KVPages,
    page_ids: Int32[Array, " n"],
    k: Float[Array, "n K Hkv D"],
    v: Float[Array, "n K Hkv D"],
) -> KVPages:
    """Writes K and V of whole pages, quantising them where the pages are quantised: the inverse of `gather_pages`.

    A gathered quantised page comes back with the same values: its largest magnitude already has its scale.

    Example:
      >>> from jpaged.pallas_kernels import PageSpec, make_pages
      >>> pages = make_pages(PageSpec(num_pages=4, page_size=2, num_kv_heads=1, head_dim=2, dtype="float32"))
      >>> pages = scatter_pages(pages, jnp.array([3]), jnp.ones((1, 2, 1, 2)), jnp.full((1, 2, 1, 2), 5.0))
      >>> k, v = gather_pages(pages, jnp.array([3]))
      >>> v.tolist()
      [[[[5.0, 5.0]], [[5.0, 5.0]]]]
    """
    spec = kv_pages.spec
    kv, scales = jnp.stack([k, v], axis=3), None
    if spec.quantized:
        kv, scales = quantize(kv, spec.dtype)
    return _set_pages(kv_pages, page_ids, *spec.to_stored(kv.astype(spec.dtype), scales))
