"""Hints for the L2 cache: the kernels of a decode step give one for what they read once, and for nothing else."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jpaged.pallas_kernels import after_attention, layer_plan, paged_attention
from jpaged.pallas_kernels.compat import jax_version
from jpaged.pallas_kernels.product_plan_gpu import GatedBlocks, ProductBlocks
from tests.arg_specs import make_inputs
from tests.kernels.test_decode_gpu import GPU_SPECS, abstract_hopper

if jax_version() < (0, 11):
    pytest.skip("the kernels need jax 0.11", allow_module_level=True)

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import nvvm

from jpaged.pallas_kernels import read_once_gpu
from jpaged.pallas_kernels.gated_gpu import gated_gpu
from jpaged.pallas_kernels.product_gpu import product_gpu
from jpaged.pallas_kernels.read_once_gpu import leave_first
from tests.kernels.test_layer_gpu import SHAPES
from tests.kernels.test_layer_gpu import inputs as layer_inputs

EVICT_FIRST = 0x12F0000000000000  # as CUTLASS has it, cute/arch/copy_sm90_desc.hpp
COPY = "cp_async_bulk_tensor_shared_cluster_global"


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each copy to shared memory that was emitted has a hint; one that was emitted again counts once."""
    found: list[bool] = []
    masks: list[bool] = []
    emit, hint = getattr(nvvm, COPY), leave_first

    def emit_and_note(*args, **kwargs):
        hint, mask = kwargs.get("l2_cache_hint"), kwargs.get("multicast_mask")
        assert hint is None or hint.owner.attributes["value"].value == EVICT_FIRST
        found.append(hint is not None)
        masks.append(mask is not None)
        return emit(*args, **kwargs)

    def hint_and_note() -> None:
        block = ir.InsertionPoint.current.block  # pyright: ignore[reportAttributeAccessIssue]
        before = len(list(block.operations))
        hint()
        # The copy without a hint is gone; what is left are the copy with one and its constant.
        assert len(list(block.operations)) == before + 1
        assert found[-2:] == [False, True]
        assert masks[-2] == masks[-1]  # those of a cluster still go to all of it
        del found[-2]

    monkeypatch.setattr(nvvm, COPY, emit_and_note)
    for module in ("read_once_gpu", "product_tiles_gpu"):
        monkeypatch.setattr(f"jpaged.pallas_kernels.{module}.leave_first", hint_and_note)
    return found


def lower(op: Callable, *arguments) -> None:
    jax.clear_caches()  # what was lowered before would not be emitted again
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        jax.jit(op).trace(*arguments).lower(lowering_platforms=("cuda",))


def arrays(*shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]


def test_of_a_product_the_kernel_leaves_first_and_not_the_rows(copies: list[bool]) -> None:
    blocks = ProductBlocks(1, 128, 8, 4, 132, cut=False)
    lower(partial(product_gpu, result="parts", blocks=blocks), *arrays((8, 1024), (1024, 1024)))
    assert copies == [True, False]


def test_of_a_product_of_many_rows_too(copies: list[bool]) -> None:
    lower(partial(gated_gpu, blocks=GatedBlocks(2, 2048, 132)), *arrays((1024, 1024), (1024, 4096)))
    assert copies == [True, False]


def test_of_a_layer_all_kernels(copies: list[bool]) -> None:
    x, attended, weights = jax.eval_shape(lambda: layer_inputs(*SHAPES[0]))

    def layer(x, attended, weights):
        plan = layer_plan(len(x), weights)
        assert plan is not None
        return after_attention(x, attended, weights, jnp.zeros(1, jnp.int32), eps=1e-5, plan=plan)

    lower(layer, x, attended, weights)
    assert copies
    assert all(copies)


@pytest.mark.parametrize("name", ["decode", "float8_everything_decode", "mixed"])
def test_pages_and_scales_leave_first_where_rows_have_one_token(copies: list[bool], name: str) -> None:
    spec = next(spec for spec in GPU_SPECS if spec.name == name)
    inputs = make_inputs(spec)
    op = partial(paged_attention, implementation="mosaic_gpu", **inputs.options(spec))
    lower(op, inputs.q, inputs.kv_pages, inputs.meta)
    assert copies
    assert set(copies) == {name.endswith("decode")}


def test_there_must_be_a_copy() -> None:
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body), pytest.raises(RuntimeError, match="no copy by a tensor map"):
            read_once_gpu.leave_first()
