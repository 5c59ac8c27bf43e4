"""The dense reference against numbers worked out by hand."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from jpaged.pallas_kernels import KVPages, PagedMetadata, PageSpec
from jpaged.pallas_kernels.reference import paged_attention_reference

SPEC = PageSpec(num_pages=3, page_size=2, num_kv_heads=1, head_dim=1, dtype=jnp.dtype("float32"))
# One row of three tokens on pages 2, 1: keys 0, log 2, log 3 and values 10, 20, 40. The null page and the tail are NaN.
DATA = jnp.array([[[np.nan] * 2] * 2, [[math.log(3), 40.0], [np.nan] * 2], [[0.0, 10.0], [math.log(2), 20.0]]])
PAGES = KVPages(data=DATA.reshape(SPEC.data_shape), scales=None, spec=SPEC)


def i32(*values: int) -> jnp.ndarray:
    return jnp.array(values, jnp.int32)


META = PagedMetadata(
    page_table=i32(2, 1)[None],
    kv_lens=i32(3),
    cu_q_lens=i32(0, 2),
    positions=i32(1, 2, 0),
    slot_mapping=i32(5, 2, 0),
    num_decode=jnp.int32(0),
    num_seqs=jnp.int32(1),
)
Q = jnp.array([1.0, 1.0, np.nan]).reshape(3, 1, 1)  # two live queries and padding


def attend(**options) -> tuple[list[float], list[float]]:
    out, lse = paged_attention_reference(Q, PAGES, META, scale=1.0, **options)
    return out.ravel().tolist(), np.exp(lse).ravel().tolist()


def close(got: tuple[list[float], list[float]], out: list[float], total: list[float]) -> None:
    np.testing.assert_allclose(got[0], out, rtol=1e-6)
    np.testing.assert_allclose(got[1], total, rtol=1e-6)


def test_causal() -> None:
    close(attend(), [(10 + 2 * 20) / 3, (10 + 2 * 20 + 3 * 40) / 6, 0], [3, 6, 0])


def test_window() -> None:
    close(attend(sliding_window=2), [(10 + 2 * 20) / 3, (2 * 20 + 3 * 40) / 5, 0], [3, 5, 0])
    close(attend(sliding_window=1), [20, 40, 0], [2, 3, 0])


def test_sinks_take_weight_and_give_nothing() -> None:
    close(attend(sinks=jnp.array([math.log(4.0)])), [50 / 7, 170 / 10, 0], [7, 10, 0])


def test_soft_cap() -> None:
    capped = [math.exp(0.5 * math.tanh(math.log(x) / 0.5)) for x in (1, 2, 3)]
    first = (10 * capped[0] + 20 * capped[1]) / (capped[0] + capped[1])
    out, total = attend(soft_cap=0.5)
    np.testing.assert_allclose([out[0], total[1]], [first, sum(capped)], rtol=1e-6)


def test_scales_multiply_the_stored_values() -> None:
    spec = dataclasses.replace(SPEC, dtype=jnp.dtype("int8"))
    data = jnp.array([[[99] * 2] * 2, [[3, 4], [99] * 2], [[0, 1], [2, 2]]], jnp.int8).reshape(spec.data_shape)
    # Order [Hkv, 2, page_size] in a page: K's two scales, then V's.
    scales = jnp.array([[np.nan] * 4, [math.log(3) / 3, np.nan, 10, np.nan], [1, math.log(2) / 2, 10, 10]], jnp.float32)
    out, lse = paged_attention_reference(Q, KVPages(data=data, scales=scales, spec=spec), META, scale=1.0)
    close((out.ravel().tolist(), np.exp(lse).ravel().tolist()), *[list(x) for x in attend()])
