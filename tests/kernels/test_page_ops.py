"""Whole pages: copied, gathered, scattered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import PageSpec, copy_pages, gather_pages, make_pages, scatter_pages
from jpaged.pallas_kernels.pages import PAGE_DTYPES
from tests.kernels.hlo import pool_copies

# As one program each, as engines call them: operation by operation they would be dozens.
copy, gather, scatter = map(jax.jit, (copy_pages, gather_pages, scatter_pages))


def spec(dtype: str = "float32", **changes) -> PageSpec:
    return PageSpec(num_pages=9, page_size=4, num_kv_heads=2, head_dim=8, dtype=jnp.dtype(dtype), **changes)


STORED = ["xla", "mosaic_tpu"]


def filled(dtype: str, implementation: str):
    rng = np.random.default_rng(0)
    ids = np.array([7, 2, 5], np.int32)
    k, v = (rng.standard_normal((3, 4, 2, 8)).astype(np.float32) for _ in range(2))
    return scatter(make_pages(spec(dtype, implementation=implementation)), ids, k, v), ids, k, v


# Half a step of the dtype at its largest magnitude, as a part of a head's largest magnitude (about 3).
ERROR = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11, "int8": 0.5 / 127, "float8_e4m3fn": 2**-4}


@pytest.mark.parametrize("dtype", PAGE_DTYPES)
@pytest.mark.parametrize("implementation", STORED)
def test_gather_is_the_inverse_of_scatter(dtype: str, implementation: str) -> None:
    pages, ids, k, v = filled(dtype, implementation)
    for got, expected in zip(gather(pages, ids), (k, v), strict=True):
        assert got.dtype == ("float32" if pages.spec.quantized else dtype)
        error = np.abs(np.asarray(got).astype(np.float32) - expected)
        assert (error / np.abs(expected).max(axis=-1, keepdims=True)).max() <= ERROR[dtype]


@pytest.mark.parametrize("dtype", PAGE_DTYPES)
@pytest.mark.parametrize("implementation", STORED)
def test_swapping_out_and_in_changes_nothing(dtype: str, implementation: str) -> None:
    pages, ids, _, _ = filled(dtype, implementation)
    elsewhere = np.array([1, 3, 4], np.int32)
    back = scatter(pages, elsewhere, *(np.asarray(x).astype(np.float32) for x in gather(pages, ids)))
    np.testing.assert_array_equal(
        np.asarray(back.data)[elsewhere].view(np.uint8), np.asarray(pages.data)[ids].view(np.uint8)
    )
    if pages.scales is not None:
        scales, expected = np.asarray(back.scales)[elsewhere], np.asarray(pages.scales)[ids]
        np.testing.assert_allclose(scales, expected, rtol=2e-7)  # one rounding


@pytest.mark.parametrize("implementation", STORED)
def test_pages_have_the_documented_linear_order(implementation: str) -> None:
    pages, _, k, v = filled("int8", implementation)
    page = np.asarray(pages.data)[7].reshape(4, 2, 2, 8)  # [page_size, num_kv_heads, 2, head_dim]
    stored = np.asarray(pages.scales)
    if implementation == "mosaic_tpu":
        assert not stored[:, :, 8:].any()  # padding
        scales = stored[7, :, :8].reshape(2, 4, 2).transpose(2, 0, 1)  # [2, page_size, num_kv_heads]
    else:
        scales = stored[7].reshape(2, 2, 4)  # [num_kv_heads, 2, page_size]
    for head in range(2):
        for which, x in enumerate((k, v)):
            np.testing.assert_allclose(scales[head, which], np.abs(x[0, :, head]).max(-1) / 127, rtol=1e-6)
            np.testing.assert_allclose(
                page[:, head, which] * scales[head, which, :, None], x[0, :, head], atol=3 * 0.5 / 127 + 1e-6
            )


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("implementation", STORED)
def test_copy_reads_all_before_it_writes(dtype: str, implementation: str) -> None:
    pages, _, _, _ = filled(dtype, implementation)
    # A cycle, a copy to a free page, and padding.
    src, dst = np.array([7, 2, 5, 5, 0, 0], np.int32), np.array([2, 7, 1, 8, 0, 0], np.int32)
    copied = copy(pages, src, dst)
    for before, after in zip(*(map(np.asarray, jax.tree.leaves(tree)) for tree in (pages, copied)), strict=True):
        np.testing.assert_array_equal(after[dst], before[src])
        np.testing.assert_array_equal(after[[3, 5]], before[[3, 5]])


@pytest.mark.parametrize("implementation", STORED)
def test_pages_outside_the_pool_are_dropped(implementation: str) -> None:
    pages, _, _, _ = filled("float32", implementation)
    outside = np.array([pages.spec.num_pages, 2, 2**31 - 1], np.int32)
    before, after = (np.asarray(x.data) for x in (pages, copy(pages, np.array([7, 7, 7], np.int32), outside)))
    np.testing.assert_array_equal(after[2], before[7])
    np.testing.assert_array_equal(after[3:], before[3:])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("implementation", STORED)
def test_copy_is_in_place(dtype: str, count: int, implementation: str) -> None:
    pages, ids = make_pages(spec(dtype, implementation=implementation)), jnp.ones(count, jnp.int32)
    compiled = jax.jit(copy_pages, donate_argnums=0).lower(pages, ids, ids + 1).compile()
    assert pool_copies(compiled, pages.spec) == []


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("implementation", STORED)
def test_scatter_is_in_place(dtype: str, count: int, implementation: str) -> None:
    pages, kv = make_pages(spec(dtype, implementation=implementation)), jnp.ones((count, 4, 2, 8))
    compiled = jax.jit(scatter_pages, donate_argnums=0).lower(pages, jnp.ones(count, jnp.int32), kv, kv).compile()
    assert pool_copies(compiled, pages.spec) == []
