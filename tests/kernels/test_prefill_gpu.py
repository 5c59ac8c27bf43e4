"""The prefill kernel: lowered for CUDA anywhere, compared with the dense reference where a Hopper GPU is."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import paged_attention
from jpaged.pallas_kernels.prefill_tuning_gpu import choose_prefill_blocks, fills_the_chip, has_prefill_tiles
from jpaged.pallas_kernels.reference import paged_attention_reference
from tests.arg_specs import ArgSpec, Inputs, make_inputs
from tests.kernels.hlo import pool_copies
from tests.kernels.test_decode_gpu import abstract_hopper, layers, needs_jax_011

_CHUNKS = {
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "page_size": 16,
    "dtype": "bfloat16",
    "page_dtype": "bfloat16",
    "q_lens": (1, 1, 2, 250, 130, 67),
    "kv_lens": (9, 300, 700, 250, 1000, 68),
    "pad_rows": 2,
    "pad_tokens": 5,
}


def spec(name: str, **changes) -> ArgSpec:
    return ArgSpec(name, **{**_CHUNKS, **changes})


_INT8, _FLOAT8 = ({"page_dtype": dtype} for dtype in ("int8", "float8_e4m3fn"))
_EVERYTHING = {"scale": 0.3, "sliding_window": 70, "soft_cap": 4.0, "sinks": True}
PREFILL_SPECS = (
    spec("mixed"),
    spec("no_decode_rows", q_lens=(250, 130, 67), kv_lens=(250, 1000, 68)),
    spec("decode_rows_among_more_tokens", q_lens=(1,) * 9, kv_lens=(1, 15, 16, 17, 200, 1500, 2, 3, 4), pad_tokens=400),
    spec(
        "short_chunk_of_a_long_row", q_lens=(1, 16, 300), kv_lens=(9, 8000, 300), pad_tokens=120
    ),  # by decode's kernel
    spec("window", sliding_window=100),
    spec("window_of_one", sliding_window=1),
    spec("window_of_some_blocks", sliding_window=300),
    spec("soft_cap", soft_cap=3.0),
    spec("sinks", sinks=True),
    spec("everything", **_EVERYTHING),
    spec("large_scores", scale=8.0),
    spec("float16", dtype="float16", page_dtype="float16"),
    spec("head_dim_64", head_dim=64, num_heads=64, num_kv_heads=16),
    spec("head_dim_96", head_dim=96),
    spec("head_dim_256", head_dim=256),
    spec("smollm2_heads", head_dim=64, num_heads=63, num_kv_heads=21),
    spec("mha", num_heads=32, num_kv_heads=32),
    spec("group_of_16", num_heads=128),
    spec("group_of_64", num_heads=64, num_kv_heads=1),
    spec("page_of_8", page_size=8),
    spec("page_of_24", page_size=24),
    spec("head_dim_64_page_of_24", head_dim=64, num_heads=64, num_kv_heads=16, page_size=24),
    spec("page_of_128", page_size=128, sliding_window=100),
    spec("page_of_256", page_size=256),
    spec("int8", **_INT8),
    spec("float8", **_FLOAT8),
    spec("int8_everything", **_INT8, **_EVERYTHING),
    spec("float8_everything", **_FLOAT8, **_EVERYTHING),
    spec("float8_window_of_some_blocks", **_FLOAT8, sliding_window=300),
    spec("int8_for_float16", **_INT8, dtype="float16"),
    spec("float8_for_float16", **_FLOAT8, dtype="float16"),
    spec("int8_head_dim_64", **_INT8, head_dim=64, num_heads=64, num_kv_heads=16),
    spec("float8_head_dim_96", **_FLOAT8, head_dim=96),
    spec("int8_page_of_8", **_INT8, page_size=8),
    spec("float8_page_of_24", **_FLOAT8, page_size=24),
    spec("float8_page_of_128", **_FLOAT8, page_size=128, sliding_window=100),
)
# Those that take another way through the kernel's code, or another tile.
LOWERED = ("everything", "head_dim_256", "float8_everything")


def test_the_shapes_are_those_of_the_prefill_kernel() -> None:
    for spec in PREFILL_SPECS:
        itemsize, group = spec.page_spec.dtype.itemsize, spec.num_heads // spec.num_kv_heads
        blocks = choose_prefill_blocks(spec.head_dim, 132, itemsize)
        assert has_prefill_tiles(spec.head_dim, itemsize), spec.name
        assert spec.num_tokens > len(spec.q_lens) + spec.pad_rows, spec.name
        assert fills_the_chip(spec.num_tokens, group, spec.num_kv_heads, blocks), spec.name


@needs_jax_011
@pytest.mark.parametrize("name", LOWERED)
def test_mixed_steps_are_two_kernels_with_one_output(name: str) -> None:
    spec = next(spec for spec in PREFILL_SPECS if spec.name == name)
    inputs = make_inputs(spec)
    op = partial(paged_attention, implementation="mosaic_gpu", return_lse=True, **inputs.options(spec))
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        text = jax.jit(op).trace(inputs.q, inputs.kv_pages, inputs.meta).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    assert len(calls) == 2
    decode, prefill = calls
    assert "output_operand_alias<" not in decode
    assert len(re.findall("output_operand_alias<", prefill)) == 2  # the outputs and the log-sum-exps of the other


@needs_jax_011
def test_small_steps_are_one_kernel() -> None:
    inputs = make_inputs(spec("small", q_lens=(1, 1, 20), kv_lens=(9, 300, 700)))
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        traced = jax.jit(layers).trace(inputs.q, inputs.k, inputs.v, inputs.pages_before, inputs.meta)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "@attend" in text
    assert "@prefill" not in text


@partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap"))
def _attend(q, kv_pages, meta, **options):
    return paged_attention(q, kv_pages, meta, return_lse=True, implementation="mosaic_gpu", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", PREFILL_SPECS, ids=lambda spec: spec.name)
def test_equals_reference_and_repeats_bit_by_bit(spec: ArgSpec) -> None:
    inputs, results = make_inputs(spec), []
    for _ in range(3):
        out, lse = _attend(inputs.q, inputs.kv_pages, inputs.meta, **inputs.options(spec))
        results.append((np.asarray(out.astype(jnp.float32)), np.asarray(lse)))
    out, lse = results[0]
    for again, lse_again in results[1:]:
        np.testing.assert_array_equal(out, again)
        np.testing.assert_array_equal(lse, lse_again)
    expected, expected_lse = paged_attention_reference(inputs.q, inputs.kv_pages, inputs.meta, **inputs.options(spec))
    # The weights, at most 1, are rounded to 16 bits before they meet V (some 4 at most), and the sum is once more.
    np.testing.assert_allclose(out, expected, rtol=2**-8, atol=4 * 2**-9)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)
    live = sum(spec.q_lens)
    assert (out[live:] == 0).all()
    assert np.isneginf(lse[live:]).all()


def _all_codes(mask: int, value_scale: float) -> Inputs:
    """Pages of float8_e4m3fn whose values are random bits of `mask`, but no NaN."""
    shape = spec("codes", **_FLOAT8, q_lens=(250, 130, 67), kv_lens=(250, 1000, 68))
    inputs = make_inputs(shape)
    pages = inputs.kv_pages
    codes = np.random.default_rng(0).integers(0, 256, pages.data.shape).astype(np.uint8) & mask
    codes = np.where(codes & 0x7F == 0x7F, codes & 0xFE, codes).astype(np.uint8)
    scales = np.full((pages.spec.num_pages, shape.num_kv_heads, 2, shape.page_size), value_scale, np.float32)
    scales[:, :, 0] = 1e-3
    data = jnp.asarray(codes.view(jnp.float8_e4m3fn))
    pages = dataclasses.replace(pages, data=data, scales=jnp.asarray(scales.reshape(pages.spec.scales_shape)))
    return dataclasses.replace(inputs, kv_pages=pages)


@pytest.mark.gpu
@pytest.mark.parametrize(("mask", "value_scale"), [(0xFF, 0.01), (0x87, 64.0)], ids=["all", "subnormal"])
def test_every_float8_is_converted(mask: int, value_scale: float) -> None:
    inputs = _all_codes(mask, value_scale)
    out, _ = _attend(inputs.q, inputs.kv_pages, inputs.meta)
    expected, _ = paged_attention_reference(inputs.q, inputs.kv_pages, inputs.meta)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=2**-8, atol=4 * 2**-9)


@pytest.mark.gpu
def test_neither_pool_nor_outputs_are_copied() -> None:
    inputs = make_inputs(PREFILL_SPECS[0])
    arguments = inputs.q, inputs.k, inputs.v, inputs.pages_before, inputs.meta
    compiled = jax.jit(partial(layers, count=2), donate_argnums=3).lower(*arguments).compile()
    assert pool_copies(compiled, inputs.kv_pages.spec) == []
    shape = ",".join(map(str, inputs.q.shape))
    copies = [line for line in compiled.as_text().splitlines() if re.search(rf"bf16\[{shape}\]\S* copy\(", line)]
    assert copies == []
