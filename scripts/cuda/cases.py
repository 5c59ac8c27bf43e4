"""`kernel_cases`: every configuration of our kernels that is lowered and compiled, from the lists of the tests.

Attention and writing take each way through the kernels' code; the residual sum with its norm every hidden size of the
known models; products, and the kernel of what follows a layer's attention, the sizes of some. XLA's attention has the
list that all back ends share.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp

from jpaged.model_shapes import MODEL_SHAPES
from jpaged.pallas_kernels import (
    LayerWeights,
    PageSpec,
    Rope,
    add_rms_norm,
    after_attention,
    attend_and_write,
    attend_and_write_qkv,
    gated_product,
    layer_plan,
    paged_attention,
    plan_attention,
    split_product,
)
from jpaged.pallas_kernels.compat import jax_version
from jpaged.pallas_kernels.page_ops import replace_pages
from tests.arg_specs import ARG_SPECS, ArgSpec, make_inputs
from tests.kernels.test_decode_gpu import GPU_SPECS, LOWERED, abstract_hopper
from tests.kernels.test_prefill_gpu import PREFILL_SPECS
from tests.kernels.test_shared_prefix_gpu import SHARED_SPECS

from .target import placed

# Those whose tiles differ.
_FUSED: Final = ("smollm2_heads_decode", "head_dim_256", "int8")
_PREFILL_8_BIT: Final = ("int8", "float8_everything", "int8_head_dim_64", "float8_head_dim_96", "int8_for_float16")
_PREFILL_16_BIT: Final = ("everything", "head_dim_64", "head_dim_96", "head_dim_256", "group_of_64", "page_of_24")
_PREFILL: Final = (*_PREFILL_16_BIT, *_PREFILL_8_BIT)
_SHARED: Final = ("one_group", "head_dim_64", "head_dim_256", "mixed_with_prefill")
_LAYERS: Final = (("smollm2-135m", 1), ("smollm2-135m", 16), ("llama-3.1-8b", 1))
_PRODUCTS: Final = (
    *(("llama-3.1-8b", rows) for rows in (8, 64, 128, 192, 256, 2048)),
    *(("smollm2-135m", rows) for rows in (32, 256)),
)
_GPU: Final = "mosaic_gpu"
_PAGES: Final = (
    PageSpec(9, 16, 3, 64, "bfloat16", _GPU),
    PageSpec(9, 16, 2, 128, "int8", _GPU),
    PageSpec(9, 8, 1, 96, "float8_e4m3fn", _GPU),
)


@dataclass(frozen=True)
class Call:
    """A function with its arguments, and the index of the one whose memory it may write over."""

    op: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: int | None = None
    pool: PageSpec | None = None


def kernel_cases() -> dict[str, Callable[[], list[Call]]]:
    """What makes the calls of each configuration, by its name; of our own kernels those that this jax has."""
    cases = {f"xla {spec.name}": partial(_attention, spec, "xla") for spec in ARG_SPECS if not spec.slow}
    return {**cases, **dict(_own_cases())} if jax_version() >= (0, 11) else cases


def _own_cases() -> Iterable[tuple[str, Callable[[], list[Call]]]]:
    own = [spec for spec in GPU_SPECS if spec.name in LOWERED]
    for spec in own:
        yield f"decode {spec.name}", partial(_attention, spec, _GPU)
    for spec in own:
        if spec.name in _FUSED:
            yield f"fused {spec.name}", partial(_fused, spec, _GPU)
    for spec in PREFILL_SPECS:
        if spec.name in _PREFILL:
            yield f"prefill {spec.name}", partial(_attention, spec, _GPU)
    for shared in SHARED_SPECS:
        if shared.spec.name in _SHARED:
            yield f"shared {shared.spec.name}", partial(_shared, shared.spec, _GPU)
    for pages in _PAGES:
        yield f"pages {pages.dtype.name}", partial(_pages, pages)
    for size in sorted({config.hidden_size for config in MODEL_SHAPES.values()}):
        yield f"norm {size}", partial(_norm, size, _GPU)
    for model, rows in _PRODUCTS:
        yield f"products {model} {rows}", partial(_products, model, rows)
    for model, tokens in _LAYERS:
        yield f"layer {model} {tokens}", partial(_layer, model, tokens)


def lowered_calls(make_calls: Callable[[], list[Call]], gpu: Any) -> list[tuple[Call, jax.stages.Lowered]]:
    """The calls of a case, lowered for CUDA as on a machine with an H200.

    Args:
      make_calls: of `kernel_cases`.
      gpu: the described GPU, to compile for it; `None`: they are lowered only.
    """
    lowered = []
    # The mesh in use says "H200", so implementations and tiles are chosen as they are there.
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        for call in make_calls():
            arguments = call.arguments if gpu is None else placed(call.arguments, gpu)
            jitted = jax.jit(call.op, donate_argnums=() if call.donated is None else call.donated)
            options: dict[str, Any] = {"lowering_platforms": ("cuda",)} if gpu is None else {}
            lowered.append((call, jitted.trace(*arguments).lower(**options)))
    return lowered


def _attention(spec: ArgSpec, implementation: str) -> list[Call]:
    inputs = make_inputs(spec)
    op = partial(attend_and_write, implementation=implementation, return_lse=True, **inputs.options(spec))
    arguments = inputs.q, inputs.k, inputs.v, inputs.pages_before, inputs.meta
    return [Call(op, arguments, donated=3, pool=spec.page_spec)]


def _fused(spec: ArgSpec, implementation: str) -> list[Call]:
    """A fused projection with a rope, in parts."""
    inputs = make_inputs(spec)
    angles = jnp.ones((spec.num_tokens, spec.head_dim // 2), jnp.float32)
    parts = jnp.stack([jnp.concatenate([inputs.q, inputs.k, inputs.v], axis=1).astype(jnp.float32)] * 2)

    def op(qkv, kv_pages, meta, rope):
        options = {"dtype": inputs.q.dtype, "implementation": implementation, **inputs.options(spec)}
        return attend_and_write_qkv(qkv, kv_pages, meta, rope=rope, **options)

    return [Call(op, (parts, inputs.pages_before, inputs.meta, Rope(angles, angles)), donated=1, pool=spec.page_spec)]


def _shared(spec: ArgSpec, implementation: str) -> list[Call]:
    """Planned as a model does it, so that rows may share prefixes."""
    inputs = make_inputs(spec)

    def op(q, kv_pages, meta):
        meta = plan_attention(meta, kv_pages.spec)
        return paged_attention(q, kv_pages, meta, implementation=implementation, **inputs.options(spec))

    return [Call(op, (inputs.q, inputs.kv_pages, inputs.meta))]


def _pages(spec: PageSpec) -> list[Call]:
    """Three pages replaced."""
    pool = jax.ShapeDtypeStruct(spec.data_shape, spec.dtype)
    pages = jax.ShapeDtypeStruct((3, *spec.data_shape[1:]), spec.dtype)
    op = partial(replace_pages, implementation=spec.implementation)
    return [Call(op, (pool, jax.ShapeDtypeStruct((3,), jnp.int32), pages), donated=0, pool=spec)]


def _norm(size: int, implementation: str) -> list[Call]:
    """A row alone, what is added in parts; and many rows."""
    scale = jax.ShapeDtypeStruct((size,), jnp.bfloat16)
    op = partial(add_rms_norm, eps=1e-5, implementation=implementation)
    calls = []
    for tokens, parts in ((1, 4), (4096, 1)):
        x = jax.ShapeDtypeStruct((tokens, size), jnp.bfloat16)
        delta = x if parts == 1 else jax.ShapeDtypeStruct((parts, tokens, size), jnp.float32)
        calls.append(Call(op, (x, delta, scale)))
    return calls


def _products(model: str, rows: int) -> list[Call]:
    """The products of a layer."""
    config, shape = MODEL_SHAPES[model], partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    hidden, intermediate = config.hidden_size, config.intermediate_size
    projected = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    return [
        Call(split_product, (shape((rows, hidden)), shape((hidden, projected)))),
        Call(split_product, (shape((rows, intermediate)), shape((intermediate, hidden)))),
        Call(gated_product, (shape((rows, hidden)), shape((hidden, 2 * intermediate)))),
    ]


def _layer(model: str, tokens: int) -> list[Call]:
    """What follows a layer's attention, and what follows the last one's."""
    config, shape = MODEL_SHAPES[model], partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    hidden, intermediate = config.hidden_size, config.intermediate_size
    attended = config.num_attention_heads * config.head_dim
    projected = attended + 2 * config.num_key_value_heads * config.head_dim
    scale, gate_up = shape((hidden,)), shape((hidden, 2 * intermediate))
    kernels = shape((attended, hidden)), scale, gate_up, shape((intermediate, hidden))
    calls = []
    for following in ((scale, shape((hidden, projected))), (None, None)):
        weights = LayerWeights(*kernels, *following)
        plan = layer_plan(tokens, weights)
        if plan is None:
            raise NotImplementedError(f"{model} with {tokens} tokens: expected a plan of the layer's kernel, got none")
        arguments = shape((tokens, hidden)), shape((tokens, attended)), weights, jax.ShapeDtypeStruct((1,), jnp.int32)
        calls.append(Call(partial(after_attention, eps=1e-5, plan=plan), arguments))
    return calls
