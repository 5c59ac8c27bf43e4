"""Weights of 8-bit pages keep what many small ones add up to."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import KVPages, PagedMetadata, PageSpec, paged_attention
from jpaged.pallas_kernels.quantization import quantize

HEADS, HEAD_DIM, PAGE = 4, 128, 16


def attend(kv_len: int, gap: float, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Outputs, and what they should be, of a row whose first key's score is `gap`, to base 2, above all others."""
    pages = -(-kv_len // PAGE)
    spec = PageSpec(pages + 1, PAGE, 1, HEAD_DIM, dtype, "mosaic_gpu")
    v = 1.0 + np.random.default_rng(0).uniform(-0.5, 0.5, (spec.num_pages * PAGE, HEAD_DIM))
    k = np.zeros_like(v)
    k[PAGE, 0], v[PAGE] = 1.0, 0.0 if gap else v[PAGE]
    values, scales = quantize(jnp.asarray(np.stack([k, v], axis=1), jnp.float32), spec.dtype)
    shape = spec.num_pages, PAGE, 1, 2
    kv_pages = KVPages(*spec.to_stored(values.reshape(*shape, HEAD_DIM), scales.reshape(shape)), spec)
    meta = PagedMetadata(
        page_table=jnp.arange(1, pages + 1, dtype=jnp.int32)[None],
        kv_lens=jnp.full(1, kv_len, jnp.int32),
        cu_q_lens=jnp.array([0, 1], jnp.int32),
        positions=jnp.full(1, kv_len - 1, jnp.int32),
        slot_mapping=jnp.zeros(1, jnp.int32),
        num_decode=jnp.int32(1),
        num_seqs=jnp.int32(1),
    )
    q = jnp.zeros((1, HEADS, HEAD_DIM), jnp.bfloat16).at[:, :, 0].set(gap)
    op = jax.jit(partial(paged_attention, scale=float(np.log(2.0)), implementation="mosaic_gpu"))
    stored = np.asarray(values[:, 1], np.float64) * np.asarray(scales)[:, 1, None]
    weights = np.ones(kv_len)
    weights[0] = 2.0**gap
    expected = weights @ stored[PAGE : PAGE + kv_len] / weights.sum()
    return np.asarray(op(q, kv_pages, meta), np.float64)[0], np.broadcast_to(expected, (HEADS, HEAD_DIM))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(("kv_len", "gap"), [(32768, 0.0), (100_000, 26.0)])
def test_many_small_weights_are_not_lost(kv_len: int, gap: float, dtype: str) -> None:
    out, expected = attend(kv_len, gap, dtype)
    np.testing.assert_allclose(out, expected, rtol=0.02)
