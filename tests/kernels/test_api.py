"""The public ops: exports, dispatch, composition."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpaged.pallas_kernels as kernels
from jpaged.pallas_kernels import (
    Rope,
    apply_rope,
    attend_and_write,
    attend_and_write_qkv,
    paged_attention,
    plan_attention,
    write_kv,
)
from jpaged.pallas_kernels.reference import paged_attention_reference
from tests.arg_specs import ArgSpec, make_inputs

SPEC = ArgSpec("mixed", (1, 1, 7), (9, 1, 12), pad_rows=1, pad_tokens=3)


def test_exports_are_sorted_and_documented() -> None:
    assert kernels.__all__ == sorted(kernels.__all__)
    for name in kernels.__all__:
        assert getattr(kernels, name).__doc__, name


def test_attend_and_write_composes_rope_write_and_attention() -> None:
    inputs = make_inputs(SPEC)
    theta = inputs.meta.positions[:, None].astype(jnp.float32) * jnp.array([1.0, 0.1, 0.01])
    rope = Rope(cos=jnp.cos(theta), sin=jnp.sin(theta))
    both = jax.jit(partial(attend_and_write, return_lse=True))
    (out, lse), pages = both(inputs.q, inputs.k, inputs.v, inputs.pages_before, inputs.meta, rope=rope)
    expected_pages = write_kv(apply_rope(inputs.k, rope), inputs.v, inputs.pages_before, inputs.meta)
    # A rotation may be fused with its product into one rounding fewer.
    np.testing.assert_allclose(pages.data[1:], expected_pages.data[1:], rtol=1e-6, atol=1e-6)
    expected, expected_lse = paged_attention_reference(apply_rope(inputs.q, rope), expected_pages, inputs.meta)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)  # as in test_xla
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)


def test_without_rope_nothing_is_rotated() -> None:
    inputs = make_inputs(SPEC)
    out, pages = jax.jit(attend_and_write)(inputs.q, inputs.k, inputs.v, inputs.pages_before, inputs.meta)
    np.testing.assert_array_equal(pages.data[1:], inputs.kv_pages.data[1:])
    expected, _ = paged_attention_reference(inputs.q, inputs.kv_pages, inputs.meta)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("half", [3, None])
def test_a_fused_projection_is_the_same_op(half: int | None) -> None:
    inputs = make_inputs(SPEC)
    theta = inputs.meta.positions[:, None].astype(jnp.float32) * jnp.array([1.0, 0.1, 0.01])
    rope = None if half is None else Rope(cos=jnp.cos(theta), sin=jnp.sin(theta))
    options = {"rope": rope, "sliding_window": 5, "return_lse": True}
    qkv = jnp.concatenate([inputs.q, inputs.k, inputs.v], axis=1)
    got = jax.jit(partial(attend_and_write_qkv, **options))(qkv, inputs.pages_before, inputs.meta)
    expected = jax.jit(partial(attend_and_write, **options))(
        inputs.q, inputs.k, inputs.v, inputs.pages_before, inputs.meta
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), got, expected)
    parts = jnp.stack([qkv / 4, qkv / 4, qkv / 2])
    in_parts = jax.jit(partial(attend_and_write_qkv, dtype=jnp.float32, **options))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6),
        in_parts(parts, inputs.pages_before, inputs.meta),
        expected,
    )
    with pytest.raises(ValueError, match="expected a dtype for parts"):
        attend_and_write_qkv(parts, inputs.pages_before, inputs.meta)
    with pytest.raises(ValueError, match=r"qkv.shape=\(12, 4, 16\); expected \[T, Hq \+ 2 Hkv, D\]"):
        attend_and_write_qkv(inputs.q, inputs.pages_before, inputs.meta)


def test_implementation_is_honoured() -> None:
    inputs = make_inputs(SPEC)
    named = jax.eval_shape(partial(paged_attention, implementation="xla"), inputs.q, inputs.kv_pages, inputs.meta)
    assert named.shape == inputs.q.shape
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        paged_attention(inputs.q, inputs.kv_pages, inputs.meta, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="'fast'"):
        paged_attention(inputs.q, inputs.kv_pages, inputs.meta, implementation="fast")


def test_pages_of_a_missing_back_end_are_refused() -> None:
    inputs = make_inputs(SPEC)
    spec = dataclasses.replace(inputs.kv_pages.spec, implementation="mosaic_gpu")
    pages = dataclasses.replace(inputs.kv_pages, spec=spec)
    with pytest.raises(NotImplementedError, match="Mosaic GPU"):
        write_kv(inputs.k, inputs.v, pages, inputs.meta)
    with pytest.raises(NotImplementedError, match="Mosaic GPU"):
        plan_attention(inputs.meta, spec)
    with pytest.raises(ExceptionGroup):
        paged_attention(inputs.q, pages, inputs.meta)


def test_a_foreign_schedule_is_refused() -> None:
    inputs = make_inputs(SPEC)
    meta = dataclasses.replace(inputs.meta, work=jnp.zeros(3))
    with pytest.raises(ValueError, match="call plan_attention with the spec of these pages"):
        paged_attention(inputs.q, inputs.kv_pages, meta)


def test_metadata_and_pages_pass_through_tree_functions() -> None:
    """Trees of shapes, shardings or flags must be possible, whatever the annotations of the fields say."""
    inputs = make_inputs(SPEC)
    planned = jax.jit(plan_attention, static_argnums=1)(inputs.meta, inputs.kv_pages.spec)
    for tree in (planned, inputs.kv_pages, Rope(cos=jnp.ones((1, 2)), sin=jnp.ones((1, 2)))):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        assert jax.tree.structure(jax.tree.map(lambda _: True, tree)) == jax.tree.structure(shapes)
