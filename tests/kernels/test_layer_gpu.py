"""The Mosaic GPU kernel of a layer of few rows: lowered anywhere, its ring interpreted, run where a Hopper GPU is."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.models import Llama
from jpaged.models.layers import Block, run_in_kernels
from jpaged.pallas_kernels import LayerWeights, PagedMetadata, after_attention, layer, layer_plan, make_pages
from jpaged.pallas_kernels.compat import GPU, jax_version
from jpaged.pallas_kernels.layer import after_attention_xla
from jpaged.pallas_kernels.layer_plan_gpu import WIDTH, LayerPlan, Product, plan_layer
from tests.kernels.gpu_interpret import interpret_params, no_races
from tests.kernels.test_decode_gpu import abstract_hopper
from tests.models.paged import tiny_config

if jax_version() < (0, 11):
    pytest.skip("the kernel needs jax 0.11", allow_module_level=True)

from jpaged.pallas_kernels import layer_gpu

# Tokens, and hidden, attended, intermediate and projected columns: SmolLM2's; parts of unequal length; several tokens.
SHAPES = ((1, 576, 576, 1536, 960), (1, 320, 192, 448, 256), (5, 576, 576, 1536, 960))
DEVICE_SHAPES = (*SHAPES, (3, 576, 576, 1536, 960), (16, 960, 960, 2560, 1600), (1, 4096, 4096, 14336, 6144))


def inputs(tokens: int, hidden: int, attended: int, intermediate: int, projected: int, dtype: str = "bfloat16"):
    rng = np.random.default_rng(hidden)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32) / shape[0] ** (len(shape) - 1) ** 0.5, dtype)

    def scale():
        return jnp.asarray(1 + 0.1 * rng.standard_normal(hidden), dtype)

    kernels = normal(attended, hidden), scale(), normal(hidden, 2 * intermediate), normal(intermediate, hidden)
    weights = LayerWeights(*kernels, scale(), normal(hidden, projected))
    x, out = (jnp.asarray(rng.standard_normal((tokens, n), np.float32), dtype) for n in (hidden, attended))
    return x, out, weights


def last_layer(weights: LayerWeights) -> LayerWeights:
    return LayerWeights(weights.o, weights.mlp_scale, weights.gate_up, weights.down, None, None)


def two_layers(x, attended, weights):
    """Both forms of the kernel, the second on what the first gives and with its count."""
    arrivals = jnp.zeros(1, jnp.int32)
    plan, last_plan = layer_plan(len(x), weights), layer_plan(len(x), last_layer(weights))
    assert plan is not None
    assert last_plan is not None
    x, _, projected, arrivals = after_attention(x, attended, weights, arrivals, eps=1e-5, plan=plan)
    columns = projected.sum(axis=0)[:, : attended.shape[1]].astype(x.dtype)
    y, delta, _, _ = after_attention(x, columns, last_layer(weights), arrivals, eps=1e-5, plan=last_plan)
    return x, projected.sum(axis=0), y, delta.sum(axis=0)


def two_layers_xla(x, attended, weights):
    x, _, projected = after_attention_xla(x, attended, weights, 1e-5)
    y, delta, _ = after_attention_xla(x, projected[:, : attended.shape[1]], last_layer(weights), 1e-5)
    return x, projected, y, delta


def ring_kernel(plan: LayerPlan):
    """Loads and products of the kernel alone, one product after the other, on rows [8, K] and kernels [K, N]."""
    products, stages = plan.products, plan.stages

    def body(*refs):
        xs, kernels, outs, (rows, ring, full, freed) = refs[:3], refs[3:6], refs[6:9], refs[9:]
        shares = [layer_gpu._Share(product, lax.axis_index("block"), plan.blocks) for product in products]

        @pl.when(lax.axis_index("wg") == 1)
        def _():
            step = jnp.int32(0)
            for share, kernel in zip(shares, kernels, strict=True):
                step = layer_gpu._load(share, kernel, ring, full, freed, stages, step)

            # A kernel just ends; the interpreter wants barriers to be looked at as often as they complete.
            def look(i, _):
                plgpu.barrier_wait(freed.at[lax.rem(i, stages)])

            lax.fori_loop(jnp.maximum(0, step - stages), step, look, None)

        @pl.when(lax.axis_index("wg") == 0)
        def _():
            step = jnp.int32(0)
            for share, x, out in zip(shares, xs, outs, strict=True):

                def put(j, _, share=share, x=x):
                    rows[j] = x[:, pl.ds((share.first + j) * WIDTH, WIDTH)]

                lax.fori_loop(0, share.count, put, None)
                step = layer_gpu._multiply(share, plan, out, rows, ring, full, freed, step)

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((product.parts * 8, product.outputs), jnp.float32) for product in products],
        scratch_types=[
            plgpu.SMEM((plan.row_boxes, plan.columns, WIDTH), jnp.bfloat16),
            plgpu.SMEM((stages, WIDTH, WIDTH), jnp.bfloat16),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        ],
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        interpret=interpret_params(),
    )


def test_products_of_the_ring_are_those_of_numpy(monkeypatch) -> None:
    """In the interpreter: a ring that is longer than one part and shorter than another, blocks without a tile."""

    def store_tile(tile, out, row, column, num_tokens):
        out[pl.ds(row, num_tokens), pl.ds(column, WIDTH)] = tile.T

    monkeypatch.setattr(layer_gpu, "rows", SimpleNamespace(fence_registers=lambda: None, store_tile=store_tile))
    monkeypatch.setattr(layer_gpu, "copy_once", plgpu.copy_gmem_to_smem)  # the interpreter has no L2 to give hints for
    monkeypatch.setattr(LayerPlan, "stages", 3)
    products, rng = [Product(512, 128, 2), Product(128, 256, 1), Product(128, 64, 1)], np.random.default_rng(0)
    plan = LayerPlan(8, 3, *products, qkv=None, apart=True)
    xs = [rng.integers(-4, 5, (8, product.inputs)) for product in products]
    kernels = [rng.integers(-4, 5, (product.inputs, product.outputs)) for product in products]
    with no_races():
        arrays = [jnp.asarray(array, jnp.bfloat16) for array in (*xs, *kernels)]
        got = jax.block_until_ready(ring_kernel(plan)(*arrays))
    for product, x, kernel, parts in zip(products, xs, kernels, got, strict=True):
        np.testing.assert_array_equal(np.asarray(parts).reshape(product.parts, 8, -1).sum(axis=0), x @ kernel)


def test_lowers_for_cuda_and_layers_share_it() -> None:
    x, attended, weights = jax.eval_shape(lambda: inputs(*SHAPES[2]))

    def layers(x, attended, weights):
        arrivals, plan = jnp.zeros(1, jnp.int32), layer_plan(len(x), weights)
        for _ in range(3):
            x, _, projected, arrivals = after_attention(x, attended, weights, arrivals, eps=1e-5, plan=plan)
            attended = projected[0, :, : attended.shape[1]].astype(x.dtype)
        return x, projected, arrivals

    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        text = jax.jit(layers).trace(x, attended, weights).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("call @after_attention_gpu") == 3
    assert text.count("custom_call @mosaic_gpu") <= 2  # the first layer's operands are arguments and not results


def test_a_model_runs_few_tokens_by_it() -> None:
    config = tiny_config(hidden_size=64, intermediate_size=128, num_attention_heads=2, head_dim=64)
    blocks = [Block(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16) for _ in range(3)]
    seen = []

    def attend(qkv):
        seen.append(qkv.shape[-2:])
        return qkv.reshape(-1, *qkv.shape[-3:]).sum(axis=0)[:, :2].astype(jnp.bfloat16), len(seen)

    def layers(x):
        run = run_in_kernels(blocks, x, [attend] * 3)
        return None if run is None else (run[0], run[1])

    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        x = jax.ShapeDtypeStruct((2, 64), jnp.bfloat16)
        text = jax.jit(layers).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        assert layers(jnp.ones((1000, 64), jnp.bfloat16)) is None
    assert text.count("call @after_attention_gpu") == 3
    assert seen == [(6, 64)] * 3


@pytest.mark.parametrize("multiprocessors", [132, 114])
def test_a_model_whose_projection_has_one_part_keeps_its_dtype(monkeypatch, multiprocessors: int) -> None:
    """With the attention that a model has: what the kernel gives as one part of f32 is rounded by who takes it."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    config = tiny_config(num_attention_heads=2, num_key_value_heads=1, **shape)
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    graph, state = nnx.split(model)
    monkeypatch.setattr(layer, "current_gpu", lambda: GPU("NVIDIA H100", "9.0", multiprocessors))

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    meta = PagedMetadata(
        page_table=array(1, 4),
        kv_lens=array(1),
        cu_q_lens=array(2),
        positions=array(1),
        slot_mapping=array(1),
        num_decode=array(),
        num_seqs=array(),
    )

    def run(state, tokens, pages, meta):
        return nnx.merge(graph, state)(tokens, pages, meta)

    assert plan_layer(1, 128, 128, 256, 256, multiprocessors).qkv.parts == 1
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        specs = model.page_specs(num_pages=9, page_size=16, dtype="bfloat16", implementation="mosaic_gpu")
        pages = jax.eval_shape(lambda: [make_pages(spec) for spec in specs])
        traced = jax.jit(run).trace(state, array(1), pages, meta)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert traced.out_info[0].dtype == jnp.bfloat16
    assert text.count("call @after_attention_gpu") == 2
    assert text.count("call @attend(") == 2


