"""Wrong arguments are refused with what was got and what was expected."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import (
    PagedMetadata,
    paged_attention,
    plan_attention,
    validate_dynamic,
    validate_static,
    write_kv,
)
from tests.arg_specs import ARG_SPECS, ArgSpec, Inputs, make_inputs, make_metadata

SPEC = ArgSpec("mixed", (1, 1, 7), (9, 1, 12), pad_rows=1, pad_tokens=3)


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return make_inputs(SPEC)


def test_right_arguments_pass(inputs: Inputs) -> None:
    validate_static(inputs.q, inputs.kv_pages, inputs.meta, **inputs.options(SPEC))


@pytest.mark.parametrize("spec", [spec for spec in ARG_SPECS if not spec.slow], ids=lambda spec: spec.name)
def test_the_shared_shapes_keep_the_contract(spec: ArgSpec) -> None:
    meta = make_metadata(spec, np.random.default_rng(0), forget_behind_window=False)
    validate_dynamic(meta, spec.page_spec)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((12, 4, 8), "float32", r"q.shape=\(12, 4, 8\); expected D = 16 from kv_pages.spec.head_dim"),
        ((12, 5, 16), "float32", "multiple of Hkv = 2"),
        ((12, 4, 16), "int32", "expected float32, bfloat16 or float16"),
        ((13, 4, 16), "float32", r"meta.positions: x.shape=\(12,\).*T = 13"),
        ((0, 4, 16), "float32", "at least one token"),
        ((12, 16), "float32", r"expected \[T, Hq, D\]"),
    ],
)
def test_wrong_queries(inputs: Inputs, shape: tuple[int, ...], dtype: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_static(jnp.zeros(shape, dtype), inputs.kv_pages, inputs.meta)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.0}, "scale=0.0"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"soft_cap": -1.0}, "soft_cap=-1.0"),
        ({"sinks": jnp.zeros(3)}, r"sinks.shape=\(3,\).*expected \(4,\) float32"),
        ({"sinks": jnp.zeros(4, jnp.bfloat16)}, "expected .4,. float32"),
    ],
)
def test_wrong_options(inputs: Inputs, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_static(inputs.q, inputs.kv_pages, inputs.meta, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": jnp.zeros((3, 4, 4, 16))}, "from kv_pages.spec"),
        ({"data": jnp.zeros((16, 4, 4, 16), jnp.bfloat16)}, "from kv_pages.spec"),
        ({"scales": jnp.zeros((16, 16))}, "take no scales"),
    ],
)
def test_wrong_pages(inputs: Inputs, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_static(inputs.q, dataclasses.replace(inputs.kv_pages, **change), inputs.meta)


def test_missing_scales() -> None:
    quantized = make_inputs(dataclasses.replace(SPEC, page_dtype="int8"))
    with pytest.raises(ValueError, match="need f32 scales"):
        validate_static(quantized.q, dataclasses.replace(quantized.kv_pages, scales=None), quantized.meta)


def test_wrong_new_kv(inputs: Inputs) -> None:
    with pytest.raises(ValueError, match=r"Hkv and D from kv_pages.spec"):
        write_kv(inputs.k[:, :1], inputs.v[:, :1], inputs.kv_pages, inputs.meta)


def test_metadata_that_does_not_fit_together(inputs: Inputs) -> None:
    meta = dataclasses.replace(inputs.meta, page_table=inputs.meta.page_table[:2])
    with pytest.raises(ValueError, match=r"meta.page_table: x.shape=\(2, 4\).*S = 4 rows"):
        plan_attention(meta, inputs.kv_pages.spec)


def test_errors_come_at_trace_time(inputs: Inputs) -> None:
    with pytest.raises(ValueError, match="sliding_window=0"):
        jax.eval_shape(lambda q: paged_attention(q, inputs.kv_pages, inputs.meta, sliding_window=0), inputs.q)


def changed(meta: PagedMetadata, field: str, index: tuple[int, ...] | int, value: int) -> PagedMetadata:
    return dataclasses.replace(meta, **{field: getattr(meta, field).at[index].set(value)})


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("num_seqs", (), 5, "num_decode <= num_seqs <= 4"),
        ("num_decode", (), 3, r"expected 1 to 1 \(max_decode_tokens\)"),
        ("cu_q_lens", 0, 1, "prefix sums from 0"),
        ("cu_q_lens", 1, 3, "growing"),
        ("cu_q_lens", slice(3, 5), 13, "at most T = 12"),
        ("kv_lens", 3, 1, "padding; expected q_len 0 and kv_len 0"),
        ("kv_lens", 2, 6, "expected q_len <= kv_len"),
        ("page_table", (0, 0), 99, r"outside \[0, 10\)"),
        ("page_table", (0, 0), -1, "outside"),
        ("page_table", (1, 2), 3, "must be 0, the null page"),
        ("kv_lens", 0, 40, "the page table holds 4"),
        ("positions", 0, 3, "has position 3; expected 8"),
        ("slot_mapping", 1, 0, "token 1 of row 1 has slot 0"),
        ("slot_mapping", 11, 7, "are padding"),
    ],
)
def test_values_that_break_the_contract(inputs: Inputs, field: str, index, value: int, message: str) -> None:
    validate_dynamic(inputs.meta, inputs.kv_pages.spec)
    with pytest.raises(ValueError, match=message):
        validate_dynamic(changed(inputs.meta, field, index, value), inputs.kv_pages.spec)


def test_a_page_that_two_rows_see_is_not_written(inputs: Inputs) -> None:
    meta = inputs.meta
    page = int(meta.page_table[1, 0])  # row 1 writes to it
    with pytest.raises(ValueError, match=f"page {page}, which rows .0, 1. share"):
        validate_dynamic(changed(meta, "page_table", (0, 0), page), inputs.kv_pages.spec)
    # Sharing a page that nobody writes is what prefix caching does.
    shared = int(meta.page_table[2, 0])
    validate_dynamic(changed(meta, "page_table", (0, 0), shared), inputs.kv_pages.spec)


def test_decode_rows_may_have_as_many_tokens_as_speculation_is_wide() -> None:
    inputs = make_inputs(ArgSpec("speculation", (3, 1, 2, 7), (9, 4, 2, 12), pad_rows=1))
    meta = dataclasses.replace(inputs.meta, num_decode=jnp.int32(3))
    validate_dynamic(meta, inputs.kv_pages.spec, max_decode_tokens=3)
    with pytest.raises(ValueError, match=r"are \[3, 1, 2\]; expected 1 to 2 \(max_decode_tokens\)"):
        validate_dynamic(meta, inputs.kv_pages.spec, max_decode_tokens=2)
    with pytest.raises(ValueError, match="max_decode_tokens=0; expected at least 1"):
        validate_dynamic(meta, inputs.kv_pages.spec, max_decode_tokens=0)
    # The split into decode and prefill follows q_lens, so what is announced changes no output.
    out = paged_attention(inputs.q, inputs.kv_pages, meta)
    np.testing.assert_array_equal(out, paged_attention(inputs.q, inputs.kv_pages, inputs.meta))
