"""`measure_host_cost`: CPU time a token of everything but the engine, at a number of streams."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.lengths import fixed_lengths
from scripts.serving.cpu_time import CpuMeter
from scripts.serving.load import Target, run_load
from scripts.serving.measures import summarise
from scripts.serving.server_process import spawned
from scripts.serving.work import PATHS, Prompts, make_work

PROMPT_TOKENS = 200
KINDS = {"jpaged, streaming": ("jpaged", True), "jpaged, in one piece": ("jpaged", False), "bare": ("bare", True)}


def measure_host_cost(
    *, port: int, streams: int, tokens: int, step_ms: float, processes: int = 1
) -> dict[str, dict[str, Any]]:
    """Microseconds of CPU a token, by process, of servers whose engine gives a token a step and computes nothing.

    "server" is the process that speaks HTTP. The engine's process is what brings tokens to it, and the stand-in's own
    work. "bare" is the least that starlette and uvicorn can do, on the same machine at the same time.

    Args:
      port: a free one.
      streams: requests at once.
      tokens: of each answer.
      step_ms: between two steps.
      processes: of the client.
    """
    results = {}
    for name, (kind, stream) in KINDS.items():
        command = f"python -m scripts.serving.stand_in --kind {kind} --port {port} --step-ms {step_ms}"
        lengths = fixed_lengths(PROMPT_TOKENS, tokens)
        prompts = Prompts(vocab_size=1000)
        works = make_work(
            lengths, np.zeros(streams, int), prompts, endpoint="completions", model=_model(kind), stream=stream, seed=0
        )
        with tempfile.TemporaryDirectory() as folder:
            url = f"http://127.0.0.1:{port}"
            with spawned(command, url, Path(folder) / "log") as server:
                target = Target(url=url, path=PATHS["completions"])
                run_load(target, works, concurrency=streams, processes=processes)  # imports, allocations
                meter = CpuMeter(server.process.pid)
                shares = run_load(target, works, concurrency=streams, processes=processes)
                spent = meter.spent_s()
        summary = summarise(shares)
        if summary["answered"] != streams:
            raise RuntimeError(f"{name}: {summary['errors']}: {summary['first_messages']}")
        results[name] = {
            "us_per_token": {part: round(1e6 * s / (streams * tokens), 2) for part, s in spent.items()},
            "client_us_per_token": round(1e6 * sum(share.cpu_s for share in shares) / (streams * tokens), 2),
            "step_ms": round(1e3 * summary["wall_s"] / tokens, 3),
        }
    return results


def _model(kind: str) -> str:
    return "stand-in" if kind == "jpaged" else "bare"
