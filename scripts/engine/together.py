"""`measure_together`: requests at once against the same requests one by one, and the time outside XLA.

Each request has a prompt and an output of at most so many tokens together, and outputs do not stop early. One by one
the rate does not depend on how many requests there are, so only the first few are served that way. The two orders
alternate and medians are given, because a shared machine is noisy: read the ratio, not the rates.

"Outside XLA" is measured with run-ahead off, so that host and device work do not overlap: the part of the wall time in
which the host neither dispatches a step nor waits for one. Dispatching is counted apart: where a program has loops that
the host drives, the program runs then; where it has none, it is jax's own Python. So the truth lies between "outside
XLA" and "outside XLA or dispatching". With run-ahead on, most of it hides behind the device.
"""

import statistics
from dataclasses import replace
from typing import Any

import numpy as np

from jpaged.engine import Engine
from scripts.engine.serve import Request, Run, request, serve

_PHASES = ("plan_s", "pack_s", "dispatch_s", "wait_s", "update_s")


def make_requests(count: int, tokens: int, vocab_size: int, seed: int) -> list[Request]:
    """Prompts of random tokens, a quarter to a half of `tokens` long, and outputs that fill up the rest."""
    rng = np.random.default_rng(seed)
    lengths = [int(rng.integers(tokens // 4, tokens // 2 + 1)) for _ in range(count)]
    return [request(rng.integers(0, vocab_size, length).tolist(), tokens - length) for length in lengths]


def measure_together(engine: Engine, *, count: int, tokens: int, alone: int, repeats: int, seed: int) -> dict[str, Any]:
    """Both rates, their ratio, and a step by phase.

    Args:
      engine: with rows for all requests.
      count: requests.
      tokens: of a prompt and its output.
      alone: requests that are served one by one.
      repeats: of each order.
      seed: of the prompts.
    """
    requests = make_requests(count, tokens, engine.vocab_size, seed)
    serve(engine, requests[:2])  # first touch of every page and buffer
    at_once, in_turn = [], []
    for _ in range(repeats):
        at_once.append(serve(engine, requests, what="together"))
        in_turn.append(serve(engine, requests[:alone], at_once=1, what="one by one"))
    config = engine.config
    engine.config = replace(config, run_ahead=False)
    try:
        waited = [serve(engine, requests, what="without run-ahead") for _ in range(repeats)]
    finally:
        engine.config = config
    speedups = (t.tokens_per_s / a.tokens_per_s for t, a in zip(at_once, in_turn, strict=True))
    phases = {name: statistics.median(run.spent(name) / run.spent("num_steps") for run in waited) for name in _PHASES}
    peak = waited[-1].after.peak
    return {
        "requests": count,
        "requests_one_by_one": alone,
        "tokens_each": tokens,
        "together_tokens_per_s": round(statistics.median(run.tokens_per_s for run in at_once), 1),
        "one_by_one_tokens_per_s": round(statistics.median(run.tokens_per_s for run in in_turn), 1),
        "speedup": round(statistics.median(speedups), 2),
        "outside_xla_fraction": _outside_xla(waited, dispatching=False),
        "outside_xla_or_dispatching_fraction": _outside_xla(waited, dispatching=True),
        "ms_per_step": {name: round(1e3 * seconds, 3) for name, seconds in phases.items()},
        "peak_pages_used": peak.pages_used,
        "peak_wasted_fraction": round(peak.wasted_fraction, 4),
    }


def _outside_xla(runs: list[Run], *, dispatching: bool) -> float:
    """Part of the wall time that is not in XLA; with `dispatching`, or in handing work to it."""
    inside = ((run.spent("wait_s") + (0.0 if dispatching else run.spent("dispatch_s"))) / run.wall_s for run in runs)
    return round(1.0 - statistics.median(inside), 4)
