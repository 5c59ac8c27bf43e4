"""Measures on a GPU from several processes: programs are prepared side by side, and timed one after the other.

Nearly all of a bench's time is tracing, lowering and compiling, most of it in Python, where threads wait for each
other.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import queue
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Failure:
    """What a job raised, as text."""

    error: str


def arguments_on_gpu(parser: argparse.ArgumentParser, render: Callable[[dict], str]) -> argparse.Namespace | None:
    """The arguments of a bench on a GPU, with `--render FILE` added; `None` if that was asked for, and is printed.

    Args:
      parser: knows the bench's own arguments.
      render: a record of the bench as Markdown.

    Raises:
      SystemExit: jax finds no GPU.
    """
    parser.add_argument("--render", metavar="FILE", type=Path, help="print a record as Markdown and measure nothing")
    arguments = parser.parse_args()
    if arguments.render:
        print(render(json.loads(arguments.render.read_text(encoding="utf-8"))), end="")
        return None
    import jax  # not above: whoever prepares in a process of its own may not have imported it

    if jax.default_backend() != "gpu":
        sys.exit("needs a GPU; jax found none")
    return arguments


def measure_all(
    prepare: Callable[..., Callable[[], Any]], jobs: list[tuple], processes: int | None = None
) -> Iterator[tuple[int, Any]]:
    """Yields the number of each job and what `prepare(*job)()` gave, or a `Failure`, as they come.

    Args:
      prepare: a function of a module; it compiles what the function that it returns then times.
      jobs: arguments that can be pickled. Neighbours are prepared by the same process, so `prepare` can keep what they
        share.
      processes: at the most; `None` for one a core, less two.

    Raises:
      RuntimeError: a process ended without a result.
    """
    count = min(len(jobs), processes or max(1, (os.cpu_count() or 1) - 2))
    context = multiprocessing.get_context("spawn")
    ready, turn, results = context.Barrier(count), context.Lock(), context.Queue()
    bounds = [len(jobs) * n // count for n in range(count + 1)]
    workers = [
        context.Process(target=_work, args=(prepare, jobs[first:end], first, ready, turn, results), daemon=True)
        for first, end in itertools.pairwise(bounds)
    ]
    for worker in workers:
        worker.start()
    missing = len(jobs)
    while missing:
        try:
            result = results.get(timeout=1)
        except queue.Empty:
            dead = [worker.exitcode for worker in workers if worker.exitcode]
            if dead:
                raise RuntimeError(
                    f"a process ended with exit status {dead[0]} before its jobs were measured"
                ) from None
            continue
        missing -= 1
        yield result
    for worker in workers:
        worker.join()


def _attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception:
        return Failure(traceback.format_exc(limit=-4))


def _work(prepare, jobs: list[tuple], first: int, ready, turn, results) -> None:
    if "jax" in sys.modules:  # what `prepare` is made of has imported it
        sys.modules["jax"].config.update("jax_numpy_dtype_promotion", "strict")
    timers = [_attempt(prepare, *job) for job in jobs]
    ready.wait()  # nobody compiles any more
    with turn:
        for nth, timer in enumerate(timers):
            results.put((first + nth, timer if isinstance(timer, Failure) else _attempt(timer)))
