"""What is measured of each workload: `measure_decode` and `measure_load`, beside the roofline and the peers."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from jpaged.engine import Engine
from jpaged.stats import EngineStats
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


@dataclass(frozen=True)
class Look:
    """An engine right after a call of `step`.

    Attributes:
      at_s: by the host's clock.
      stats: counters then.
    """

    at_s: float
    stats: EngineStats


def decode_window(run: Run, looks: Sequence[Look], rows: int) -> Run:
    """The part of a run in which all rows decode: from when every row has a token until a row is about to end.

    Both ends are looks after a step whose results were just read, as new tokens tell. What the engine dispatched ahead
    of them is on its way at both, and cancels. Time and tokens are those between the two:

    - The first is the first look that found as many new tokens as there are rows. A step gives a row one token, and
      several steps are one program only where every row decodes; so every row has a token by then. That many tokens in
      all would not say so: rows that were admitted sooner have more than one. Rows that guess may get several, but
      guess only where no row has a prompt: none may wait then.
    - The last is the last look at which no request had ended, nor lost its pages. A row that was admitted sooner ends
      sooner, so later steps have fewer rows; and an end has a price: outputs are made, and pages given back. Where a
      row is preempted, later steps have fewer rows too, and prompts.

    Where a row ends with the next results after the first look, as in a scaled run, nothing is between: it is then the
    time to the last look of all, with smaller steps and all ends in it. Where there is no such first look, because
    there is no room for all rows at once or a row ends before the last one has a token, it is the whole run.

    Args:
      run: of `rows` requests that begin together, each of at least two tokens.
      looks: one after each step.
      rows: requests.
    """
    begin: Look | None = None
    end: Look | None = None
    tokens = run.before.num_generated_tokens
    for look in looks:
        gained, tokens = look.stats.num_generated_tokens - tokens, look.stats.num_generated_tokens
        if any(getattr(look.stats, name) > getattr(run.before, name) for name in ("num_finished", "num_preemptions")):
            break
        if gained:
            end = look
        if begin is None and gained >= rows and not look.stats.num_waiting:
            begin = look
    if begin is None or end is None:
        return run
    if end is begin:
        end = looks[-1]
    before, after = begin.stats, end.stats
    return Run(end.at_s - begin.at_s, after.num_generated_tokens - before.num_generated_tokens, before, after)


def measure_decode(
    bench: Bench, cells: Sequence[tuple[int, int]], stop: Callable[[], bool] = lambda: False
) -> Iterator[dict[str, Any]]:
    """Each cell: the mean step of `decode_window`.

    That is nearly all of `steps`: the last program lacks, and the steps by which some rows began sooner than others.
    Prompts are in the prefix cache. What it takes to admit the requests and to end them is not in it, nor what another
    run takes. "timed_steps" says how many steps a window has; "host_ms" and the roofline are those of the last one.

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
        timed = [_serve_decode(engine, requests(1 + steps), what) for _ in range(bench.repeats)]
        times = [1e3 * window.wall_s * rows / window.output_tokens for _, window in timed]
        run, window = timed[-1]
        ms, seen = statistics.median(times), context + _mean_output(run, window, rows)
        roof = 1e3 * bench.cost.decode_s(bench.roofs, rows, seen)
        yield {
            "rows": rows,
            "context": context,
            "ms": round(ms, 3),
            "ms_of_each": [round(each, 3) for each in times],
            "timed_steps": round(window.output_tokens / rows, 1),
            "tokens_per_s": round(1e3 * rows / ms, 1),
            "roofline_ms": round(roof, 3),
            "roofline_fraction": round(roof / ms, 3),
            "prompt_cached": round(min(run.cached_fraction for run, _ in timed), 3),
            "host_ms": window.ms_per_step,
            **bench.yardstick.compare(ms, "decode", f"{rows}@{context}"),
        }


def _serve_decode(engine: Engine, requests: Sequence[Request], what: str) -> tuple[Run, Run]:
    """Serves requests; gives the whole run, and the part of it in which all decode."""
    looks: list[Look] = []

    def look() -> None:
        looks.append(Look(time.perf_counter(), engine.stats()))

    run = serve(engine, requests, what=what, after_step=look)
    return run, decode_window(run, looks, len(requests))


def _mean_output(run: Run, window: Run, rows: int) -> float:
    """Output tokens that a row attends to in a step of the window, on average.

    The step that gives a row its token n + 1 attends to n of them: from as many as a row has at the first look to one
    less than it has at the last.
    """
    before = run.before.num_generated_tokens
    begin, end = window.before.num_generated_tokens - before, window.after.num_generated_tokens - before
    return (begin + end - rows) / (2 * rows)


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
    budgets = {"budget": limits.max_num_batched_tokens, "prefill_budget": limits.max_num_prefill_tokens}
    roof = bench.cost.load_s(bench.roofs, load, max_num_seqs=limits.max_num_seqs, **budgets)
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
