"""Dense attention in float64 numpy, one row and one query at a time: what every implementation is compared with.

It gathers whole contexts and loops in Python, so it is for small shapes and tests only.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64

from .metadata import PagedMetadata
from .pages import KVPages


def read_row(kv_pages: KVPages, page_table_row: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Reads the first `kv_len` tokens of a row: K and V, float64 [kv_len, Hkv, D], dequantised."""
    spec = kv_pages.spec
    scales = None if kv_pages.scales is None else np.asarray(kv_pages.scales)
    pool, scales = spec.to_logical(np.asarray(kv_pages.data.astype(jnp.float32)), scales)
    k, v = np.zeros((2, kv_len, spec.num_kv_heads, spec.head_dim))
    for position in range(kv_len):
        page, offset = page_table_row[position // spec.page_size], position % spec.page_size
        kv = pool[page, offset].astype(np.float64)
        if scales is not None:
            kv = kv * scales[page, offset, :, :, None]
        k[position], v[position] = kv[:, 0], kv[:, 1]
    return k, v


def paged_attention_reference(
    q: Float[Array, "T Hq D"],
    kv_pages: KVPages,
    meta: PagedMetadata,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float32[Array, " Hq"] | None = None,
) -> tuple[Float64[np.ndarray, "T Hq D"], Float64[np.ndarray, "T Hq"]]:
    """The outputs and log-sum-exps that `paged_attention` should give, from concrete arrays.

    Args:
      q, kv_pages, meta, scale, sliding_window, soft_cap, sinks: as for `paged_attention`.

    Returns:
      float64 outputs, 0 for padding, and log-sum-exps, -inf for padding.

    Example:
      >>> from jpaged.pallas_kernels import PageSpec, make_pages
      >>> i32 = lambda *x: jnp.array(x, jnp.int32)
      >>> meta = PagedMetadata(  # one row with one token, the fourth of its sequence, on page 3
      ...     page_table=i32([3]), kv_lens=i32(4), cu_q_lens=i32(0, 1), positions=i32(3), slot_mapping=i32(51),
      ...     num_decode=jnp.int32(1), num_seqs=jnp.int32(1))
      >>> kv_pages = make_pages(PageSpec(num_pages=4, page_size=16, num_kv_heads=1, head_dim=2, dtype="float32"))
      >>> out, lse = paged_attention_reference(jnp.ones((1, 1, 2)), kv_pages, meta)
      >>> out.tolist(), float(np.exp(lse[0, 0]).round(6))  # four keys, each with score 0
      ([[[0.0, 0.0]]], 4.0)
    """
    queries = np.asarray(q.astype(jnp.float32)).astype(np.float64)
    page_table, kv_lens, cu = np.asarray(meta.page_table), np.asarray(meta.kv_lens), np.asarray(meta.cu_q_lens)
    num_tokens, hq, d = queries.shape
    scale = d**-0.5 if scale is None else scale
    out, lse = np.zeros((num_tokens, hq, d)), np.full((num_tokens, hq), -np.inf)
    for row in range(int(meta.num_seqs)):
        k, v = read_row(kv_pages, page_table[row], int(kv_lens[row]))
        for token in range(cu[row], cu[row + 1]):
            position = kv_lens[row] - cu[row + 1] + token
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for head in range(hq):
                kv_head = head // (hq // kv_pages.spec.num_kv_heads)
                s = k[first : position + 1, kv_head] @ queries[token, head] * scale
                if soft_cap is not None:
                    s = soft_cap * np.tanh(s / soft_cap)
                top = s.max() if sinks is None else max(s.max(), float(sinks[head]))
                p = np.exp(s - top)
                total = p.sum() + (0.0 if sinks is None else np.exp(float(sinks[head]) - top))
                out[token, head] = p @ v[first : position + 1, kv_head] / total
                lse[token, head] = top + np.log(total)
    return out, lse
