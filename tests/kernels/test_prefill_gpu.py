"""The prefill kernel: lowered for CUDA anywhere, compared with the dense reference where a Hopper GPU is."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import paged_attention
from jpaged.pallas_kernels.prefill_tuning_gpu import choose_prefill_blocks, fills_the_chip
from jpaged.pallas_kernels.reference import paged_attention_reference
from tests.arg_specs import ArgSpec, make_inputs
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


PREFILL_SPECS = (
    spec("mixed"),
    spec("no_decode_rows", q_lens=(250, 130, 67), kv_lens=(250, 1000, 68)),
    spec("decode_rows_among_more_tokens", q_lens=(1,) * 9, kv_lens=(1, 15, 16, 17, 200, 1500, 2, 3, 4), pad_tokens=400),
    spec("window", sliding_window=100),
    spec("window_of_one", sliding_window=1),
    spec("window_of_some_blocks", sliding_window=300),
    spec("soft_cap", soft_cap=3.0),
    spec("sinks", sinks=True),
    spec("everything", scale=0.3, sliding_window=70, soft_cap=4.0, sinks=True),
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
    spec("page_of_128", page_size=128, sliding_window=100),
    spec("page_of_256", page_size=256),
)
# Those that take another way through the kernel's code, or another tile.
LOWERED = ("everything", "head_dim_256")


def test_the_shapes_are_those_of_the_prefill_kernel() -> None:
    for spec in PREFILL_SPECS:
        blocks, group = choose_prefill_blocks(spec.head_dim, 132), spec.num_heads // spec.num_kv_heads
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


@pytest.mark.gpu
def test_neither_pool_nor_outputs_are_copied() -> None:
    inputs = make_inputs(PREFILL_SPECS[0])
    arguments = inputs.q, inputs.k, inputs.v, inputs.pages_before, inputs.meta
    compiled = jax.jit(partial(layers, count=2), donate_argnums=3).lower(*arguments).compile()
    assert pool_copies(compiled, inputs.kv_pages.spec) == []
    shape = ",".join(map(str, inputs.q.shape))
    copies = [line for line in compiled.as_text().splitlines() if re.search(rf"bf16\[{shape}\]\S* copy\(", line)]
    assert copies == []
