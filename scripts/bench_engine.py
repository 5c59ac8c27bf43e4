"""Throughput of the engine: requests together against the same requests one by one, and the time outside XLA.

    python scripts/bench_engine.py                       the default model on whatever device jax finds
    python scripts/bench_engine.py --requests 8 --json   only the JSON line

One engine, compiled once, serves all measurements. Each request has a prompt and an output of at most `--tokens`
tokens together, and outputs do not stop early. One by one the rate does not depend on how many requests there are, so
only the first `--alone` of them are served that way. The two orders alternate `--repeats` times and medians are given,
because a shared machine is noisy: read the ratio, not the rates.

"Outside XLA" is measured with run-ahead off, so that host and device work do not overlap: the part of the wall time in
which the host neither dispatches a step nor waits for one. Dispatching is counted apart: where a program has loops that
the host drives, the program runs then; where it has none, it is jax's own Python. So the truth lies between "outside
XLA" and "outside XLA or dispatching". With run-ahead on, most of it hides behind the device.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from jpaged import EngineConfig, SamplingParams, SchedulerConfig
from jpaged.engine import Engine
from jpaged.fetch import fetch
from jpaged.models import load_model
from jpaged.stats import EngineStats
from scripts.report import print_json, print_table


@dataclass(frozen=True)
class Run:
    """One pass over all requests."""

    wall_s: float
    output_tokens: int
    before: EngineStats
    after: EngineStats

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s

    def spent(self, name: str) -> float:
        return getattr(self.after, name) - getattr(self.before, name)


def make_requests(count: int, tokens: int, vocab_size: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of random tokens, a quarter to a half of `tokens` long, and outputs that fill up the rest."""
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(count):
        length = int(rng.integers(tokens // 4, tokens // 2 + 1))
        prompt = rng.integers(0, vocab_size, length).tolist()
        requests.append((prompt, SamplingParams(temperature=0.0, max_tokens=tokens - length, ignore_eos=True)))
    return requests


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]], *, at_once: int) -> Run:
    """Serves all requests, `at_once` at a time."""
    before, start, produced = engine.stats(), time.perf_counter(), 0
    for first in range(0, len(requests), at_once):
        for prompt, params in requests[first : first + at_once]:
            engine.add(prompt, params)
        while engine.has_work:
            produced += sum(len(output.token_ids) for output in engine.step())
    return Run(time.perf_counter() - start, produced, before, engine.stats())


def outside_xla_fraction(run: Run, *, dispatching: bool) -> float:
    """Part of the wall time that is not in XLA; with `dispatching`, or in handing work to it."""
    inside = run.spent("wait_s") + (0.0 if dispatching else run.spent("dispatch_s"))
    return 1.0 - inside / run.wall_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, ... (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="prompt and output of a request together")
    parser.add_argument("--alone", type=int, default=8, help="requests served one by one (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    args = parser.parse_args()

    path = fetch(args.model)
    name = path.stem if Path(args.model).exists() else args.model
    model = load_model(path, dtype=args.dtype)
    config = EngineConfig(
        scheduler=SchedulerConfig(max_num_seqs=args.requests, max_model_len=args.tokens),
        warmup="eager",
        recompile="error",
    )
    engine = Engine(model, config)
    compile_s = engine.stats().compile_s
    requests = make_requests(args.requests, args.tokens, engine.vocab_size, args.seed)
    run(engine, requests[:2], at_once=2)  # first touch of every page and buffer

    together, alone = [], []
    for _ in range(args.repeats):
        together.append(run(engine, requests, at_once=args.requests))
        alone.append(run(engine, requests[: args.alone], at_once=1))
    engine.config = replace(config, run_ahead=False)
    in_turn = [run(engine, requests, at_once=args.requests) for _ in range(args.repeats)]

    tokens_per_s = statistics.median(r.tokens_per_s for r in together)
    tokens_per_s_alone = statistics.median(r.tokens_per_s for r in alone)
    speedup = statistics.median(t.tokens_per_s / a.tokens_per_s for t, a in zip(together, alone, strict=True))
    outside = statistics.median(outside_xla_fraction(r, dispatching=False) for r in in_turn)
    outside_or_dispatching = statistics.median(outside_xla_fraction(r, dispatching=True) for r in in_turn)
    stats = in_turn[-1].after
    phases = {
        name: round(1e3 * statistics.median(r.spent(name) / r.spent("num_steps") for r in in_turn), 3)
        for name in ("plan_s", "pack_s", "dispatch_s", "wait_s", "update_s")
    }
    results = {
        "model": name,
        "dtype": args.dtype,
        "requests": args.requests,
        "requests_one_by_one": args.alone,
        "tokens_each": args.tokens,
        "together_tokens_per_s": round(tokens_per_s, 1),
        "one_by_one_tokens_per_s": round(tokens_per_s_alone, 1),
        "speedup": round(speedup, 2),
        "outside_xla_fraction": round(outside, 4),
        "outside_xla_or_dispatching_fraction": round(outside_or_dispatching, 4),
        "ms_per_step": phases,
        "peak_pages_used": stats.peak.pages_used,
        "peak_wasted_fraction": round(stats.peak.wasted_fraction, 4),
        "step_shapes": [str(shape) for shape in engine.step_shapes],
        "compile_s": round(compile_s, 1),
    }
    if not args.json:
        print_table(
            f"{args.requests} requests of {args.tokens} tokens, {name}, {args.dtype}",
            ["", "output tokens/s"],
            [
                ["together", f"{tokens_per_s:.1f}"],
                ["one by one", f"{tokens_per_s_alone:.1f}"],
                ["ratio", f"{speedup:.2f}"],
            ],
        )
        print_table("A step with run-ahead off", ["phase", "ms"], [[k[:-2], v] for k, v in phases.items()])
        print(f"outside XLA: {outside:.1%} of the wall time, {outside_or_dispatching:.1%} with dispatching")
    print_json("bench_engine", results)


if __name__ == "__main__":
    main()
