"""The Mosaic GPU kernel: lowered for CUDA anywhere, compared with the dense reference where a Hopper GPU is."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import attend_and_write, paged_attention, plan_attention
from jpaged.pallas_kernels.compat import current_gpu, jax_version
from jpaged.pallas_kernels.reference import paged_attention_reference
from tests.arg_specs import ArgSpec, Inputs, make_inputs
from tests.kernels.hlo import pool_copies

_16BIT = {
    "head_dim": 128,
    "page_size": 16,
    "num_heads": 8,
    "num_kv_heads": 2,
    "dtype": "bfloat16",
    "page_dtype": "bfloat16",
}
_DECODE = {"q_lens": (1,) * 6, "kv_lens": (1, 15, 16, 17, 200, 1500)}
_MIXED = {"q_lens": (1, 1, 3, 70, 2), "kv_lens": (9, 300, 700, 170, 64), "pad_rows": 2, "pad_tokens": 5}


def spec(name: str, **changes) -> ArgSpec:
    return ArgSpec(name, **{**_16BIT, **_DECODE, **changes})


GPU_SPECS = (
    spec("decode"),
    spec("decode_padded", pad_rows=3, pad_tokens=2),
    spec("decode_among_more_tokens", pad_tokens=3),  # more tokens than rows: the wide kind of tile
    spec("one_long_row", q_lens=(1,), kv_lens=(9000,)),
    spec("several_tokens_a_row", q_lens=(1, 2, 3), kv_lens=(9, 300, 66), pad_rows=4, sliding_window=90, sinks=True),
    spec("mixed", **_MIXED),
    spec("window", **_MIXED, sliding_window=100),
    spec("window_of_one", sliding_window=1),
    spec("soft_cap", soft_cap=3.0),
    spec("sinks", **_MIXED, sinks=True),
    spec("everything", **_MIXED, scale=0.3, sliding_window=70, soft_cap=4.0, sinks=True),
    spec("everything_decode", scale=0.3, sliding_window=70, soft_cap=4.0, sinks=True),
    spec("float16", dtype="float16", page_dtype="float16"),
    spec("head_dim_64", **_MIXED, head_dim=64),
    spec("smollm2_heads_decode", head_dim=64, num_heads=9, num_kv_heads=3),
    spec("smollm2_heads", **_MIXED, head_dim=64, num_heads=9, num_kv_heads=3),
    spec("head_dim_96", head_dim=96),
    spec("head_dim_256", head_dim=256),
    spec("mha", num_heads=2),
    spec("group_of_16", num_heads=32),
    spec("page_of_8", page_size=8),
    spec("page_of_24", page_size=24),
    spec("page_of_64", page_size=64),
    spec("page_of_128", page_size=128, sliding_window=100),
)
# Those that take another way through the kernel's code, or another tile.
LOWERED = (
    "decode",
    "mixed",
    "everything",
    "everything_decode",
    "float16",
    "smollm2_heads_decode",
    "smollm2_heads",
    "head_dim_96",
    "head_dim_256",
    "group_of_16",
    "page_of_24",
    "page_of_128",
)
needs_jax_011 = pytest.mark.skipif(jax_version() < (0, 11), reason="the kernel needs jax 0.11")


def abstract_hopper() -> jax.sharding.AbstractMesh:
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    return jax.sharding.AbstractMesh((1,), ("x",), (jax.sharding.AxisType.Auto,), abstract_device=device)


def layers(q, k, v, kv_pages, meta, count: int = 1):
    """As a model does it: planned once, the next layer's queries from the output of the last."""
    meta = plan_attention(meta, kv_pages.spec)
    for _ in range(count):
        q, kv_pages = attend_and_write(q, k, v, kv_pages, meta, implementation="mosaic_gpu")
    return q, kv_pages


@needs_jax_011
def test_equal_layers_share_a_lowered_kernel() -> None:
    inputs = make_inputs(GPU_SPECS[0])
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        traced = jax.jit(partial(layers, count=3)).trace(inputs.q, inputs.k, inputs.v, inputs.pages_before, inputs.meta)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("call @attend") == 3
    assert text.count("custom_call @mosaic_gpu") <= 2  # the first layer's queries are an argument and not a result


