"""The run of bench_engine.py once jax may take the device: one engine, and each workload's results as they come."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax

from jpaged import CacheConfig
from jpaged.accelerators import accelerator_of
from jpaged.engine import Engine
from scripts.engine import setup
from scripts.engine.breakdown import measure_breakdown
from scripts.engine.kernel_classes import scopes_of
from scripts.engine.measures import Bench, decode_prompts, measure_decode, measure_load
from scripts.engine.peers import Yardstick
from scripts.engine.results import Results
from scripts.engine.roofline import Roofs
from scripts.engine.serve import exercise, request, serve
from scripts.engine.together import measure_together
from scripts.engine.workloads import Load

# These take long, and have many requests of their own to average over.
_MEASURED_ONCE: Final = ("azure", "uniform")

Cells = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Started:
    """An engine with every program compiled.

    Attributes:
      engine, model: it, and what it serves.
      name: of the model.
      seconds: what the start took, by phase.
    """

    engine: Engine
    model: Any
    name: str
    seconds: Mapping[str, float]


def dtype_of(args: argparse.Namespace) -> str:
    """The dtype of the weights; asks jax for its device."""
    return args.dtype or setup.default_dtype(jax.devices()[0].platform)


def start(args: argparse.Namespace, results: Results, needs: setup.Needs) -> Started:
    """Model, pool and programs.

    Raises:
      JpagedError: the settings contradict each other, or there is no such model.
    """
    begin = time.perf_counter()
    model, name = setup.make_model(args.model, dtype_of(args), random_weights=args.random_weights, weights=args.weights)
    made = time.perf_counter()
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit", 0)
    config = setup.make_config(
        needs,
        accelerator=accelerator_of(device.platform, device.device_kind, memory),
        budget=args.token_budget,
        prefill=args.prefill_budget,
        buckets=[int(word) for word in args.token_buckets.split(",")] if args.token_buckets else None,
        cache=CacheConfig(page_size=args.page_size, num_pages=args.pages, dtype=args.kv_dtype),
        implementation=args.implementation,
        max_num_seqs=args.max_num_seqs,
    )

    def compiled(program: object, seconds: float) -> None:
        results.say(f"compiled {program} in {seconds:.1f} s")

    engine, seconds = setup.start_engine(model, config, compiled)
    serve(engine, [request([1, 2, 3], 1)])  # it answers
    seconds = {"model": made - begin, **seconds, "first_answer": time.perf_counter() - made - sum(seconds.values())}
    return Started(engine, model, name, {phase: round(each, 2) for phase, each in seconds.items()})


def make_bench(args: argparse.Namespace, results: Results, started: Started, roofs: Roofs) -> Bench:
    """What the measurements need, every step having run; says and keeps what they are made with."""
    engine, device, dtype = started.engine, jax.devices()[0], dtype_of(args)
    plan, limits, cost = engine.pool_plan, engine.config.scheduler, setup.model_cost(engine, started.model)
    same = dtype if args.weights is None and engine.dtype == dtype else "mixed"  # as the peers had it
    results.say(f"{started.name}, {dtype}, attention by {engine.implementation}; {plan}")
    results.say(f"all step shapes ran a few times, in {exercise(engine):.1f} s")
    results.say(f"start: {dict(started.seconds)} s, {engine.stats().num_compilations} programs")
    results.say(f"roofs: {roofs.read / 1e12:.3f} TB/s read, {roofs.matmul / 1e12:.2f} TFLOP/s of {dtype} products")
    results.add(
        {
            "model": started.name,
            "dtype": dtype,
            "weights": args.weights or dtype,
            "kv_dtype": engine.dtype,
            "implementation": engine.implementation,
            "scale": args.scale,
            "temperature": args.temperature,
            "page_size": plan.page_size,
            "num_pages": plan.num_pages,
            "max_model_len": plan.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "token_budget": limits.max_num_batched_tokens,
            "prefill_budget": limits.max_num_prefill_tokens,
            "step_shapes": [str(shape) for shape in engine.step_shapes],
            "start_seconds": started.seconds,
            "compile_s": round(started.seconds["compile"], 1),
            "compiled_at_start": engine.stats().num_compilations,
            "roofs": {
                "read_tb_per_s": round(roofs.read / 1e12, 4),
                "matmul_tflop_per_s": round(roofs.matmul / 1e12, 4),
            },
            "weight_gb": round(cost.weight_bytes / 1e9, 3),
            "kv_token_kib": round(cost.kv_token_bytes / 1024, 3),
        }
    )
    return Bench(
        engine=engine,
        num_layers=started.model.config.num_hidden_layers,
        cost=cost,
        roofs=roofs,
        yardstick=Yardstick.of(started.name, device.device_kind, same, args.scale),
        repeats=args.repeats,
        scale=args.scale,
        temperature=args.temperature,
    )


def run_decode(bench: Bench, results: Results, cells: Cells, profiled: Cells, late: Callable[[], bool]) -> None:
    """Decode steps of all cells, and where the time of some of them goes.

    Args:
      bench, results: of this run.
      cells: (rows, context) to measure.
      profiled: those of them to break down.
      late: no time is left for another cell.
    """
    done: list[dict[str, Any]] = []
    broken_down: list[dict[str, Any]] = []
    prompts = decode_prompts(cells, bench.engine.vocab_size)
    for cell in measure_decode(bench, cells, late):
        done.append(cell)
        results.add({"decode": {"steps": bench.steps, "cells": done}})
        results.say(
            f"decode {cell['rows']} x {cell['context']}: {cell['ms']} ms {cell['ms_of_each']}, "
            f"over {_timed(cell['timed_steps'], bench.steps)}, "
            f"{cell['roofline_fraction']:.1%} of the roofline ({cell['roofline_ms']} ms){_beside(cell)}"
        )
        rows, context = cell["rows"], cell["context"]
        if (rows, context) in profiled and not late():
            scopes = _scopes(bench.engine, rows)
            broken_down.append(measure_breakdown(bench, rows, context, prompts[context], scopes))
            results.add({"breakdown": broken_down})
            _say_breakdown(results, broken_down[-1])


def run_load(bench: Bench, results: Results, load: Load) -> None:
    """One workload of whole requests."""
    found = measure_load(replace(bench, repeats=1) if load.name in _MEASURED_ONCE else bench, load)
    results.add({load.name.replace("-", "_"): found})
    results.say(
        f"{load.name}: {found[found['figure']]:,} {found['unit']} in {found['seconds']} s, "
        f"{found['roofline_fraction']:.1%} of the roofline ({found['roofline_s']} s){_beside(found)}; "
        f"{found['steps']} steps of {found['rows_per_step']} rows, {found['padded_fraction']:.1%} padding, "
        f"{found['preemptions']} preemptions, host {found['host_ms']}"
    )


def run_together(bench: Bench, results: Results, args: argparse.Namespace) -> None:
    """Requests at once against one by one."""
    found = measure_together(
        bench.engine,
        count=args.requests,
        tokens=args.tokens,
        alone=args.alone,
        repeats=bench.repeats,
        seed=args.seed,
    )
    results.add({"together": found})
    rates = [
        ["together", f"{found['together_tokens_per_s']:.1f}"],
        ["one by one", f"{found['one_by_one_tokens_per_s']:.1f}"],
        ["ratio", f"{found['speedup']:.2f}"],
    ]
    results.table(f"{args.requests} requests of {args.tokens} tokens", ["", "output tokens/s"], rates)
    phases = [(phase.removesuffix("_s"), ms) for phase, ms in found["ms_per_step"].items()]
    results.table("A step with run-ahead off", ["phase", "ms"], phases)
    outside = found["outside_xla_fraction"], found["outside_xla_or_dispatching_fraction"]
    results.say(f"outside XLA: {outside[0]:.1%} of the wall time, {outside[1]:.1%} with dispatching")


def _timed(steps: float, asked: int) -> str:
    """What a decode cell is the mean of: a whole run has one step more than was asked, for the first token."""
    return f"{steps} of {asked} steps" if steps <= asked else "a whole run with admission and ends"


def _beside(found: Mapping[str, Any]) -> str:
    text = f"; vLLM {found['vllm']:,}, {found['times_vllm']:.2f} times as good" if "vllm" in found else ""
    return text + (f"; to reach: {found['reach']:,}" if "reach" in found else "")


def _scopes(engine: Engine, rows: int) -> dict[str, str]:
    """Name scopes of the program that decodes so many rows; it comes from the compilation cache."""
    enough = [shape for shape in engine.step_shapes if shape.num_tokens >= rows]
    shape = next((shape for shape in enough if shape.num_steps > 1), enough[0])
    return scopes_of(engine.lower_step(shape).compile().as_text() or "")


def _say_breakdown(results: Results, cell: Mapping[str, Any]) -> None:
    results.say(f"A decode step of {cell['rows']} rows at {cell['context']} tokens: {cell['step_ms']} ms")
    if "classes_ms" in cell:
        rows = [(name, ms, cell["classes_kernels"][name]) for name, ms in cell["classes_ms"].items()]
        rows.append(("between kernels", cell["between_kernels_ms"], ""))
        results.table("on the device", ["", "ms", "kernels"], rows)
        outside = cell["kernels_outside_graphs_per_step"]
        results.say(
            f"device idle {cell['idle_fraction']:.1%} ({cell['idle_fraction_profiled']:.1%} of the profile); "
            f"{cell['kernels_per_step']} kernels a step, outside CUDA graphs {outside}; "
            f"calls of the host a step: {cell['calls_per_step']}"
        )
    phases = [(phase.removesuffix("_s"), ms) for phase, ms in cell["host_ms"].items()]
    results.table("on the host", ["", "ms"], phases)
