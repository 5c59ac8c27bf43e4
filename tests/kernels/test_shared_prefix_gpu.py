"""Rows that share a prefix of pages, on a Hopper GPU: equal to the dense reference, bit by bit when repeated."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import paged_attention, plan_attention, prefix_plan_gpu
from jpaged.pallas_kernels.tuning import TILE_ROWS
from tests.arg_specs import ArgSpec, Inputs, make_inputs
from tests.kernels.test_decode_gpu import check, spec


@dataclasses.dataclass(frozen=True)
class SharedSpec:
    """A call, and groups of its rows that share so many tokens; `shares` is how many the plan is to say share them."""

    spec: ArgSpec
    groups: tuple[tuple[tuple[int, ...], int], ...]
    shares: int


def _rows(n: int) -> tuple[int, ...]:
    return tuple(range(n))


def shared(name: str, kv_lens: tuple[int, ...], *groups, shares: int | None = None, **changes) -> SharedSpec:
    call = spec(name, **{"q_lens": (1,) * len(kv_lens), "kv_lens": kv_lens, **changes})
    return SharedSpec(call, groups, sum(len(rows) for rows, _ in groups) if shares is None else shares)


_STATIC = "scale", "sliding_window", "soft_cap"
_SIX = (520, 530, 577, 600, 640, 1500)
_MANY = tuple(400 + 7 * i for i in range(40))
_OTHERS = {"scale": 0.3, "soft_cap": 4.0, "sinks": True}
SHARED_SPECS = (
    shared("one_group", _SIX, (_rows(6), 512)),
    shared("inside_a_block", _SIX, (_rows(6), 500), pad_rows=3, pad_tokens=0),
    shared("no_padding_pages", (1500,) * 6, (_rows(6), 1488), pad_pages=0),
    shared("several_tiles", _MANY, (_rows(40), 384)),
    shared("two_groups", (*_SIX, 1, 40, *_SIX), ((0, 1, 2, 6 + 2, 6 + 3), 448), ((3, 4, 5, 12, 13), 512), sinks=True),
    shared("nested", (1400, 1300, 1200, 1300, 700, 600, 500, 400), (_rows(8), 256), (_rows(4), 1104), shares=8),
    shared("one_long_row", (600, 9000, 620, 640), (_rows(4), 576)),
    shared("long_prefix", (8200, 8300, 8400), (_rows(3), 8192)),
    shared("equal_rows", (1000,) * 4, (_rows(4), 1000)),
    shared("too_short", _SIX, (_rows(6), 200), shares=0),
    shared("two_of_three", (600, 700, 800), (_rows(2), 256), shares=2),
    shared("others", _SIX, (_rows(6), 512), **_OTHERS),
    shared("float16", _SIX, (_rows(6), 512), dtype="float16", page_dtype="float16"),
    shared("head_dim_64", _MANY, (_rows(40), 384), head_dim=64, num_heads=9, num_kv_heads=3, **_OTHERS),
    shared("head_dim_96", _MANY, (_rows(40), 384), head_dim=96, **_OTHERS),
    shared("head_dim_256", _SIX, (_rows(6), 512), head_dim=256),
    shared("mha", _MANY, (_rows(40), 384), num_heads=2),
    shared("group_of_16", _SIX, (_rows(6), 512), num_heads=32),
    shared("group_of_32", _SIX, (_rows(6), 512), num_heads=64),
    shared("group_of_64", _SIX, (_rows(6), 512), num_heads=128, shares=0),
    shared("page_of_8", _SIX, (_rows(6), 512), page_size=8),
    shared("page_of_24", _SIX, (_rows(6), 500), page_size=24),
    shared("page_of_128", _SIX, (_rows(6), 512), page_size=128),
    shared("window", _SIX, (_rows(6), 512), sliding_window=1400),  # the plan finds them, and the layer does not ask
    shared("pages_left_behind", _SIX, (_rows(6), 512), sliding_window=100, shares=0),
    shared("int8", _SIX, (_rows(6), 512), page_dtype="int8", shares=0),
    shared("several_tokens", (*_SIX, 700, 600), (_rows(6), 512), q_lens=(1,) * 6 + (2, 3), pad_rows=4),
    shared("mixed", (*_SIX, 700, 600), (_rows(6), 512), q_lens=(1,) * 6 + (70, 30), pad_tokens=5, **_OTHERS),
    shared(
        "mixed_with_prefill",
        (*_SIX, 700, 600, 800),
        (_rows(6), 512),
        q_lens=(1,) * 6 + (250, 1, 130),
        num_heads=32,
        num_kv_heads=8,
        pad_tokens=5,
    ),
)


def make_shared_inputs(shared: SharedSpec, seed: int = 0) -> Inputs:
    """Random inputs, of which groups of rows have their first row's pages at the front; what that frees is NaN."""
    inputs, spec = make_inputs(shared.spec, seed), shared.spec.page_spec
    page_table = np.asarray(inputs.meta.page_table).copy()
    before = np.unique(page_table)
    for rows, tokens in shared.groups:
        for row in rows:
            pages = min(tokens, shared.spec.kv_lens[row]) // spec.page_size
            page_table[row, :pages] = page_table[rows[0], :pages]
    freed = np.setdiff1d(before, page_table)
    pages, scales = inputs.kv_pages.data, inputs.kv_pages.scales
    if scales is None:
        pages = pages.at[freed].set(jnp.nan)
    else:
        scales = scales.at[freed].set(jnp.nan)
    return dataclasses.replace(
        inputs,
        kv_pages=dataclasses.replace(inputs.kv_pages, data=pages, scales=scales),
        meta=dataclasses.replace(inputs.meta, page_table=jnp.asarray(page_table)),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shared", SHARED_SPECS, ids=lambda shared: shared.spec.name)
def test_equals_reference_and_repeats_bit_by_bit(shared: SharedSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_plan_gpu, "STEP_BLOCKS", 0)  # so small a step would not share
    inputs, spec = make_shared_inputs(shared), shared.spec
    work = plan_attention(inputs.meta, spec.page_spec).work
    members = TILE_ROWS * spec.num_kv_heads // spec.num_heads
    shares = None if work.prefixes is None else prefix_plan_gpu.pays(work.prefixes, members, spec.num_kv_heads, 1)
    assert shared.shares == (0 if shares is None else int(shares.sum()))
    attend = jax.jit(partial(paged_attention, return_lse=True, implementation="mosaic_gpu"), static_argnames=_STATIC)
    out, lse = check(inputs, spec, attend)
    for _ in range(3):
        again, lse_again = attend(inputs.q, inputs.kv_pages, inputs.meta, **inputs.options(spec))
        np.testing.assert_array_equal(out, again.astype(jnp.float32))
        np.testing.assert_array_equal(lse, lse_again)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["two_groups", "long_prefix", "head_dim_64"])
def test_a_prefix_that_is_found_undone_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from jpaged.pallas_kernels import prefix_join_gpu  # needs jax 0.11

    monkeypatch.setattr(prefix_plan_gpu, "STEP_BLOCKS", 0)
    shared = next(x for x in SHARED_SPECS if x.spec.name == name)
    inputs, results = make_shared_inputs(shared), []
    for looks in (prefix_join_gpu.LAST_LOOKS, 0):
        monkeypatch.setattr(prefix_join_gpu, "FIRST_LOOKS", looks)
        monkeypatch.setattr(prefix_join_gpu, "LAST_LOOKS", looks)
        jax.clear_caches()  # nothing else says that another kernel is to be made
        attend = jax.jit(
            partial(paged_attention, return_lse=True, implementation="mosaic_gpu"), static_argnames=_STATIC
        )
        results.append(attend(inputs.q, inputs.kv_pages, inputs.meta, **inputs.options(shared.spec)))
    (out, lse), (late_out, late_lse) = results
    np.testing.assert_array_equal(out.astype(jnp.float32), late_out.astype(jnp.float32))
    np.testing.assert_array_equal(lse, late_lse)
