"""`write_kv`: into the right slots, and in place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import attend_and_write, gather_pages, write_kv
from jpaged.pallas_kernels.kv_write import write_kv_xla
from tests.arg_specs import ArgSpec, make_inputs, zero_pages
from tests.kernels.hlo import pool_copies

MIXED = ArgSpec("mixed", (1, 1, 7), (9, 1, 12), pad_rows=1, pad_tokens=3)


@pytest.mark.parametrize("page_dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("implementation", ["xla", "mosaic_tpu"])
def test_written_pages_are_the_expected_ones(page_dtype: str, implementation: str) -> None:
    inputs = make_inputs(dataclasses.replace(MIXED, page_dtype=page_dtype, implementation=implementation))
    written = jax.jit(write_kv_xla)(inputs.k, inputs.v, inputs.pages_before, inputs.meta)
    # All but the null page, where padding went: bit for bit, the NaNs of free slots included.
    for got, expected in zip(jax.tree.leaves(written), jax.tree.leaves(inputs.kv_pages), strict=True):
        np.testing.assert_array_equal(np.asarray(got)[1:].view(np.uint8), np.asarray(expected)[1:].view(np.uint8))


def test_padding_goes_to_the_null_page() -> None:
    inputs = make_inputs(MIXED)
    live = sum(MIXED.q_lens)
    k, v = (x.at[live:].set(jnp.nan) for x in (inputs.k, inputs.v))
    written = write_kv(k, v, zero_pages(MIXED), inputs.meta)
    assert not jnp.isnan(written.data[1:]).any()
    assert jnp.isnan(written.data[0, 0]).all()


def test_one_token() -> None:
    spec = ArgSpec("one", (1,), (6,))
    inputs = make_inputs(spec)
    k, v = gather_pages(write_kv(inputs.k, inputs.v, zero_pages(spec), inputs.meta), inputs.meta.page_table[0, 1:2])
    np.testing.assert_array_equal(k[0, 1], inputs.k[0])
    np.testing.assert_array_equal(v[0, 1], inputs.v[0])
    np.testing.assert_array_equal(k[0, 0], 0)


@pytest.mark.parametrize("page_dtype", ["float32", "int8"])
@pytest.mark.parametrize("spec", [MIXED, ArgSpec("one", (1,), (6,))], ids=lambda spec: spec.name)
def test_a_donated_step_does_not_copy_the_pool(spec: ArgSpec, page_dtype: str) -> None:
    spec = dataclasses.replace(spec, page_dtype=page_dtype)
    inputs = make_inputs(spec)

    def step(q, k, v, layers, meta):
        written = []
        for kv_pages in layers:
            q, kv_pages = attend_and_write(q, k, v, kv_pages, meta)
            written.append(kv_pages)
        return q, written

    layers = [zero_pages(spec), zero_pages(spec)]
    compiled = jax.jit(step, donate_argnums=3).lower(inputs.q, inputs.k, inputs.v, layers, inputs.meta).compile()
    assert pool_copies(compiled, spec.page_spec) == []
    donated = sum(x.nbytes for x in jax.tree.leaves(layers))
    assert compiled.memory_analysis().alias_size_in_bytes >= donated


@pytest.mark.parametrize("page_dtype", ["float32", "int8"])
@pytest.mark.parametrize("spec", [MIXED, ArgSpec("one", (1,), (6,))], ids=lambda spec: spec.name)
def test_a_donated_write_does_not_copy_pages_of_the_tpu(spec: ArgSpec, page_dtype: str) -> None:
    inputs = make_inputs(dataclasses.replace(spec, page_dtype=page_dtype, implementation="mosaic_tpu"))
    write = jax.jit(write_kv_xla, donate_argnums=2)
    compiled = write.lower(inputs.k, inputs.v, inputs.pages_before, inputs.meta).compile()
    assert pool_copies(compiled, inputs.pages_before.spec) == []


def test_the_search_for_copies_finds_one() -> None:
    inputs = make_inputs(MIXED)
    compiled = jax.jit(write_kv).lower(inputs.k, inputs.v, inputs.pages_before, inputs.meta).compile()
    assert pool_copies(compiled, MIXED.page_spec)  # not donated, so it must be copied
