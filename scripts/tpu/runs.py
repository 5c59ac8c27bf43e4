"""The cases of `tpu_aot.py`, and the processes that compile them."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

COST_TOPOLOGIES: Final = ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")
JPAGED: Final = "jpaged"
JAX_RPA: Final = "jax ragged_paged_attention"
COST_SHAPES: Final = ("llama-3-8b", "llama-3-70b / 8", "D64")
COST_LOADS: Final = ("decode 32 x 4k", "prefill 4 x 1024 @ 8k")
MODELS: Final = ("SmolLM2-135M", "Llama-3.2-1B", "Llama-3.1-8B")
_SEVERAL: Final = {"phase": "decode", "num_steps": 4}  # in one program
_ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Job:
    """Cases of one part on one topology, for one process."""

    part: str
    topology: str
    cases: tuple[dict[str, Any], ...]


def cost_jobs(topologies: Iterable[str], page_dtypes: Sequence[str]) -> list[Job]:
    """Our kernel on each dtype of pages, jax's on bfloat16."""
    jobs = []
    for topology in topologies:
        for kernel, dtypes in ((JPAGED, page_dtypes), (JAX_RPA, ["bfloat16"])):
            cases = tuple(
                {"kernel": kernel, "pages": dtype, "shape": shape, "load": load}
                for shape in COST_SHAPES
                for load in COST_LOADS
                for dtype in dtypes
            )
            jobs.append(Job("cost", topology, cases))
    return jobs


def kernel_jobs(topologies: Iterable[str], names: Sequence[str] | None = None) -> list[Job]:
    """Configurations of the kernels, by default all."""
    if names is None:
        from .kernels import KERNEL_CASES

        names = list(KERNEL_CASES)
    return [Job("kernels", topology, tuple({"name": name} for name in names)) for topology in topologies]


def step_jobs(
    topologies: Iterable[str], page_dtypes: Sequence[str], implementation: str | None, layers: int | None
) -> list[Job]:
    """Whole steps; a process a model, the largest first."""
    return [
        Job(
            "steps",
            topology,
            tuple(
                {"model": m, "page_dtype": d, "layers": layers, "implementation": implementation, **phase}
                for phase in ({"phase": "decode"}, {"phase": "prefill"}, _SEVERAL)
                for d in page_dtypes
            ),
        )
        for topology in topologies
        for m in reversed(MODELS)
    ]


def ci_jobs(topologies: Iterable[str]) -> list[Job]:
    """What CI has the time for: a layer of a step, KV write included, and of several steps in one program; a comparison
    with jax's kernel.
    """
    jobs = []
    for topology in topologies:
        decode = {"kernel": JPAGED, "pages": "bfloat16", "shape": "llama-3-70b / 8", "load": COST_LOADS[0]}
        step = {"model": MODELS[0], "phase": "decode", "layers": 1, "implementation": "mosaic_tpu"}
        jobs.append(Job("steps", topology, (step, step | _SEVERAL)))
        jobs.append(Job("cost", topology, (decode, {**decode, "kernel": JAX_RPA})))
    return jobs


def name_of(part: str, case: dict[str, Any]) -> str:
    """A case in words."""
    if part == "kernels":
        return case["name"]
    if part == "steps":
        several = f" x{case['num_steps']}" if case.get("num_steps", 1) > 1 else ""
        return f"{case['model']} {case['phase']}{several}"
    return f"{case['kernel']} {case['shape']} {case['load']} {case['pages']}"


def failure(row: dict[str, Any]) -> str | None:
    """Why a row must end the script with 1, or `None`: something of ours that does not compile, copies the pool, talks
    to other chips, or has none of our kernels in it though it should.

    That jax's kernel refuses a shape is a finding, and so is a chip that is too small for a model.
    """
    if row.get("kernel") == JAX_RPA:
        return None
    if "refused" in row:
        return None if "hbm" in row["refused"].lower() else row["refused"]
    if row.get("pool_copies") or row.get("collectives"):
        return f"{row.get('pool_copies', 0)} pool-sized copies, {row.get('collectives', 0)} collectives"
    if row.get("implementation") == "mosaic_tpu" and not row.get("tpu_custom_calls", 1):
        return "no tpu_custom_call is in the program"
    return None


def run_jobs(jobs: Sequence[Job], processes: int) -> list[dict[str, Any]]:
    """Compiles all cases, `processes` at once; rows in the order of the jobs."""
    total = sum(len(job.cases) for job in jobs)
    done, lock = [0], threading.Lock()

    def report(job: Job, case: dict[str, Any], row: dict[str, Any]) -> None:
        with lock:
            done[0] += 1
            outcome = "refused" if "refused" in row else f"{row.get('compile_s', 0)} s"
            line = f"[{done[0]}/{total}] {job.topology} {job.part} {name_of(job.part, case)}: {outcome}"
            print(line, file=sys.stderr, flush=True)

    with ThreadPoolExecutor(max(processes, 1)) as pool:
        done_jobs = list(pool.map(lambda job: _run(job, report), jobs))
    return [row for rows in done_jobs for row in rows]


def _run(job: Job, report: Callable[[Job, dict, dict], None]) -> list[dict[str, Any]]:
    """A process for the job; where it dies at a case, that case is refused and another process goes on after it."""
    rows: list[dict[str, Any]] = []
    while len(rows) < len(job.cases):
        waiting = list(job.cases[len(rows) :])
        for case, figures in zip(waiting, _worker(job, waiting), strict=False):
            rows.append(_row(job, case, figures))
            report(job, case, rows[-1])
    return rows


def _worker(job: Job, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Figures of the cases, up to the first that ends the process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "scripts.tpu.worker", job.topology, job.part]
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as errors:
        given.writelines(json.dumps(case) + "\n" for case in cases)
        given.seek(0)
        with subprocess.Popen(
            command, cwd=_ROOT, env=environment, text=True, stdin=given, stdout=subprocess.PIPE, stderr=errors
        ) as worker:
            answered = 0
            for line in worker.stdout or ():
                answered += 1
                yield json.loads(line)
        if answered < len(cases):
            errors.seek(0)
            said = " ".join(errors.read().split())[-800:]
            yield {"refused": f"the compiler ended the process ({worker.returncode}): {said}"}


def _row(job: Job, case: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    return {"part": job.part, "topology": job.topology, "case": name_of(job.part, case), **case, **figures}
