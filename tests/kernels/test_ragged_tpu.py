"""The Mosaic TPU kernel, in jax's TPU interpreter and under its race detector, against the dense reference."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from jpaged.pallas_kernels import KVPages, PagedMetadata, PageSpec, attend_and_write, ragged_tpu
from jpaged.pallas_kernels.kv_write import write_kv_xla
from jpaged.pallas_kernels.pipeline_tpu import Fetch
from jpaged.pallas_kernels.ragged_tpu import paged_attention_tpu
from jpaged.pallas_kernels.reference import paged_attention_reference
from jpaged.pallas_kernels.tpu_plan import plan_tpu
from jpaged.pallas_kernels.tpu_tuning import TPUBlocks, shape_objection
from jpaged.pallas_kernels.write_plan_tpu import plan_write
from jpaged.pallas_kernels.xla import AttentionOptions
from tests.arg_specs import ARG_SPECS, ArgSpec, Inputs, make_inputs
from tests.kernels.tpu_interpret import interpret_params, no_races

# So small that an item spans blocks, and that every ring is filled several times over.
BLOCKS = TPUBlocks(pages=2, buffers=3, block_q=16, block_k=16, cores=1, short_q=8)

# f32 factors are not rounded (bf16 and 8-bit pages are exact in f32), sums are f32, and scores are in base 2: as in
# test_xla, 2e-5 leaves room for long sums.
EXACT = {"rtol": 2e-5, "atol": 2e-5}
# bf16 queries: outputs are rounded, by half a unit in the last place (2**-9 of them), and so are the weights (at most
# 1) before they meet V (some 4 at most). The log-sum-exps come of products that are exact.
BFLOAT16 = {"rtol": 2**-8, "atol": 4 * 2**-9}
# 8-bit pages for bf16 queries: K and V with their scales are rounded, too. A score, the sum of head_dim products of
# order 1 times head_dim ** -0.5, is off by at most 2**-9 * sqrt(head_dim), 2**-5 at 256. Scores that were all off by so
# much, each its own way, would move an output of order 1 by as much; V is rounded no worse than the weights.
LSE_QUANTIZED = {"rtol": 0, "atol": 2**-5}
QUANTIZED_BFLOAT16 = {"rtol": 2**-8, "atol": 2**-5 + 2 * 4 * 2**-9}


@dataclass(frozen=True)
class Case:
    """A call in the interpreter. There a DMA moves when it is waited for, so that what is read too early is NaN, or, if
    `eager`, when it starts, so that what is read too early is a race.
    """

    spec: ArgSpec
    blocks: TPUBlocks = BLOCKS
    with_lse: bool = True
    eager: bool = False

    @property
    def tolerances(self) -> tuple[dict, dict]:
        if self.spec.dtype == "float32":
            return EXACT, EXACT
        if self.spec.page_spec.quantized:
            return QUANTIZED_BFLOAT16, LSE_QUANTIZED
        return BFLOAT16, EXACT

    @property
    def interpret(self) -> pltpu.InterpretParams:
        return dataclasses.replace(
            interpret_params(),
            dma_execution_mode="eager" if self.eager else "on_wait",
            num_cores_or_threads=self.blocks.cores,
        )


def case(name: str, *, blocks: dict | None = None, with_lse: bool = True, eager: bool = False, **changes) -> Case:
    shape = {"head_dim": 64, "page_size": 16, "implementation": "mosaic_tpu", **changes}
    return Case(ArgSpec(name, **shape), dataclasses.replace(BLOCKS, **blocks or {}), with_lse, eager)


BF16 = {"dtype": "bfloat16", "page_dtype": "bfloat16"}
FP8 = {"dtype": "bfloat16", "page_dtype": "float8_e4m3fn"}
# Rows that begin, end and have their queries at and beside the borders of pages, blocks and tiles of queries.
_MIXED = {"q_lens": (1, 1, 1, 1, 2, 17), "kv_lens": (1, 16, 31, 97, 17, 49), "pad_rows": 2, "pad_tokens": 3}
_FEW = {"q_lens": (1, 9), "kv_lens": (33, 25), "pad_rows": 1, "pad_tokens": 1}
_LARGE_PAGES = {"q_lens": (1, 1, 2, 9), "kv_lens": (129, 5, 128, 260), "page_size": 128, "pad_rows": 1}

MIXED = case("mixed", **_MIXED)
CASES = (
    MIXED,
    # No tiles of queries; a page table of two runs of 128 ids.
    case("one_token", q_lens=(1,), kv_lens=(1100,), page_size=8, blocks={"pages": 8}),
    case("decode", **{**_MIXED, "q_lens": (1,) * 6, "pad_tokens": 20}),
    case(
        "everything",
        **{"num_heads": 8, "head_dim": 128, **BF16, **_MIXED},
        **{"scale": 0.3, "sliding_window": 20, "soft_cap": 4.0, "sinks": True, "eager": True},
        blocks={"pages": 1, "buffers": 2, "block_q": 8, "short_q": 0},
    ),
    # More KV heads than are written out one after the other, an odd number and an even one.
    case("mha_window_of_one", num_heads=9, num_kv_heads=9, head_dim=256, sliding_window=1, eager=True, **_FEW),
    case("mqa", num_kv_heads=1, page_size=24, sliding_window=5, with_lse=False, blocks={"block_k": 24}, **_FEW),
    case(
        "smollm2_int8",
        **{"num_heads": 9, "num_kv_heads": 3, "page_dtype": "int8", **_LARGE_PAGES},
        **{"eager": True, "blocks": {"pages": 1, "block_k": 128}},
    ),
    case("mqa_float8", num_kv_heads=1, sinks=True, blocks={"block_k": 128}, **FP8, **_LARGE_PAGES),
    case("two_cores", num_heads=10, num_kv_heads=10, blocks={"cores": 2, "pages": 1}, **BF16, **_FEW),
)


@partial(jax.jit, static_argnums=(1, 2))
def plan_once(meta: PagedMetadata, page_spec: PageSpec, blocks: TPUBlocks):
    """As one program: a plan that is made step by step compiles one for each operation."""
    return plan_tpu(meta, plan_write(meta, page_spec), blocks)


def attend(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray | None]:
    spec, page_spec = case.spec, inputs.kv_pages.spec
    assert shape_objection(page_spec, spec.num_heads, spec.dtype) is None
    work = plan_once(inputs.meta, page_spec, case.blocks)
    options = AttentionOptions(
        scale=spec.head_dim**-0.5 if spec.scale is None else spec.scale,
        sliding_window=spec.sliding_window,
        soft_cap=spec.soft_cap,
    )
    meta = dataclasses.replace(inputs.meta, work=work)
    args = (inputs.q, inputs.kv_pages, meta, inputs.sinks, options, case.with_lse)
    with no_races():
        out, lse = jax.block_until_ready(paged_attention_tpu(*args, interpret=case.interpret))
    assert out.dtype == spec.dtype
    assert (lse is not None) == case.with_lse
    return np.asarray(out).astype(np.float32), None if lse is None else np.asarray(lse)


def check(case: Case, inputs: Inputs | None = None) -> None:
    spec = case.spec
    inputs = make_inputs(spec) if inputs is None else inputs
    out, lse = attend(case, inputs)
    expected, expected_lse = paged_attention_reference(inputs.q, inputs.kv_pages, inputs.meta, **inputs.options(spec))
    of_out, of_lse = case.tolerances
    np.testing.assert_allclose(out, expected, **of_out)
    live = sum(spec.q_lens)
    assert (out[live:] == 0).all()
    if lse is not None:
        np.testing.assert_allclose(lse, expected_lse, **of_lse)
        assert np.isneginf(lse[live:]).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.spec.name)
def test_equals_reference(case: Case) -> None:
    check(case)


def without_unseen_pages(inputs: Inputs, spec: ArgSpec) -> Inputs:
    """The same call on a pool that holds the null page and those pages alone that a query sees."""
    table = np.asarray(inputs.meta.page_table)
    seen = np.unique(table)
    new_ids = np.zeros(table.max() + 1, np.int32)
    new_ids[seen] = np.arange(len(seen))
    page_spec = dataclasses.replace(spec.page_spec, num_pages=len(seen))
    kv_pages = KVPages(np.asarray(inputs.kv_pages.data)[seen], None, page_spec)
    meta = dataclasses.replace(inputs.meta, page_table=new_ids[table])
    return dataclasses.replace(inputs, **jax.device_put({"kv_pages": kv_pages, "meta": meta}))


def test_positions_beyond_64k_and_page_tables_of_many_runs() -> None:
    far = case(
        "far",
        **{"q_lens": (1, 1, 10), "kv_lens": (32769, 5, 70000), "pad_tokens": 1},
        **{"num_heads": 2, "num_kv_heads": 1, "sliding_window": 50},
    )
    inputs = without_unseen_pages(make_inputs(far.spec), far.spec)
    assert inputs.meta.page_table.shape[1] == 4376  # 35 runs of 128
    assert inputs.kv_pages.spec.num_pages < 16
    check(far, inputs)


def alone(inputs: Inputs, row: int, kv_len: int | None = None, first_page: int = 0) -> Inputs:
    """One row of a call (or `kv_len` tokens of it from a page on) without the others, in arrays of the same shapes."""
    meta = jax.tree.map(np.asarray, inputs.meta)
    begin, end = int(meta.cu_q_lens[row]), int(meta.cu_q_lens[row + 1])
    q_len, table = end - begin, meta.page_table
    kv_len = int(meta.kv_lens[row]) if kv_len is None else kv_len
    first_row, first_tokens = np.arange(len(table)) == 0, np.arange(len(meta.positions)) < q_len
    own = PagedMetadata(
        page_table=first_row[:, None] * np.roll(table[row], -first_page),
        kv_lens=first_row * np.int32(kv_len),
        cu_q_lens=(np.arange(len(table) + 1) > 0) * np.int32(q_len),
        positions=first_tokens * np.roll(meta.positions, -begin),
        slot_mapping=first_tokens * np.roll(meta.slot_mapping, -begin),
        num_decode=np.int32(q_len == 1),
        num_seqs=np.int32(1),
    )
    return dataclasses.replace(inputs, **jax.device_put({"q": np.roll(inputs.q, -begin, axis=0), "meta": own}))


def test_a_row_does_not_depend_on_its_company() -> None:
    inputs = make_inputs(MIXED.spec)
    together, together_lse = attend(MIXED, inputs)
    for row in (1, 3, 5):
        begin, q_len = int(inputs.meta.cu_q_lens[row]), MIXED.spec.q_lens[row]
        out, lse = attend(MIXED, alone(inputs, row))
        np.testing.assert_array_equal(out[:q_len], together[begin : begin + q_len])
        np.testing.assert_array_equal(lse[:q_len], together_lse[begin : begin + q_len])


def test_lse_joins_two_parts_of_a_context_and_repeats() -> None:
    inputs, row = make_inputs(MIXED.spec), 3
    assert (MIXED.spec.q_lens[row], MIXED.spec.kv_lens[row]) == (1, 97)
    whole, whole_lse = attend(MIXED, alone(inputs, row))
    again, again_lse = attend(MIXED, alone(inputs, row))
    np.testing.assert_array_equal(whole, again)
    np.testing.assert_array_equal(whole_lse, again_lse)
    parts = [attend(MIXED, alone(inputs, row, *part)) for part in ((48, 0), (49, 3))]
    weights = np.asarray(jax.nn.softmax(jnp.stack([lse[0] for _, lse in parts]), axis=0))
    joined = sum(w[:, None] * out[0] for w, (out, _) in zip(weights, parts, strict=True))
    np.testing.assert_allclose(joined, whole[0], **EXACT)


def test_all_rows_may_be_padding() -> None:
    inputs = make_inputs(MIXED.spec)
    meta = jax.device_put(jax.tree.map(np.zeros_like, jax.tree.map(np.asarray, inputs.meta)))
    out, lse = attend(MIXED, dataclasses.replace(inputs, meta=meta))
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def tpu_mesh(kind: str, cores: int = 1) -> jax.sharding.AbstractMesh:
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform="tpu")
    return jax.sharding.AbstractMesh((1,), ("x",), (jax.sharding.AxisType.Auto,), abstract_device=device)


def check_attend_and_write(case: Case, kind: str) -> None:
    spec, cores = case.spec, case.blocks.cores
    inputs = make_inputs(spec)
    options = inputs.options(spec)
    step = jax.jit(partial(attend_and_write, implementation="mosaic_tpu", **options))
    mesh, interpreted = tpu_mesh(kind, cores), pltpu.force_tpu_interpret_mode(case.interpret)
    with no_races(), jax.sharding.use_abstract_mesh(mesh), interpreted:
        args = (inputs.q, inputs.k, inputs.v, inputs.pages_before, inputs.meta)
        out, written = jax.block_until_ready(step(*args))
    expected, _ = paged_attention_reference(inputs.q, inputs.kv_pages, inputs.meta, **options)
    np.testing.assert_allclose(np.asarray(out).astype(np.float32), expected, **case.tolerances[0])
    by_xla = jax.jit(write_kv_xla)(inputs.k, inputs.v, inputs.pages_before, inputs.meta)
    for ours, theirs in zip(jax.tree.leaves(written), jax.tree.leaves(by_xla), strict=True):
        # Not the null page, where XLA writes padding.
        np.testing.assert_array_equal(np.asarray(ours)[1:].view(np.uint8), np.asarray(theirs)[1:].view(np.uint8))


def test_attend_and_write_with_the_blocks_of_a_chip() -> None:
    check_attend_and_write(case("api", **{**_LARGE_PAGES, "page_size": 64, "head_dim": 128}), "TPU v4")


@pytest.fixture
def recompiled() -> Iterator[None]:
    """Lets a kernel that is changed be compiled, and be forgotten afterwards."""
    jitted: Any = ragged_tpu._attend
    jitted.clear_cache()
    yield
    jitted.clear_cache()


BROKEN = {
    "the pages are not waited for": (Fetch, "wait", lambda *_: None),
    "a block too many is under way": (Fetch, "ahead", property(lambda self: self.blocks.buffers)),
    "results are overwritten on their way": (ragged_tpu._Outputs, "reserve", lambda self, block: block.ordinal % 2),
}


@pytest.mark.usefixtures("recompiled")
@pytest.mark.parametrize(
    ("fault", "num_rows", "eager", "found"),
    [
        ("the pages are not waited for", 1, True, "RACE DETECTED"),
        ("the pages are not waited for", 1, False, "Not equal to tolerance"),
        # Whether the race shows in what is read, before it is seen as one, is a matter of threads.
        ("a block too many is under way", 1, True, "RACE DETECTED|Not equal to tolerance"),
        ("results are overwritten on their way", 4, True, "RACE DETECTED"),
    ],
)
def test_a_broken_kernel_is_found(
    fault: str, num_rows: int, eager: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_tokens = {"pages": 1, "buffers": 2, "block_q": 1}
    whole = case("broken", q_lens=(1,) * num_rows, kv_lens=(33,) * num_rows, eager=eager, blocks=few_tokens)
    monkeypatch.setattr(*BROKEN[fault])
    with pytest.raises(AssertionError, match=found):
        check(whole)


# --- The long sweep ---


def legal(spec: ArgSpec, head_dim: int, page_size: int) -> ArgSpec | None:
    """The spec of the shared list with pages that the kernel takes, its lengths as close to the borders of pages as
    they were; `None` if it has a dtype that the kernel refuses."""
    if "float16" in (spec.dtype, spec.page_dtype):
        return None
    quantized = spec.page_spec.quantized
    size = max(page_size, spec.page_size, 128 // spec.num_kv_heads if quantized else 1)
    if quantized and spec.num_kv_heads == 3:
        size = 128

    def scaled(length: int) -> int:
        pages, beyond = divmod(length, spec.page_size)
        return pages * size + (size - 1 if beyond == spec.page_size - 1 else beyond)

    few = spec.page_size < 16 and sum(spec.q_lens) < 60
    lens = {"q_lens": tuple(map(scaled, spec.q_lens)), "kv_lens": tuple(map(scaled, spec.kv_lens))} if few else {}
    window = spec.sliding_window if spec.sliding_window in (None, 1) or not few else scaled(spec.sliding_window)
    changes = {"head_dim": max(head_dim, spec.head_dim), "page_size": size, "implementation": "mosaic_tpu"}
    return dataclasses.replace(spec, sliding_window=window, **changes, **lens)


def sweep() -> list[Case]:
    variants = (
        (64, 16, BLOCKS, False),
        (128, 16, TPUBlocks(pages=4, buffers=4, block_q=16, block_k=16, cores=1), True),
        (256, 24, TPUBlocks(pages=1, buffers=2, block_q=8, block_k=8, cores=2, short_q=4), False),
    )
    cases = []
    for spec in ARG_SPECS:
        for head_dim, page_size, blocks, eager in variants:
            ours = legal(spec, head_dim, page_size)
            if ours is None or shape_objection(ours.page_spec) is not None:
                continue
            if spec.slow:  # few blocks, as they are long
                blocks = dataclasses.replace(blocks, pages=64, block_k=512)
            elif ours.page_spec.quantized or ours.page_size * blocks.pages % blocks.block_k:
                blocks = dataclasses.replace(blocks, block_k=ours.page_size)
            cases.append(Case(dataclasses.replace(ours, name=f"{ours.name}-d{ours.head_dim}"), blocks, eager=eager))
    return cases


SWEEP = (
    *sweep(),
    case("1k_tokens", q_lens=(1, 1, 70, 1030), kv_lens=(999, 5, 700, 1500), blocks={"pages": 16, "block_q": 64}),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=f"{i + 1}of{len(SWEEP)}-{case.spec.name}") for i, case in enumerate(SWEEP)]
)
def test_sweep_equals_reference(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mqa", "smollm2_int8", "mqa_float8"])
@pytest.mark.parametrize(
    ("kind", "cores"), [("TPU v4", 1), ("TPU v5 lite", 1), ("TPU v5", 2), ("TPU v6 lite", 1), ("TPU7x", 1)]
)
def test_attend_and_write_on_all_chips(kind: str, cores: int, name: str) -> None:
    case = next(case for case in CASES if case.spec.name == name)
    check_attend_and_write(dataclasses.replace(case, blocks=dataclasses.replace(case.blocks, cores=cores)), kind)


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    rows = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), min_size=1, max_size=5))
    rows.sort(key=lambda row: row[0] != 1)
    # One padded shape, so that few programs are compiled; the mix itself is data.
    kv_lens = tuple(q_len + before for q_len, before in rows)
    return case(
        "random",
        q_lens=tuple(q_len for q_len, _ in rows),
        kv_lens=kv_lens,
        sliding_window=draw(st.sampled_from([None, 4, 33])),
        pad_rows=5 - len(rows),
        pad_tokens=100 - sum(q_len for q_len, _ in rows),
        pad_pages=6 - max(-(-kv_len // 16) for kv_len in kv_lens),
        free_pages=30 - sum(-(-kv_len // 16) for kv_len in kv_lens),
        eager=draw(st.booleans()),
    )


@pytest.mark.slow
@settings(max_examples=50)
@given(random_cases(), st.integers(0, 2**16))
def test_fifty_random_mixes(case: Case, seed: int) -> None:
    check(case, make_inputs(case.spec, seed))