def test_shapes_are_left_to_xla_under_mps(monkeypatch) -> None:
    _, _, weights = jax.eval_shape(lambda: inputs(*SHAPES[0]))
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        assert layer_plan(1, weights) is not None
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps")
        assert layer_plan(1, weights) is None


@pytest.mark.parametrize("which", [0, 1])
def test_refuses_activations_of_another_dtype(which: int) -> None:
    *arrays, weights = inputs(*SHAPES[1])
    plan = plan_layer(*SHAPES[1], 132)
    arrays[which] = arrays[which].astype(jnp.float32)
    with pytest.raises(ValueError, match=r"float32.*weights of bfloat16; expected one dtype"):
        after_attention(*arrays, weights, jnp.zeros(1, jnp.int32), eps=1e-5, plan=plan)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, "bfloat16") for shape in DEVICE_SHAPES), (SHAPES[2], "float16")]
)
def test_equals_xla(shape: tuple[int, ...], dtype: str) -> None:
    arguments = inputs(*shape, dtype=dtype)
    run = jax.jit(two_layers)
    got, again = run(*arguments), run(*arguments)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arguments)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(two_layers_xla)(*wide)
    rounded = jax.jit(two_layers_xla)(*arguments)
    for found, repeated, exact, xla in zip(got, again, expected, rounded, strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(repeated, np.float32))
        found, exact, xla = (np.asarray(x, np.float64) for x in (found, exact, xla))
        error, usual = (np.sqrt(np.mean((x - exact) ** 2)) for x in (found, xla))
        assert error <= 1.25 * usual + 1e-6, f"{error=} {usual=}"


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
def test_rows_do_not_see_each_other() -> None:
    x, attended, weights = inputs(*SHAPES[2])
    run = jax.jit(two_layers)
    whole = run(x, attended, weights)
    changed = run(x.at[2].set(jnp.nan), attended, weights)
    for before, after in zip(whole, changed, strict=True):
        others = np.arange(len(x)) != 2
        np.testing.assert_array_equal(np.asarray(before, np.float32)[others], np.asarray(after, np.float32)[others])
        assert np.isnan(np.asarray(after, np.float32)[2]).all()
