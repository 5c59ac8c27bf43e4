"""Lowers paged attention, the KV write, the residual norm and a layer's rest for CUDA, on a machine without a GPU.

    python scripts/lower_cuda.py [--only NAME]

Attention and writing are lowered for every shape of the shared lists, the residual sum with its norm for every hidden
size of the known models, and the kernel of what follows a layer's attention for two of them. Shows what lowering alone
can show: that each back end builds its program for a GPU, and how large it is. Prints a table and a last line of JSON;
exits with 1 if a shape does not lower.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from jpaged.model_shapes import MODEL_SHAPES
from jpaged.pallas_kernels import (
    LayerWeights,
    Rope,
    add_rms_norm,
    after_attention,
    attend_and_write,
    attend_and_write_qkv,
    layer_plan,
)
from jpaged.pallas_kernels.compat import jax_version
from tests.arg_specs import ARG_SPECS, ArgSpec, make_inputs
from tests.kernels.test_decode_gpu import GPU_SPECS, LOWERED, abstract_hopper
from tests.kernels.test_prefill_gpu import PREFILL_SPECS

# Those whose tiles differ.
FUSED_LOWERED = ("smollm2_heads_decode", "head_dim_256", "int8")
PREFILL_8_BIT = ("int8", "float8_everything", "int8_head_dim_64", "float8_head_dim_96", "int8_for_float16")
PREFILL_16_BIT = ("everything", "head_dim_64", "head_dim_96", "head_dim_256", "group_of_64", "page_of_24")
LAYERS_LOWERED = (("smollm2-135m", 1), ("smollm2-135m", 16), ("llama-3.1-8b", 1))
PREFILL_LOWERED = (*PREFILL_16_BIT, *PREFILL_8_BIT)


def lower(op: Callable[..., Any], *arguments: Any) -> str:
    """The StableHLO of one call, lowered as on a machine with a GPU."""
    # The mesh in use says "H200", so implementations and tiles are chosen as they are there.
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        return jax.jit(op).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def lower_attention(spec: ArgSpec, implementation: str) -> str:
    inputs = make_inputs(spec)
    op = partial(attend_and_write, implementation=implementation, return_lse=True, **inputs.options(spec))
    return lower(op, inputs.q, inputs.k, inputs.v, inputs.pages_before, inputs.meta)


def lower_fused(spec: ArgSpec, implementation: str) -> str:
    """A fused projection with a rope, in parts."""
    inputs = make_inputs(spec)
    angles = jnp.ones((spec.num_tokens, spec.head_dim // 2), jnp.float32)
    parts = jnp.stack([jnp.concatenate([inputs.q, inputs.k, inputs.v], axis=1).astype(jnp.float32)] * 2)

    def op(qkv, kv_pages, meta, rope):
        options = {"dtype": inputs.q.dtype, "implementation": implementation, **inputs.options(spec)}
        return attend_and_write_qkv(qkv, kv_pages, meta, rope=rope, **options)

    return lower(op, parts, inputs.pages_before, inputs.meta, Rope(angles, angles))


def lower_norm(size: int, implementation: str) -> str:
    """A row alone, what is added in parts; and many rows."""
    scale = jnp.ones(size, jnp.bfloat16)
    texts = []
    for tokens, parts in ((1, 4), (4096, 1)):
        x = jax.ShapeDtypeStruct((tokens, size), jnp.bfloat16)
        delta = x if parts == 1 else jax.ShapeDtypeStruct((parts, tokens, size), jnp.float32)
        texts.append(lower(partial(add_rms_norm, eps=1e-5, implementation=implementation), x, delta, scale))
    return "\n".join(texts)


def lower_layer(name: str, tokens: int) -> str:
    """What follows a layer's attention, and what follows the last one's."""
    config, shape = MODEL_SHAPES[name], partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    hidden, intermediate = config.hidden_size, config.intermediate_size
    attended = config.num_attention_heads * config.head_dim
    projected = attended + 2 * config.num_key_value_heads * config.head_dim
    scale, gate_up = shape((hidden,)), shape((hidden, 2 * intermediate))
    kernels = shape((attended, hidden)), scale, gate_up, shape((intermediate, hidden))
    texts = []
    for following in ((scale, shape((hidden, projected))), (None, None)):
        weights = LayerWeights(*kernels, *following)
        with jax.sharding.use_abstract_mesh(abstract_hopper()):
            plan = layer_plan(tokens, weights)
        assert plan is not None
        arguments = shape((tokens, hidden)), shape((tokens, attended)), weights, jax.ShapeDtypeStruct((1,), jnp.int32)
        texts.append(lower(partial(after_attention, eps=1e-5, plan=plan), *arguments))
    return "\n".join(texts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Lower every shape of the shared list for CUDA.")
    parser.add_argument("--only", help="lower the shapes whose name contains this")
    only = parser.parse_args().only
    # The shared list is for all back ends, so XLA lowers it; the kernel has its own, of the shapes that it takes.
    cases = [(spec.name, partial(lower_attention, spec, "xla"), "xla") for spec in ARG_SPECS if not spec.slow]
    if jax_version() >= (0, 11):
        name = "mosaic_gpu"
        own = [spec for spec in GPU_SPECS if spec.name in LOWERED]
        cases += [(spec.name, partial(lower_attention, spec, name), name) for spec in own]
        cases += [
            (f"fused_{spec.name}", partial(lower_fused, spec, name), name) for spec in own if spec.name in FUSED_LOWERED
        ]
        cases += [
            (f"prefill_{spec.name}", partial(lower_attention, spec, name), name)
            for spec in PREFILL_SPECS
            if spec.name in PREFILL_LOWERED
        ]
        hidden = sorted({config.hidden_size for config in MODEL_SHAPES.values()})
        cases += [(f"add_rms_norm_{size}", partial(lower_norm, size, name), name) for size in hidden]
        cases += [(f"layer_{model}_{n}", partial(lower_layer, model, n), name) for model, n in LAYERS_LOWERED]
    names = [name for name, *_ in cases]
    cases = [case for case in cases if only is None or only in case[0]]
    if not cases:
        sys.exit(f"no shape has {only!r} in its name; have {', '.join(names)}")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    failures: dict[str, str] = {}
    begin = time.perf_counter()
    print(f"{'shape':<24} {'implementation':<14} {'seconds':>7} {'lines':>7}")
    for name, lowering, implementation in cases:
        start = time.perf_counter()
        try:
            lines = str(len(lowering().splitlines()))
        except Exception as error:  # one failing shape must not hide the others
            failures[f"{name}/{implementation}"] = f"{type(error).__name__}: {error}"
            lines = "FAILED"
        print(f"{name:<24} {implementation:<14} {time.perf_counter() - start:>7.2f} {lines:>7}", flush=True)
    for name, error in failures.items():
        print(f"{name}: {error}", file=sys.stderr)
    report = {
        "script": "lower_cuda",
        "jax": jax.__version__,
        "implementations": sorted({implementation for *_, implementation in cases}),
        "lowered": len(cases) - len(failures),
        "failed": sorted(failures),
        "seconds": round(time.perf_counter() - begin, 1),
    }
    print(json.dumps(report))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
