"""The XLA implementation against the dense reference, on every shape of the shared list."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels import PagedMetadata, current_platform, paged_attention, plan_attention
from jpaged.pallas_kernels.reference import paged_attention_reference
from jpaged.pallas_kernels.xla_plan import plan_xla
from tests.arg_specs import ARG_SPEC_PARAMS, ARG_SPECS, ArgSpec, Inputs, make_inputs

# Everything is accumulated in f32 whatever the pages' dtype, and quantised values reach the reference dequantised, so
# f32 queries differ by rounding only: some ten roundings of 6e-8 on values of order 1; 2e-5 leaves room for long sums.
# 16-bit outputs are rounded once more, by half a unit in the last place: 2**-9 (bf16) or 2**-12 (fp16) of the value.
TOLERANCE = {
    "float32": {"rtol": 2e-5, "atol": 2e-5},
    "bfloat16": {"rtol": 2**-8, "atol": 2e-5},
    "float16": {"rtol": 2**-11, "atol": 2e-5},
}
# On accelerators, where q is 16-bit, the weights (at most 1) are rounded to its dtype too before they meet V (some 4 at
# most).
ACCELERATOR_16BIT = {"rtol": 2**-8, "atol": 4 * 2**-9}


def tolerance_of(dtype: str, *, accelerator: bool) -> dict[str, float]:
    return ACCELERATOR_16BIT if accelerator and dtype != "float32" else TOLERANCE[dtype]


@partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap"))
def _attend(q, kv_pages, meta, **options):
    return paged_attention(q, kv_pages, meta, return_lse=True, implementation="xla", **options)


def attend(inputs: Inputs, spec: ArgSpec) -> tuple[np.ndarray, np.ndarray]:
    out, lse = _attend(inputs.q, inputs.kv_pages, inputs.meta, **inputs.options(spec))
    assert out.dtype == spec.dtype
    assert lse.dtype == jnp.float32
    return np.asarray(out).astype(np.float32), np.asarray(lse)


@pytest.mark.parametrize("spec", ARG_SPEC_PARAMS)
def test_equals_reference(spec: ArgSpec) -> None:
    inputs = make_inputs(spec)
    out, lse = attend(inputs, spec)
    expected, expected_lse = paged_attention_reference(inputs.q, inputs.kv_pages, inputs.meta, **inputs.options(spec))
    np.testing.assert_allclose(out, expected, **tolerance_of(spec.dtype, accelerator=current_platform() != "cpu"))
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)
    live = sum(spec.q_lens)
    assert (out[live:] == 0).all()
    assert np.isneginf(lse[live:]).all()


@st.composite
def ragged_specs(draw: st.DrawFn) -> ArgSpec:
    rows = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=5))
    rows.sort(key=lambda row: row[0] != 1)
    # Few padded shapes, so that few programs are compiled; the mix itself is data.
    return ArgSpec(
        "random",
        q_lens=tuple(q_len for q_len, _ in rows),
        kv_lens=tuple(q_len + before for q_len, before in rows),
        sliding_window=draw(st.sampled_from([None, 4])),
        pad_rows=5 - len(rows),
        pad_tokens=45 - sum(q_len for q_len, _ in rows),
    )


@settings(max_examples=15)
@given(ragged_specs(), st.integers(0, 2**16))
def test_random_mixes(spec: ArgSpec, seed: int) -> None:
    longest = max(-(-kv_len // spec.page_size) for kv_len in spec.kv_lens)
    spec = dataclasses.replace(spec, pad_pages=8 - longest, free_pages=41 - spec.num_live_pages)
    inputs = make_inputs(spec, seed)
    out, lse = attend(inputs, spec)
    expected, expected_lse = paged_attention_reference(inputs.q, inputs.kv_pages, inputs.meta, **inputs.options(spec))
    np.testing.assert_allclose(out, expected, **TOLERANCE["float32"])
    np.testing.assert_allclose(lse, expected_lse, **TOLERANCE["float32"])


@pytest.mark.parametrize("window", [None, 7])
def test_row_alone_equals_row_in_batch(window: int | None) -> None:
    spec = ArgSpec(
        "batch", (1,) * 9 + (70, 3), (300, 2, 129, 1, 5, 128, 127, 64, 9, 200, 3), sliding_window=window, pad_tokens=2
    )
    inputs = make_inputs(spec)
    together, together_lse = attend(inputs, spec)
    meta = inputs.meta
    for row, q_len in enumerate(spec.q_lens):
        begin = int(meta.cu_q_lens[row])
        # Same padded shapes, so the same program: what is left to differ is the company.
        order = jnp.array([row, *[0] * (len(spec.q_lens) - 1)])
        alone = PagedMetadata(
            page_table=meta.page_table[order].at[1:].set(0),
            kv_lens=meta.kv_lens[order].at[1:].set(0),
            cu_q_lens=jnp.full_like(meta.cu_q_lens, q_len).at[0].set(0),
            positions=jnp.roll(meta.positions, -begin).at[q_len:].set(0),
            slot_mapping=jnp.roll(meta.slot_mapping, -begin).at[q_len:].set(0),
            num_decode=jnp.int32(q_len == 1),
            num_seqs=jnp.int32(1),
        )
        inputs_alone = dataclasses.replace(inputs, q=jnp.roll(inputs.q, -begin, axis=0), meta=alone)
        out, lse = attend(inputs_alone, spec)
        # Exactly equal: a row's pages are summed in the same order, and a trip that others need leaves it as it was.
        np.testing.assert_array_equal(out[:q_len], together[begin : begin + q_len])
        np.testing.assert_array_equal(lse[:q_len], together_lse[begin : begin + q_len])


def test_lse_joins_two_halves_of_a_context() -> None:
    """The use of log-sum-exps: attention over a whole context from attention over its parts."""
    spec = ArgSpec("whole", (1,), (32,))
    inputs = make_inputs(spec)
    whole, _ = attend(inputs, spec)
    meta, parts = inputs.meta, []
    for columns in (slice(0, 4), slice(4, 8)):
        table = jnp.zeros_like(meta.page_table).at[:, :4].set(meta.page_table[:, columns])
        half = dataclasses.replace(meta, page_table=table, kv_lens=jnp.array([16], jnp.int32))
        parts.append(attend(dataclasses.replace(inputs, meta=half), spec))
    weights = jax.nn.softmax(jnp.stack([lse for _, lse in parts]), axis=0)
    joined = sum(np.asarray(w)[..., None] * out for w, (out, _) in zip(weights, parts, strict=True))
    np.testing.assert_allclose(joined, whole, **TOLERANCE["float32"])


def _temporary_bytes(*, pages_per_row: int, num_pages: int, q_len: int = 64) -> int:
    spec = ArgSpec("memory", (1,) * 8 + (q_len,), (9,) * 8 + (q_len,), pad_pages=pages_per_row)
    inputs = make_inputs(spec)
    pool = jax.ShapeDtypeStruct((num_pages, *inputs.kv_pages.data.shape[1:]), jnp.float32)
    kv_pages = dataclasses.replace(
        inputs.kv_pages, data=pool, spec=dataclasses.replace(inputs.kv_pages.spec, num_pages=num_pages)
    )
    compiled = _attend.lower(inputs.q, kv_pages, inputs.meta, **inputs.options(spec)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_temporaries_do_not_grow_with_the_context_or_the_pool() -> None:
    small = _temporary_bytes(pages_per_row=8, num_pages=64)
    large = _temporary_bytes(pages_per_row=4096, num_pages=40_000)
    assert large == small
    # A gathered context of the large call would take 9 rows * 4096 pages * 1 KiB = 37 MB. Accelerators walk more pages
    # at a time.
    assert large < (2**21 if current_platform() == "cpu" else 2**23)


@pytest.mark.parametrize(
    "name",
    ["mixed", "bfloat16", "everything", "float8_for_bfloat16", "int8_for_float16", "float8_for_float16"],
)
def test_as_on_an_accelerator(name: str) -> None:
    """The choices made for GPUs and TPUs, run on whatever is here."""
    spec = next(spec for spec in ARG_SPECS if spec.name == name)
    inputs = make_inputs(spec)
    work = plan_xla(inputs.meta, spec.page_size, "gpu")
    assert work.blocks.accelerator
    out, lse = attend(dataclasses.replace(inputs, meta=dataclasses.replace(inputs.meta, work=work)), spec)
    expected, expected_lse = paged_attention_reference(inputs.q, inputs.kv_pages, inputs.meta, **inputs.options(spec))
    np.testing.assert_allclose(out, expected, **tolerance_of(spec.dtype, accelerator=True))
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("page_dtype", ["int8", "float8_e4m3fn"])
def test_small_values_keep_their_digits_in_float16(page_dtype: str) -> None:
    """Weights times scales of V, some 1e-3 * 1e-5 here, are below what fp16 can hold; the outputs are not."""
    spec = ArgSpec("small", (1, 5), (900, 300), dtype="float16", page_dtype=page_dtype)
    inputs = make_inputs(spec)
    page_spec = spec.page_spec
    by_kind = inputs.kv_pages.scales.reshape(page_spec.num_pages, spec.num_kv_heads, 2, spec.page_size)
    scales = by_kind.at[:, :, 1].multiply(1e-3).reshape(inputs.kv_pages.scales.shape)
    kv_pages = dataclasses.replace(inputs.kv_pages, scales=scales)
    meta = dataclasses.replace(inputs.meta, work=plan_xla(inputs.meta, spec.page_size, "gpu"))
    out, _ = attend(dataclasses.replace(inputs, kv_pages=kv_pages, meta=meta), spec)
    expected, _ = paged_attention_reference(inputs.q, kv_pages, inputs.meta)
    assert np.abs(out - expected).max() < 2**-7 * np.std(expected)


def test_planned_once_equals_planned_inside() -> None:
    spec = ArgSpec("mixed", (1, 1, 7), (9, 2, 12), pad_rows=1)
    inputs = make_inputs(spec)
    planned = jax.jit(plan_attention, static_argnums=1)(inputs.meta, inputs.kv_pages.spec)
    out, _ = attend(inputs, spec)
    again, _ = attend(dataclasses.replace(inputs, meta=planned), spec)
    np.testing.assert_array_equal(out, again)
