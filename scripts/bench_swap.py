"""What a preemption costs: to compute tokens again, or to move their pages to the host and back, by page size.

    python scripts/bench_swap.py --model llama-3-8b --dtype bfloat16 > swap.json    on a device that holds the model
    python scripts/bench_swap.py --model smollm2-135m --layers 2 --max-mib 64       a small try

The last line is JSON. Its `prefill_s_per_token`, `swap_s` and `swap_s_per_page`, for pages of `--page-size` tokens, are
what `SchedulerConfig(preemption="auto", preemption_costs=FILE)` reads out of a file that holds this line alone.

Weights and pages are random; sizes are those of the named model. Computing is the engine's own step over prompts of
several lengths, swapping its own page mover between the pool and host memory. Medians of `--repeats` runs, everything
compiled before. The model of costs has no fixed part for computing, since what is computed again shares steps with
others: seconds a token are the least squares through the origin. For swapping out and in together, a fixed part and one
a page are fitted with relative weights, so that few pages count as much as many.

Reference: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023,
figure 19.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from flax import nnx

from jpaged import EngineConfig, SamplingParams, SchedulerConfig
from jpaged.config import CacheConfig
from jpaged.engine import Engine
from jpaged.errors import JpagedError
from jpaged.model_bytes import kv_bytes_per_page
from jpaged.model_shapes import MODEL_SHAPES, model_shape
from jpaged.models import Llama, LlamaConfig
from jpaged.page_mover import PageMover
from jpaged.pallas_kernels import KVPages, make_pages, resolve_implementation
from jpaged.preemption import PreemptionCosts
from jpaged.step_plan import PageTransfers
from scripts.report import environment, print_table

_LEAST_S = 1e-9  # a fit may come out at nothing; costs are positive


def median_s(run: Callable[[], object], repeats: int) -> float:
    """Seconds of a run, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def measure_prefill(config: LlamaConfig, dtype: str, lengths: list[int], repeats: int) -> dict[int, float]:
    """Seconds of an engine's step over a prompt, by its tokens."""
    longest = max(lengths)
    model = Llama(config, rngs=nnx.Rngs(0), dtype=dtype)
    pages = -(-(longest + 16) // 16) + 1
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=longest, max_model_len=longest + 1)
    engine = Engine(
        model,
        EngineConfig(
            cache=CacheConfig(num_pages=pages, prefix_cache=False),
            scheduler=scheduler,
            token_buckets=sorted({1, *lengths}),
            warmup="eager",
        ),
    )
    rng = np.random.default_rng(0)

    def serve(num_tokens: int) -> None:
        prompt = rng.integers(0, config.vocab_size, num_tokens).tolist()
        engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        while engine.has_work:
            engine.step()

    return {num_tokens: median_s(lambda n=num_tokens: serve(n), repeats) for num_tokens in lengths}


def make_pool(config: LlamaConfig, num_pages: int, page_size: int, dtype: str) -> list[KVPages]:
    """A page pool, without weights."""
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    implementation, _ = resolve_implementation(None)
    specs = model.page_specs(num_pages=num_pages, page_size=page_size, dtype=dtype, implementation=implementation)
    return [make_pages(spec) for spec in specs]


def measure_swap(
    config: LlamaConfig, page_size: int, counts: list[int], dtype: str, repeats: int
) -> Iterator[tuple[int, float, float]]:
    """(pages, seconds out, seconds in) for each number of pages, all moved at once."""
    most = max(counts)
    pool = make_pool(config, most + 1, page_size, dtype)
    mover = PageMover(pool, num_host_pages=most)
    pool = mover.warm_up(pool)
    shuffled = np.random.default_rng(0).permutation(np.arange(1, most + 1)).tolist()  # pages of a sequence lie anywhere
    for count in counts:
        pairs = tuple(zip(shuffled[:count], range(1, count + 1), strict=True))

        def move(transfers: PageTransfers) -> None:
            nonlocal pool
            pool = mover.move(pool, transfers)
            jax.block_until_ready(pool)

        out = PageTransfers(swapped_out=pairs)
        back = PageTransfers(swapped_in=tuple((host, device) for device, host in pairs))
        out_s = median_s(lambda transfers=out: move(transfers), repeats)
        yield count, out_s, median_s(lambda transfers=back: move(transfers), repeats)


def fit_prefill(seconds: dict[int, float]) -> float:
    """Seconds a token.

    Example:
      >>> fit_prefill({100: 1.0, 200: 2.0})
      0.01
    """
    tokens, times = np.array(list(seconds)), np.array(list(seconds.values()))
    return float((tokens * times).sum() / (tokens * tokens).sum())