@needs_jax_011
def test_what_the_kernel_does_not_run_goes_to_xla_or_is_refused() -> None:
    inputs = make_inputs(ArgSpec("float32", (1,), (9,), head_dim=64, page_size=16))
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        trace = jax.jit(paged_attention, static_argnames="implementation").trace
        text = trace(inputs.q, inputs.kv_pages, inputs.meta).lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" not in text
        with pytest.raises(NotImplementedError, match="these are float32"):
            trace(inputs.q, inputs.kv_pages, inputs.meta, implementation="mosaic_gpu")


@partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap"))
def _attend(q, kv_pages, meta, **options):
    return paged_attention(q, kv_pages, meta, return_lse=True, implementation="mosaic_gpu", **options)


def check(inputs: Inputs, spec: ArgSpec) -> tuple[np.ndarray, np.ndarray]:
    out, lse = _attend(inputs.q, inputs.kv_pages, inputs.meta, **inputs.options(spec))
    out, lse = np.asarray(out.astype(jnp.float32)), np.asarray(lse)
    expected, expected_lse = paged_attention_reference(inputs.q, inputs.kv_pages, inputs.meta, **inputs.options(spec))
    # The weights, at most 1, are rounded to 16 bits before they meet V (some 4 at most), and the sum is once more.
    np.testing.assert_allclose(out, expected, rtol=2**-8, atol=4 * 2**-9)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)
    live = sum(spec.q_lens)
    assert (out[live:] == 0).all()
    assert np.isneginf(lse[live:]).all()
    return out, lse


@pytest.mark.gpu
@pytest.mark.parametrize("spec", GPU_SPECS, ids=lambda spec: spec.name)
def test_equals_reference_and_repeats_bit_by_bit(spec: ArgSpec) -> None:
    inputs = make_inputs(spec)
    out, lse = check(inputs, spec)
    for _ in range(3):
        again, lse_again = check(inputs, spec)
        np.testing.assert_array_equal(out, again)
        np.testing.assert_array_equal(lse, lse_again)


@pytest.mark.gpu
def test_without_log_sum_exps() -> None:
    inputs = make_inputs(GPU_SPECS[4])
    with_lse, _ = _attend(inputs.q, inputs.kv_pages, inputs.meta)
    out = jax.jit(partial(paged_attention, implementation="mosaic_gpu"))(inputs.q, inputs.kv_pages, inputs.meta)
    # Two programs: the compiler may contract products and sums differently, which shows in the last bit of bfloat16.
    np.testing.assert_allclose(out.astype(np.float32), with_lse.astype(np.float32), rtol=2**-7, atol=1e-6)


@pytest.mark.gpu
def test_the_pool_is_not_copied_and_the_plan_is_made_once() -> None:
    inputs = make_inputs(GPU_SPECS[0])
    arguments = inputs.q, inputs.k, inputs.v, inputs.pages_before, inputs.meta

    def compiled(count: int) -> jax.stages.Compiled:
        return jax.jit(partial(layers, count=count), donate_argnums=3).lower(*arguments).compile()

    one, three = compiled(1), compiled(3)
    assert pool_copies(three, inputs.kv_pages.spec) == []
    assert three.as_text().count('custom_call_target="mosaic_gpu') == 3
    more_fusions = three.as_text().count(" fusion(") - one.as_text().count(" fusion(")
    assert more_fusions <= 2 * 3  # the writes of two layers, and not two plans


@pytest.mark.gpu
def test_it_is_the_choice_on_hopper() -> None:
    gpu = current_gpu()
    assert gpu is not None
    assert gpu.is_hopper
    inputs = make_inputs(GPU_SPECS[0])
    assert "mosaic_gpu" in jax.jit(paged_attention).lower(inputs.q, inputs.kv_pages, inputs.meta).as_text()
