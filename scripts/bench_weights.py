"""Times the matrix products of a model whose weights are quantised, beside those of bfloat16 weights in the same run.

    python scripts/bench_weights.py [--model llama-3.1-8b] [--tokens 1,32,256,2048,8192]
    python scripts/bench_weights.py --render docs/benchmarks/h200-weights.json     that record as Markdown

A product is what `Linear` and `QuantisedLinear` compute: q, k and v; o; gate and up; down. Each is called in a chain in
one program, every time with other weights, which together are far larger than the L2 cache. *layers* are all products
of all layers, one after the other as in a step, each with weights of its own; of all else there is in a layer, only the
sums and the activation between gate and up, and down. The program is replayed, and the median of several batches of
replays is taken. Prints a table and a last line of JSON.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.model_bytes import kernel_shapes
from jpaged.model_shapes import model_shape
from jpaged.models.linear import Linear
from jpaged.models.parameter_map import WEIGHT_FORMS
from jpaged.models.quantised import QuantisedLinear
from scripts.markdown import measured, table
from scripts.report import print_json, print_table

PRODUCTS = ("qkv", "o", "gate_up", "down")
FORMS = ("bfloat16", *WEIGHT_FORMS)
CHAIN_BYTES = 4 * 10**9  # of bfloat16 weights that a chain reads at the most; the L2 cache of an H200 holds 50 MB
BATCHES, REPLAYS = 5, 4


def make_layers(model: str, form: str, num_layers: int | None) -> nnx.List:
    """The four products of each layer, with random weights."""
    config = model_shape(model)

    def make(shape: tuple[int, int], seed: int) -> Linear | QuantisedLinear:
        linear = Linear(*shape, rngs=nnx.Rngs(seed), dtype=jnp.bfloat16)
        return linear if form == "bfloat16" else QuantisedLinear(linear, form)

    shapes = kernel_shapes(config)
    count = num_layers or config.num_hidden_layers
    return nnx.List([nnx.List([make(shape, 4 * i + j) for j, shape in enumerate(shapes)]) for i in range(count)])


def num_bytes(module: nnx.Module) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(module)))


def run_chain(modules: nnx.List, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """One product after the other on the same input; none begins before the last one has ended."""
    kept = []
    for module in modules:
        x, y = jax.lax.optimization_barrier((x, module(x)))
        kept.append(y)  # a product that nobody reads would be left out
    return x, kept


def run_layers(layers: nnx.List, x: jax.Array) -> tuple[jax.Array, Any]:
    """All products of all layers; attention gives the queries back."""
    first = x
    for qkv, o, gate_up, down in layers:
        x = x + o(qkv(x)[:, : num_inputs(o)])
        gate, up = jnp.split(gate_up(x), 2, axis=-1)
        x = x + down(jax.nn.silu(gate) * up)
    return first, x[:1]


def num_inputs(product: Linear | QuantisedLinear) -> int:
    return product.kernel.shape[0 if isinstance(product, Linear) else 1]


def prepare(run: Callable[..., Any], modules: nnx.List, tokens: int) -> Callable[[], float]:
    """Compiles a program, and gives the function that times it: microseconds a run."""
    graph, state = nnx.split(modules)
    width = num_inputs(modules[0] if run is run_chain else modules[0][0])
    x = jax.random.normal(jax.random.key(0), (tokens, width), jnp.bfloat16)
    # The input is donated and comes back, so that no buffer moves between replays.
    step = jax.jit(lambda x, state: run(nnx.merge(graph, state), x), donate_argnums=0).lower(x, state).compile()

    def seconds(x: jax.Array) -> float:
        times = []
        for _ in range(BATCHES + 1):  # the first one warms up
            start = time.perf_counter()
            for _ in range(REPLAYS):
                x, _ = step(x, state)
            jax.block_until_ready(x)
            times.append((time.perf_counter() - start) / REPLAYS)
        return statistics.median(times[1:])

    return lambda: 1e6 * seconds(x)


def jobs_of(layers: nnx.List, tokens: int) -> list[tuple]:
    """(name, run, modules, tokens) of the programs of a form."""
    jobs: list[tuple] = []
    for index, name in enumerate(PRODUCTS):
        size = 2 * layers[0][index].kernel.size
        modules = nnx.List([layer[index] for layer in layers[: max(2, -(-CHAIN_BYTES // size))]])
        jobs.append((name, run_chain, modules, tokens))
    return [*jobs, ("layers", run_layers, layers, tokens)]


def result_of(name: str, form: str, modules: nnx.List, tokens: int, us: float) -> dict[str, Any]:
    calls = 1 if name == "layers" else len(modules)
    kernels = [leaf.size for leaf in jax.tree.leaves(nnx.state(modules)) if leaf.ndim == 2]
    return {
        "product": name,
        "weights": form,
        "tokens": tokens,
        "us": round(us / calls, 2),
        "weights_tb_per_s": round(num_bytes(modules) / us / 1e6, 2),
        "tflop_per_s": round(2 * tokens * sum(kernels) / us / 1e6, 1),
    }


COLUMNS = ["product, tokens, weights", "us", "weights, TB/s", "TFLOP/s", "times bfloat16"]


def lines_of(results: list[dict]) -> list[list[Any]]:
    plain = {(r["product"], r["tokens"]): r["us"] for r in results if r["weights"] == "bfloat16"}
    return [
        [
            f"{r['product']}, {r['tokens']:,}, {r['weights']}",
            f"{r['us']:,}",
            r["weights_tb_per_s"],
            r["tflop_per_s"],
            f"{plain[r['product'], r['tokens']] / r['us']:.2f}",
        ]
        for r in results
    ]


def render(record: dict) -> str:
    """A record of this script as Markdown."""
    lines = [[str(x) for x in line] for line in lines_of(record["results"]["products"])]
    columns = ["Product, tokens, weights", "us", "Weights, TB/s", *COLUMNS[3:4], "Times bfloat16"]
    return f"{table(columns, lines)}\n{measured(record)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time products with quantised weights.")
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape that is known by name")
    parser.add_argument("--tokens", default="1,32,256,2048,8192", help="rows of the products")
    parser.add_argument("--layers", type=int, help="only so many layers")
    parser.add_argument("--render", metavar="FILE", type=Path, help="print a record as Markdown and measure nothing")
    arguments = parser.parse_args()
    if arguments.render:
        print(render(json.loads(arguments.render.read_text(encoding="utf-8"))), end="")
        return
    tokens, results = [int(count) for count in arguments.tokens.split(",")], []
    models = {form: make_layers(arguments.model, form, arguments.layers) for form in FORMS}
    for count in tokens:
        jobs = [(form, *job) for form in FORMS for job in jobs_of(models[form], count)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # nearly all of the time is the compiler's
            timers = list(pool.map(lambda job: prepare(*job[2:]), jobs))
        for (form, name, _, modules, _), timer in zip(jobs, timers, strict=True):
            results.append(result_of(name, form, modules, count, timer()))
            print(results[-1], flush=True)
    results.sort(key=lambda r: ([*PRODUCTS, "layers"].index(r["product"]), r["tokens"], FORMS.index(r["weights"])))
    print_table(f"Products of {arguments.model}", COLUMNS, lines_of(results))
    print_json("bench_weights", {"model": arguments.model, "products": results})


if __name__ == "__main__":
    main()