def fit_swap(rows: list[tuple[int, float, float]]) -> tuple[float, float]:
    """Fixed seconds, and seconds a page, of moving pages out and in again.

    Example:
      >>> fixed, each = fit_swap([(1, 1.0, 2.0), (11, 6.0, 7.0)])
      >>> round(fixed, 6), round(each, 6)
      (2.0, 1.0)
    """
    pages = np.array([row[0] for row in rows], float)
    times = np.array([row[1] + row[2] for row in rows])
    if len(rows) == 1:
        return _LEAST_S, max(float(times[0] / pages[0]), _LEAST_S)
    each, fixed = np.polyfit(pages, times, 1, w=1 / times)
    return max(float(fixed), _LEAST_S), max(float(each), _LEAST_S)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that the JSON line holds, but for where it was measured."""
    config = model_shape(args.model)
    if args.layers:
        config = replace(config, num_hidden_layers=args.layers)
    prefill = measure_prefill(config, args.dtype, args.prefill_tokens, args.repeats)
    by_page_size: dict[str, Any] = {}
    for size in sorted({*args.page_sizes, args.page_size}):
        per_page = kv_bytes_per_page(config, size, args.dtype)
        most = args.max_mib * 2**20 // per_page
        wanted = {*args.pages, *(-(-tokens // size) for tokens in args.tokens)}
        counts = [count for count in sorted(wanted) if count <= most]
        if not counts:
            continue
        rows = list(measure_swap(config, size, counts, args.dtype, args.repeats))
        fixed, each = fit_swap(rows)
        by_page_size[str(size)] = {
            "bytes_per_page": per_page,
            "swap_s": fixed,
            "swap_s_per_page": each,
            "pages": {str(count): {"out_s": out, "in_s": back} for count, out, back in rows},
        }
    if str(args.page_size) not in by_page_size:
        raise ValueError(f"no page of {args.page_size} tokens fits into --max-mib {args.max_mib}; raise it")
    chosen = by_page_size[str(args.page_size)]
    costs = PreemptionCosts(
        prefill_s_per_token=fit_prefill(prefill), swap_s=chosen["swap_s"], swap_s_per_page=chosen["swap_s_per_page"]
    )
    results = {
        "model": args.model,
        "layers": config.num_hidden_layers,
        "dtype": args.dtype,
        "page_size": args.page_size,
        "tokens": args.tokens,
        "prefill_s": {str(tokens): seconds for tokens, seconds in prefill.items()},
        "by_page_size": by_page_size,
    }
    return asdict(costs) | {"results": results | asdict(costs)}


def print_tables(found: dict[str, Any]) -> None:
    """Figures for people."""
    results = found["results"]
    rows: list[list[object]] = [
        [f"{int(n):,}", f"{1e3 * s:.2f}", f"{1e6 * s / int(n):.1f}"] for n, s in results["prefill_s"].items()
    ]
    print_table(f"Computing, {results['model']}, {results['dtype']}", ["tokens", "ms", "us a token"], rows)
    rows = []
    for size, row in results["by_page_size"].items():
        for tokens in results["tokens"]:
            moved = row["pages"].get(str(-(-tokens // int(size))))
            if moved is not None:
                again = 1e3 * found["prefill_s_per_token"] * tokens
                ms = [1e3 * moved["out_s"], 1e3 * moved["in_s"], 1e3 * (moved["out_s"] + moved["in_s"]), again]
                rows.append([f"{tokens:,} in pages of {size}", *(f"{value:.2f}" for value in ms)])
    print_table("Swapping, ms", ["tokens", "out", "in", "both", "computing again"], rows)
    rows = [
        [size, f"{1e3 * row['swap_s']:.3f}", f"{1e3 * row['swap_s_per_page']:.4f}"]
        for size, row in results["by_page_size"].items()
    ]
    print_table("Out and in, fitted", ["page size", "fixed, ms", "a page, ms"], rows)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    result.add_argument("--model", default="smollm2-135m", choices=sorted(MODEL_SHAPES), metavar="NAME")
    result.add_argument("--dtype", default="float32", help="of weights and pages (default: %(default)s)")
    result.add_argument("--layers", type=int, help="so many layers alone, for a small device")
    result.add_argument("--page-size", type=int, default=16, help="that of the three constants (default: %(default)s)")
    result.add_argument("--page-sizes", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256], metavar="N")
    result.add_argument("--pages", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024], metavar="N")
    result.add_argument("--tokens", type=int, nargs="+", default=[256, 1024], metavar="N", help="sequences to compare")
    result.add_argument("--prefill-tokens", type=int, nargs="+", default=[256, 512, 1024, 2048], metavar="N")
    result.add_argument("--max-mib", type=int, default=4096, help="of pages moved at once (default: %(default)s)")
    result.add_argument("--repeats", type=int, default=5)
    result.add_argument("--json", action="store_true", help="print only the JSON line")
    return result


def main() -> int:
    args = parser().parse_args()
    try:
        found = measure(args)
    except (JpagedError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not args.json:
        print_tables(found)

    print(json.dumps({"script": "bench_swap", **environment(), **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
