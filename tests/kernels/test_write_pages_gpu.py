"""The Mosaic GPU kernel that writes whole pages: interpreted and lowered anywhere, run where a Hopper GPU is."""

# What is imported by name needs jax 0.11.
# pyright: reportAttributeAccessIssue=false

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import KVPages, PageSpec, copy_pages
from jpaged.pallas_kernels.compat import jax_version
from jpaged.pallas_kernels.page_ops import replace_pages
from tests.kernels.gpu_interpret import interpret_params, no_races
from tests.kernels.hlo import pool_copies

if jax_version() < (0, 11):
    pytest.skip("the kernel needs jax 0.11", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

SPECS = (
    PageSpec(9, page_size=16, num_kv_heads=3, head_dim=64, dtype="bfloat16", implementation="mosaic_gpu"),
    PageSpec(9, page_size=16, num_kv_heads=2, head_dim=128, dtype="int8", implementation="mosaic_gpu"),
    PageSpec(9, page_size=8, num_kv_heads=1, head_dim=96, dtype="float8_e4m3fn", implementation="mosaic_gpu"),
)
specs = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.dtype.name)
# A cycle, a copy to a free page, padding, and a page outside of the pool.
SRC, DST = [7, 2, 5, 5, 0, 0, 3], [2, 7, 1, 8, 0, 0, 9]


def filled(spec: PageSpec) -> KVPages:
    rng = np.random.default_rng(0)
    data = np.clip(rng.standard_normal(spec.data_shape) * 50, -100, 100).astype(np.float32).astype(spec.dtype)
    scales = None if spec.scales_shape is None else rng.uniform(size=spec.scales_shape).astype(np.float32)
    return jax.device_put(KVPages(data, scales, spec))


def copy_at_once(pages: KVPages, src: list[int], dst: list[int]) -> KVPages:
    """As one program, and a new one each time: whether kernels are interpreted is no part of its name."""
    return jax.jit(lambda *args: copy_pages(*args))(pages, np.array(src, np.int32), np.array(dst, np.int32))


def check(pages: KVPages, copied: KVPages) -> None:
    by_xla = dataclasses.replace(pages, spec=dataclasses.replace(pages.spec, implementation="xla"))
    expected = copy_at_once(by_xla, SRC, DST)
    for got, want in zip(jax.tree.leaves(copied), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))


@specs
def test_interpreted_copy_pages_equals_xla(spec: PageSpec) -> None:
    pages = filled(spec)
    live = [i for i in range(len(SRC)) if SRC[i]]  # two paddings would race on the null page, which does not matter
    with no_races(), plgpu.force_gpu_interpret_mode(interpret_params()):
        copied = jax.block_until_ready(copy_at_once(pages, [SRC[i] for i in live], [DST[i] for i in live]))
    check(pages, copied)


@specs
def test_lowers_for_cuda_in_place(spec: PageSpec) -> None:
    pages, ids = filled(spec), jnp.array(DST, jnp.int32)
    step = jax.jit(replace_pages, static_argnames="implementation", donate_argnums=0)
    traced = step.trace(pages.data, ids, pages.data[: len(DST)], implementation="mosaic_gpu")
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("output_operand_alias<") == text.count("tf.aliasing_output") == 1


def test_pages_that_fill_no_warpgroup_are_left_to_xla() -> None:
    pool, ids = jnp.zeros((4, 3)), jnp.array([2, 4], jnp.int32)
    replaced = replace_pages(pool, ids, jnp.ones((2, 3)), "mosaic_gpu")
    assert replaced.sum(axis=1).tolist() == [0, 0, 3, 0]


@pytest.mark.gpu
@specs
def test_copy_pages_equals_xla_without_a_copy_of_the_pool(spec: PageSpec) -> None:
    pages, arguments = filled(spec), (jnp.array(SRC, jnp.int32), jnp.array(DST, jnp.int32))
    check(pages, jax.jit(copy_pages)(pages, *arguments))
    compiled = jax.jit(copy_pages, donate_argnums=0).lower(pages, *arguments).compile()
    assert pool_copies(compiled, spec) == []
    assert "mosaic_gpu" in compiled.as_text()
