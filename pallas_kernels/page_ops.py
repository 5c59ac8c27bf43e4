"""Whole pages: copy (copy-on-write, compaction), gather (inspection, swap-out), scatter (swap-in)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from .dispatch import require_stored_by
from .kv_write import scatter_kv
from .pages import KVPages
from .quantization import dequantize


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

    def copied(pool: Array) -> Array:
        return pool.at[dst].set(pool[src], mode="drop")

    scales = None if kv_pages.scales is None else copied(kv_pages.scales)
    return dataclasses.replace(kv_pages, data=copied(kv_pages.data), scales=scales)


def gather_pages(
    kv_pages: KVPages, page_ids: Int32[Array, " n"]
) -> tuple[Float[Array, "n K Hkv D"], Float[Array, "n K Hkv D"]]:
    """Reads K and V of whole pages: the pages' dtype, or f32 where they are quantised.

    Raises:
      NotImplementedError: the pages are stored for a back end that has no such op yet.

    Example:
      >>> from jpaged.pallas_kernels import PageSpec, make_pages
      >>> pages = make_pages(PageSpec(num_pages=4, page_size=2, num_kv_heads=1, head_dim=2, dtype="int8"))
      >>> k, v = gather_pages(pages, jnp.array([1, 3]))
      >>> k.shape, k.dtype.name
      ((2, 2, 1, 2), 'float32')
    """
    require_stored_by(kv_pages.spec, "xla", "gather_pages")
    spec = kv_pages.spec
    kv = kv_pages.data[page_ids].reshape(-1, spec.page_size, spec.num_kv_heads, 2, spec.head_dim)
    if kv_pages.scales is not None:
        scales = kv_pages.scales[page_ids].reshape(-1, spec.num_kv_heads, 2, spec.page_size)
        kv = dequantize(kv, scales.transpose(0, 3, 1, 2))
    return kv[..., 0, :], kv[..., 1, :]


def scatter_pages(
    kv_pages: KVPages,
    page_ids: Int32[Array, " n"],
    k: Float[Array, "n K Hkv D"],
    v: Float[Array, "n K Hkv D"],
) -> KVPages:
    """Writes K and V of whole pages, quantising them where the pages are quantised: the inverse of `gather_pages`.

    A gathered quantised page comes back with the same values: its largest magnitude already has its scale.

    Raises:
      NotImplementedError: the pages are stored for a back end that has no such op yet.

    Example:
      >>> from jpaged.pallas_kernels import PageSpec, make_pages
      >>> pages = make_pages(PageSpec(num_pages=4, page_size=2, num_kv_heads=1, head_dim=2, dtype="float32"))
      >>> pages = scatter_pages(pages, jnp.array([3]), jnp.ones((1, 2, 1, 2)), jnp.full((1, 2, 1, 2), 5.0))
      >>> k, v = gather_pages(pages, jnp.array([3]))
      >>> v.tolist()
      [[[[5.0, 5.0]], [[5.0, 5.0]]]]
    """
    require_stored_by(kv_pages.spec, "xla", "scatter_pages")
    spec = kv_pages.spec
    slots = page_ids[:, None] * spec.page_size + jnp.arange(spec.page_size, dtype=jnp.int32)
    tokens = (-1, spec.num_kv_heads, spec.head_dim)
    return scatter_kv(k.reshape(tokens), v.reshape(tokens), kv_pages, slots.reshape(-1))
