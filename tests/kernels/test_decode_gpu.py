"""The Mosaic GPU kernel: lowered for CUDA anywhere, compared with the dense reference where a Hopper GPU is."""

import dataclasses
import math
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import PageSpec, attend_and_write, paged_attention, plan_attention
from jpaged.pallas_kernels.compat import current_gpu, jax_version
from jpaged.pallas_kernels.reference import paged_attention_reference
from jpaged.pallas_kernels.tuning import NARROW_ROWS, choose_gpu_blocks, scale_box
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
# With two KV heads as many units as the H200's table leaves to the rules; steps of fewer rows are its own.
_DECODE = {"q_lens": (1,) * 8, "kv_lens": (1, 15, 16, 17, 64, 65, 200, 1500)}
_MANY = {"q_lens": (1,) * 32, "kv_lens": (1, 64, 65, 700) * 8}
_MIXED = {"q_lens": (1, 1, 3, 70, 2), "kv_lens": (9, 300, 700, 170, 64), "pad_rows": 2, "pad_tokens": 5}


def spec(name: str, **changes) -> ArgSpec:
    return ArgSpec(name, **{**_16BIT, **_DECODE, **changes})


_PLAIN_SPECS = (
    spec("decode"),
    spec("decode_padded", pad_rows=3, pad_tokens=2),
    spec("decode_among_more_tokens", pad_tokens=3),  # more tokens than rows: the wide kind of tile
    spec("few_rows", q_lens=(1,) * 6, kv_lens=(1, 15, 16, 17, 200, 1500)),
    spec(
        "few_rows_everything", q_lens=(1, 1), kv_lens=(90, 1500), scale=0.3, sliding_window=70, soft_cap=4.0, sinks=True
    ),
    spec("one_long_row", q_lens=(1,), kv_lens=(9000,)),
    spec("several_tokens_a_row", q_lens=(1, 2, 3), kv_lens=(9, 300, 66), pad_rows=4, sliding_window=90, sinks=True),
    spec("mixed", **_MIXED),
    spec("window", **_MIXED, sliding_window=100),
    spec("window_of_one", sliding_window=1),
    spec("large_scores", scale=1.5),  # a later block's may be far above all before
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
_INT8, _FLOAT8 = ({"page_dtype": dtype} for dtype in ("int8", "float8_e4m3fn"))
_QUANTIZED_SPECS = (
    spec("int8", **_INT8),
    spec("float8", **_FLOAT8),
    spec("int8_many_rows", **{**_INT8, **_MANY}),
    spec("float8_many_rows", **{**_FLOAT8, **_MANY}, sinks=True),
    spec("int8_one_long_row", **_INT8, q_lens=(1,), kv_lens=(9000,)),
    spec("float8_padded", **_FLOAT8, pad_rows=3, pad_tokens=2),
    spec("float8_several_tokens", **_FLOAT8, q_lens=(1, 2, 3), kv_lens=(9, 300, 66), pad_rows=4, sliding_window=90),
    spec("int8_everything", **_INT8, **_MIXED, scale=0.3, sliding_window=70, soft_cap=4.0, sinks=True),
    spec("float8_everything", **_FLOAT8, **_MIXED, scale=0.3, sliding_window=70, soft_cap=4.0, sinks=True),
    spec("int8_everything_decode", **_INT8, scale=0.3, sliding_window=70, soft_cap=4.0, sinks=True),
    spec("float8_everything_decode", **_FLOAT8, scale=0.3, sliding_window=70, soft_cap=4.0, sinks=True),
    spec("int8_for_float16", **_INT8, dtype="float16"),
    spec("float8_for_float16", **_FLOAT8, **_MIXED, dtype="float16"),
    spec("int8_smollm2_heads", **_INT8, **_MIXED, head_dim=64, num_heads=9, num_kv_heads=3),
    spec("float8_smollm2_heads_decode", **_FLOAT8, head_dim=64, num_heads=9, num_kv_heads=3),
    spec("int8_head_dim_96", **_INT8, head_dim=96),
    spec("float8_head_dim_96", **_FLOAT8, **_MIXED, head_dim=96),
    spec("int8_head_dim_256", **_INT8, head_dim=256),
    spec("float8_head_dim_256", **_FLOAT8, **_MIXED, head_dim=256, sliding_window=70),
    spec("int8_mha", **_INT8, num_heads=2),
    spec("float8_group_of_16", **_FLOAT8, num_heads=32),
    spec("int8_page_of_8", **_INT8, page_size=8),
    spec("float8_page_of_24", **_FLOAT8, page_size=24),
    spec("int8_page_of_64", **_INT8, page_size=64),
    spec("float8_page_of_128", **_FLOAT8, page_size=128, sliding_window=100),
)
GPU_SPECS = _PLAIN_SPECS + _QUANTIZED_SPECS
# Those that take another way through the kernel's code, or another tile.
LOWERED = (
    "decode",
    "few_rows",
    "one_long_row",
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
    "int8",
    "int8_many_rows",
    "int8_one_long_row",
    "float8_everything",
    "float8_smollm2_heads_decode",
    "float8_group_of_16",
    "int8_smollm2_heads",
    "int8_head_dim_96",
    "float8_head_dim_96",
    "int8_head_dim_256",
    "float8_head_dim_256",
    "int8_page_of_8",
    "float8_page_of_24",
    "float8_page_of_128",
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
def test_every_tile_is_among_what_is_lowered_and_compiled() -> None:
    """A kind of tile at a head_dim is another kernel, and over 8-bit pages so is each number of its rows."""
    from jpaged.pallas_kernels.attention_gpu import choose_tile

    def tile(spec: ArgSpec) -> tuple[bool, bool, int, int]:
        num_tokens, num_rows = sum(spec.q_lens) + spec.pad_tokens, len(spec.q_lens) + spec.pad_rows
        group, quantized = spec.num_heads // spec.num_kv_heads, spec.page_spec.quantized
        tokens, narrow = choose_tile(num_tokens, num_rows, group, spec.head_dim)
        return quantized, narrow, spec.head_dim, -(-tokens * group // NARROW_ROWS) if quantized else 0

    compiled = {tile(spec) for spec in GPU_SPECS if spec.name in LOWERED}
    assert [spec.name for spec in GPU_SPECS if tile(spec) not in compiled] == []


@needs_jax_011
def test_equal_layers_share_a_lowered_kernel() -> None:
    inputs = make_inputs(GPU_SPECS[0])
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        traced = jax.jit(partial(layers, count=3)).trace(inputs.q, inputs.k, inputs.v, inputs.pages_before, inputs.meta)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("call @attend") == 3
    assert text.count("func.func private @attend") <= 2  # the first layer's queries are an argument and not a result


@needs_jax_011
def test_work_lists_of_announced_layers_are_made_once() -> None:
    inputs = make_inputs(GPU_SPECS[0])
    heads, kv_heads = inputs.q.shape[1], inputs.kv_pages.spec.num_kv_heads

    def attend(q, kv_pages, meta, announced: tuple, count: int):
        meta = plan_attention(meta, kv_pages.spec, layers=announced)
        assert set(meta.work.lists) == {(heads, kv_heads, window or 0) for _, window in announced}
        for _ in range(count):
            q = paged_attention(q, kv_pages, meta, implementation="mosaic_gpu")
        return q

    def sums(announced: tuple, count: int) -> int:  # of a list: rounds of reductions
        op = partial(attend, announced=announced, count=count)
        with jax.sharding.use_abstract_mesh(abstract_hopper()):
            return str(jax.make_jaxpr(op)(inputs.q, inputs.kv_pages, inputs.meta)).count(" reduce[")

    once = sums(((heads, None),), 3)
    assert once > 0
    assert sums((), 1) == once
    assert sums((), 2) > once
    assert sums(((heads, None), (heads, 64)), 0) > once
    with jax.sharding.use_abstract_mesh(abstract_hopper()), pytest.raises(ValueError, match="multiple of num_kv_heads"):
        plan_attention(inputs.meta, inputs.kv_pages.spec, layers=[(0, None)])


@needs_jax_011
@pytest.mark.parametrize(
    ("page_size", "columns"), [(8, [16, 17, 18, 19, 20, 21, 22, 23]), (24, [5, 5, 6, 6, 6, 7, 7, 7])]
)
def test_first_pages_are_those_of_the_first_blocks(page_size: int, columns: list[int]) -> None:
    """A worker that begins at slot 128 of row 1, one at the last block of row 0, and one without work."""
    from jpaged.pallas_kernels import gpu_plan as plan
    from jpaged.pallas_kernels.attention_gpu import find_first_pages

    spec = PageSpec(64, page_size, 2, 128, jnp.bfloat16, "mosaic_gpu")
    blocks = dataclasses.replace(choose_gpu_blocks(128, 132), consumers=1, num_blocks=3)
    table = jnp.arange(48, dtype=jnp.int32).reshape(2, 24) + 7
    meta = dataclasses.replace(make_inputs(GPU_SPECS[0]).meta, work=SimpleNamespace(blocks=blocks, page_table=table))
    records = np.zeros((5, plan.RECORD), np.int32)
    records[0, [plan.ROW, plan.KV_START, plan.POSITION, plan.NUM_TOKENS]] = 1, 128, 190, 2
    records[1, [plan.ROW, plan.KV_START, plan.POSITION, plan.NUM_TOKENS]] = 0, 64, 64, 1
    found = np.asarray(find_first_pages(jnp.asarray(records), spec, meta))
    assert found.shape == (3, 8)
    np.testing.assert_array_equal(found[0], table[1, np.array(columns)])
    np.testing.assert_array_equal(found[1], table[0, 64 // page_size])  # past the row's end its last page
    np.testing.assert_array_equal(found[2], table[0, 0])


@needs_jax_011
def test_what_the_kernel_does_not_run_goes_to_xla_or_is_refused() -> None:
    inputs = make_inputs(ArgSpec("float32", (1,), (9,), head_dim=64, page_size=16))
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        trace = jax.jit(paged_attention, static_argnames="implementation").trace
        text = trace(inputs.q, inputs.kv_pages, inputs.meta).lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" not in text
        with pytest.raises(NotImplementedError, match="these are float32"):
            trace(inputs.q, inputs.kv_pages, inputs.meta, implementation="mosaic_gpu")


@needs_jax_011
@pytest.mark.parametrize("page_size", [8, 16, 24, 64, 80, 256])
def test_the_copies_of_scales_bring_what_is_read(page_size: int) -> None:
    from jpaged.pallas_kernels.decode_gpu import copies_of_scales

    box = math.gcd(page_size, 64)
    width, values_at = scale_box(box, page_size)
    brought = np.full(width, -1)
    for first, to, count in copies_of_scales(box, page_size):
        assert count % 32 == 0  # a copy is a multiple of 128 bytes
        assert (brought[to : to + count] == -1).all()
        brought[to : to + count] = np.arange(first, first + count)
    np.testing.assert_array_equal(brought[:box], np.arange(box))
    np.testing.assert_array_equal(brought[values_at : values_at + box], page_size + np.arange(box))


@partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap"))
def attend(q, kv_pages, meta, **options):
    return paged_attention(q, kv_pages, meta, return_lse=True, implementation="mosaic_gpu", **options)


def check(inputs: Inputs, spec: ArgSpec, attend=attend) -> tuple[np.ndarray, np.ndarray]:
    out, lse = attend(inputs.q, inputs.kv_pages, inputs.meta, **inputs.options(spec))
    out, lse = np.asarray(out.astype(jnp.float32)), np.asarray(lse)
    expected, expected_lse = paged_attention_reference(inputs.q, inputs.kv_pages, inputs.meta, **inputs.options(spec))
    # The weights are rounded to 16 bits before they meet V (some 4 at most), and the sum is once more.
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
    with_lse, _ = attend(inputs.q, inputs.kv_pages, inputs.meta)
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
    kernels = [x.as_text().count('custom_call_target="mosaic_gpu') for x in (one, three)]
    assert kernels[0] > 0
    assert kernels[1] == 3 * kernels[0]
    more_fusions = three.as_text().count(" fusion(") - one.as_text().count(" fusion(")
    assert more_fusions <= 2 * 3  # the writes of two layers, and not two plans


@pytest.mark.gpu
def test_it_is_the_choice_on_hopper() -> None:
    gpu = current_gpu()
    assert gpu is not None
    assert gpu.is_hopper
    inputs = make_inputs(GPU_SPECS[0])
    assert "mosaic_gpu" in jax.jit(paged_attention).lower(inputs.q, inputs.kv_pages, inputs.meta).as_text()
