"""Times a layer without its attention on a GPU, by the tokens of a step: one kernel, against XLA's products.

    python scripts/bench_layer.py [--quick] [--render FILE]

Each time is that of one of several layers in one program, each with weights of its own, together more than the L2 cache
holds (the products of a layer, its two norms, the gate; where attention would be, a slice of the projection). *XLA* is
a layer all of whose kernels are XLA's, *apart* one of several launches, ours where we have one, *kernel* one launch
from each attention to the next. Terabytes a second are those of the kernel, the layer's weights read once. Prints a
table and a last line of JSON.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jpaged.model_shapes import MODEL_SHAPES
from jpaged.models.layers import Block, run_in_kernels
from jpaged.pallas_kernels.split_product import sum_parts
from scripts.bench_kernels import median_us
from scripts.markdown import measured, table
from scripts.measuring import Failure, arguments_on_gpu, measure_all
from scripts.report import print_json, print_table

KINDS = ("xla", "apart", "kernel")
LAYERS = {"smollm2-135m": 16, "llama-3.1-8b": 4}
TOKENS = {"smollm2-135m": (1, 2, 4, 8, 16), "llama-3.1-8b": (1,)}
QUICK = (1, 8)


@functools.lru_cache(maxsize=1)
def make_blocks(model: str) -> list[Block]:
    config = MODEL_SHAPES[model]
    return [Block(config, rngs=nnx.Rngs(nth), dtype=jnp.bfloat16) for nth in range(LAYERS[model])]


def num_bytes(model: str) -> int:
    """Of a layer's kernels."""
    config = MODEL_SHAPES[model]
    heads = config.num_attention_heads + config.num_key_value_heads
    return 2 * config.hidden_size * (2 * heads * config.head_dim + 3 * config.intermediate_size)


def prepare(model: str, tokens: int, kind: str) -> Callable[[], float]:
    """Compiles the layers, and gives the function that times them: microseconds of one."""
    config, blocks = MODEL_SHAPES[model], make_blocks(model)
    graph, weights = nnx.split(blocks)

    def attend(qkv):
        whole = qkv if qkv.ndim == 3 else sum_parts(qkv, jnp.bfloat16)
        return lax.optimization_barrier(whole[:, : config.num_attention_heads]), None

    def layers(x, weights):
        blocks = nnx.merge(graph, weights)
        if kind == "kernel":
            run = run_in_kernels(blocks, x, [attend] * len(blocks))
            if run is None:
                raise ValueError(f"there is no kernel for {tokens} tokens of {model}")
            x, delta, _ = run
        else:
            delta = None
            for block in blocks:
                implementation = "xla" if kind == "xla" else None
                x, delta, _ = block(x, delta, attend, in_parts=kind == "apart", implementation=implementation)
        return blocks[0].attention_norm.add(x, delta)[1]

    x = jax.random.normal(jax.random.key(0), (tokens, config.hidden_size), jnp.bfloat16)
    step = jax.jit(layers, donate_argnums=0)
    x = jax.block_until_ready(step(x, weights))
    return lambda: median_us(step, x, (weights,), len(blocks), replays=30)


_COLUMNS = ["Model", "Tokens", "XLA, us", "apart, us", "kernel, us", "Times XLA", "Times apart", "TB/s"]


def _lines(results: list[dict[str, Any]]) -> list[list[Any]]:
    return [
        [
            r["model"],
            str(r["tokens"]),
            *(f"{r[f'{kind}_us']:.1f}" for kind in KINDS),
            f"{r['xla_us'] / r['kernel_us']:.2f}",
            f"{r['apart_us'] / r['kernel_us']:.2f}",
            f"{r['tb_per_s']:.2f}",
        ]
        for r in results
    ]


def render(record: dict) -> str:
    """A record of this script as Markdown."""
    return f"{table(_COLUMNS, _lines(record['results']['layer']), num_text=1)}\n{measured(record)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a layer of few tokens without its attention.")
    parser.add_argument("--quick", action="store_true", help="1 and 8 tokens only")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPU's memory
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    arguments = arguments_on_gpu(parser, render)
    if arguments is None:
        return
    jobs = [
        (model, tokens, kind)
        for model in LAYERS
        for tokens in TOKENS[model]
        if tokens in QUICK or not arguments.quick
        for kind in KINDS
    ]
    found: dict[tuple, float] = {}
    for nth, us in measure_all(prepare, jobs):
        if isinstance(us, Failure):
            sys.exit(f"{jobs[nth]}: {us.error}")
        found[jobs[nth]] = us
        print(*jobs[nth], round(us, 2), flush=True)
    results = [
        {
            "model": model,
            "tokens": tokens,
            **{f"{kind}_us": round(found[model, tokens, kind], 2) for kind in KINDS},
            "tb_per_s": round(num_bytes(model) / found[model, tokens, "kernel"] / 1e6, 3),
        }
        for model, tokens in dict.fromkeys((model, tokens) for model, tokens, _ in jobs)
    ]
    print_table("A layer without its attention", _COLUMNS, _lines(results))
    print_json("bench_layer", {"layer": results})


if __name__ == "__main__":
    main()
