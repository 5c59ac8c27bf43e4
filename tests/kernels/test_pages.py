"""`PageSpec` and `make_pages`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import PageSpec, make_pages
from jpaged.pallas_kernels.pages import PAGE_DTYPES, QUANTIZED_DTYPES

PLAIN = {"num_pages": 8, "page_size": 4, "num_kv_heads": 3, "head_dim": 16, "dtype": "float32"}


@pytest.mark.parametrize("dtype", PAGE_DTYPES)
@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu", "mosaic_tpu"])
def test_bytes_per_page_are_those_of_the_arrays(dtype: str, implementation: str) -> None:
    spec = PageSpec(**{**PLAIN, "dtype": dtype}, implementation=implementation)
    pages = make_pages(spec)
    assert pages.data.shape == spec.data_shape
    assert pages.data.dtype == dtype
    assert (pages.scales is not None) == spec.quantized == (dtype in QUANTIZED_DTYPES)
    assert sum(x.nbytes for x in jax.tree.leaves(pages)) == spec.bytes_per_page * spec.num_pages
    assert not any(x.astype(jnp.float32).any() for x in jax.tree.leaves(pages))


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu", "mosaic_tpu"])
def test_logical_pages_of_a_slot_are_where_its_rows_are(implementation: str) -> None:
    spec = PageSpec(**{**PLAIN, "dtype": "int8"}, implementation=implementation)
    kv = np.arange(8 * 4 * 3 * 2 * 16).reshape(8, 4, 3, 2, 16)
    scales = np.arange(8 * 4 * 3 * 2).reshape(8, 4, 3, 2)
    data, stored_scales = spec.to_stored(kv, scales)
    assert data.shape == spec.data_shape
    assert stored_scales.shape == spec.scales_shape
    rows = slice(2 * spec.rows_per_token, 3 * spec.rows_per_token)  # those of slot 2
    np.testing.assert_array_equal(data[5, rows].reshape(3, 2, 16), kv[5, 2])
    by_row = stored_scales.reshape(spec.scales_by_row_shape)[5, :, rows]
    np.testing.assert_array_equal(by_row.T.reshape(3, 2), scales[5, 2])
    for convert in (np.asarray, jnp.asarray):
        back = spec.to_logical(convert(data[3:5]), convert(stored_scales[3:5]))
        for x, y in zip(back, (kv, scales), strict=True):
            np.testing.assert_array_equal(x, y[3:5])
    assert spec.to_logical(data)[1] is None
    assert spec.to_stored(kv)[1] is None


def test_equal_specs_are_one_static_argument() -> None:
    assert hash(PageSpec(**PLAIN)) == hash(PageSpec(**{**PLAIN, "dtype": jnp.float32}))
    assert PageSpec(**PLAIN) == PageSpec(**{**PLAIN, "dtype": jnp.float32})


def test_pages_are_a_pytree_with_a_static_spec() -> None:
    pages = make_pages(PageSpec(**PLAIN))
    assert len(jax.tree.leaves(pages)) == 1
    assert jax.tree.map(lambda x: x, pages).spec == pages.spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_pages": 1}, "null page"),
        ({"page_size": 0}, "page_size is 0"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"head_dim": -1}, "head_dim is -1"),
        ({"num_pages": 2**30, "page_size": 2}, "int32"),
        ({"num_pages": 2**29, "page_size": 2, "implementation": "mosaic_tpu"}, "3 rows"),
        ({"dtype": "int4"}, "dtype int4"),
        ({"dtype": "float64"}, "dtype float64"),
        ({"implementation": "triton"}, "'triton'"),
    ],
)
def test_wrong_specs_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PageSpec(**{**PLAIN, **change})
