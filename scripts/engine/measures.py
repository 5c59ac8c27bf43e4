"""What is measured of each workload: `measure_decode` and `measure_load`, beside the roofline and the peers."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from jpaged.engine import Engine
from scripts.engine.peers import Yardstick
from scripts.engine.roofline import ModelCost, Roofs
from scripts.engine.serve import Request, Run, request, serve
from scripts.engine.workloads import Load, decode_steps

# The figure of a workload, and its unit; less is better for seconds alone.
FIGURES: Final = {
    "prefill": ("prompt_tokens_per_s", "prompt tokens/s"),
    "uniform": ("output_tokens_per_s", "output tokens/s"),
    "azure": ("total_tokens_per_s", "tokens/s"),
    "shared-prefix": ("seconds", "s"),
    "alone": ("output_tokens_per_s", "output tokens/s"),
}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all measurements need.

    Attributes:
      engine: which has every step compiled.
      num_layers: of its model.
      cost: of a step.
      roofs: of its device.
      yardstick: the peers' figures.
      repeats: of each measurement; medians are given.
      scale: of the workloads.
      temperature: of the sampled tokens.
    """

    engine: Engine
    num_layers: int
    cost: ModelCost
    roofs: Roofs
    yardstick: Yardstick
    repeats: int
    scale: float = 1.0
    temperature: float = 0.0

    @property
    def steps(self) -> int:
        """Decode steps of a cell."""
        return decode_steps(self.scale)


def decode_prompts(cells: Sequence[tuple[int, int]], vocab_size: int) -> dict[int, list[list[int]]]:
    """context -> prompts; a cell of fewer rows takes the first ones, so that they are cached already."""
    most = {context: max(rows for rows, other in cells if other == context) for _, context in cells}
    return {
        context: np.random.default_rng([7, context]).integers(0, vocab_size, (rows, context)).tolist()
        for context, rows in most.items()
    }


def measure_decode(
    bench: Bench, cells: Sequence[tuple[int, int]], stop: Callable[[], bool] = lambda: False
) -> Iterator[dict[str, Any]]:
    """Each cell: from when all rows have a token, or more, to the end of `steps` more, by the tokens that came.

    Prompts are in the prefix cache. What it takes to admit the requests is not in it, nor what another run takes.

    Args:
      bench: what all measurements need.
      cells: (rows, context) of each.
      stop: asked before each cell; ends it all.
    """
    engine, steps, prompts = bench.engine, bench.steps, decode_prompts(cells, bench.engine.vocab_size)
    engine.reset_prefix_cache()
    for rows, context in cells:
        if stop():
            return

        def requests(tokens: int, rows=rows, context=context) -> list[Request]:
            return [request(ids, tokens, bench.temperature) for ids in prompts[context][:rows]]

        what = f"decode {rows}@{context}"
        serve(engine, requests(1), what=what)  # computes the prompts
        # The first calls of a program are slower: they record its CUDA graph. `exercise` ran each program, but perhaps
        # with another page width. Three runs it is at least; a cell of fewer steps is served several times for that.
        warm = 3 * (engine.config.decode_steps or 1)
        for _ in range(-(-warm // min(warm, steps))):
            serve(engine, requests(1 + min(warm, steps)), what=what)
        timed = [_decode_ms(engine, requests(1 + steps), what) for _ in range(bench.repeats)]
        times, runs = [ms for ms, _ in timed], [run for _, run in timed]
        ms, roof = statistics.median(times), 1e3 * bench.cost.decode_s(bench.roofs, rows, context + steps / 2)
        yield {
            "rows": rows,
            "context": context,
            "ms": round(ms, 3),
            "ms_of_each": [round(each, 3) for each in times],
            "tokens_per_s": round(1e3 * rows / ms, 1),
            "roofline_ms": round(roof, 3),
            "roofline_fraction": round(roof / ms, 3),
            "prompt_cached": round(min(run.cached_fraction for run in runs), 3),
            "host_ms": runs[-1].ms_per_step,
            **bench.yardstick.compare(ms, "decode", f"{rows}@{context}"),
        }


def _decode_ms(engine: Engine, requests: Sequence[Request], what: str) -> tuple[float, Run]:
    """Milliseconds of a step in which each of the requests gets a token."""
    rows, before = len(requests), engine.stats().num_generated_tokens
    begun: tuple[float, int] | None = None

    def look() -> None:
        nonlocal begun
        if begun is None and (count := engine.stats().num_generated_tokens - before) >= rows:
            begun = time.perf_counter(), count

    run = serve(engine, requests, what=what, after_step=look)
    assert begun is not None
    seconds, tokens = time.perf_counter() - begun[0], run.output_tokens - begun[1]
    return 1e3 * seconds * rows / tokens, run


def measure_load(bench: Bench, load: Load) -> dict[str, Any]:
    """Serves a workload, each time with other prompts and an empty cache, and gives the median run.

    Args:
      bench: what all measurements need.
      load: not scaled.
    """
    engine, load = bench.engine, load.scaled(bench.scale)
    runs = []
    for repeat in range(bench.repeats):
        prompts = load.token_ids(engine.vocab_size, seed=repeat)
        requests = [request(*each, bench.temperature) for each in zip(prompts, load.outputs, strict=True)]
        engine.reset_prefix_cache()
        runs.append(serve(engine, requests, at_once=1 if load.in_turn else None, what=load.name))
    runs.sort(key=lambda run: run.wall_s)
    run, prompt_tokens, output_tokens = runs[(len(runs) - 1) // 2], sum(load.prompts), sum(load.outputs)
    limits = engine.config.scheduler
    roof = bench.cost.load_s(bench.roofs, load, max_num_seqs=limits.max_num_seqs, budget=limits.max_num_batched_tokens)
    steps = max(run.spent("num_steps"), 1)
    results = {
        "requests": len(load.prompts),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "seconds": round(run.wall_s, 3),
        "seconds_of_each": [round(each.wall_s, 3) for each in runs],
        "prompt_tokens_per_s": round(prompt_tokens / run.wall_s, 1),
        "output_tokens_per_s": round(output_tokens / run.wall_s, 1),
        "total_tokens_per_s": round((prompt_tokens + output_tokens) / run.wall_s, 1),
        "roofline_s": round(roof, 3),
        "roofline_fraction": round(roof / run.wall_s, 3),
        "steps": int(run.spent("num_steps")),
        "rows_per_step": round(run.spent("num_step_rows") / steps, 1),
        "padded_fraction": round(run.padded_fraction, 4),
        "prompt_cached": round(run.cached_fraction, 3),
        "preemptions": int(run.spent("num_preemptions")),
        "host_ms": run.ms_per_step,
    }
    figure, unit = FIGURES[load.name]
    compared = bench.yardstick.compare(results[figure], load.name, is_rate=figure != "seconds")
    return {"figure": figure, "unit": unit, **results, **compared}
