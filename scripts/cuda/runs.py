"""`run_jobs`: cases compiled in processes side by side. `failures`: what is wrong with a row."""

import multiprocessing
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Final, NamedTuple

Row = dict[str, Any]

# Bytes of spilled registers, by kernel and case: more is a failure.
KNOWN_SPILLS: Final[dict[tuple[str, str], int]] = {
    # Up to 64 query rows over 8-bit pages, of a few tokens: large steps have other tiles (docs/architecture/18).
    ("paged_attention_decode", "decode float8_everything"): 1296,
    ("paged_attention_decode", "decode float8_head_dim_96"): 1096,
    ("paged_attention_decode", "decode float8_head_dim_256"): 4124,
    ("paged_attention_decode", "decode int8_smollm2_heads"): 196,
    # 64 query heads a KV head, so the decode rows of a mixed step have a row of the tile for each.
    ("paged_attention_decode", "prefill group_of_64"): 832,
    # 64 rows at a head_dim of 256: their output alone takes 128 registers of each thread.
    ("paged_attention_decode", "decode head_dim_256"): 148,
    ("paged_attention_decode", "fused head_dim_256"): 148,
    ("paged_attention_decode", "prefill head_dim_256"): 148,
    ("paged_attention_decode", "shared head_dim_256"): 148,
    # A register.
    ("paged_attention_decode", "decode mixed"): 8,
    ("paged_attention_decode", "decode everything"): 8,
    ("paged_attention_decode", "decode group_of_16"): 8,
    ("paged_attention_prefill", "prefill everything"): 8,
}

# By which kernels are slower than they are written, by kernel, case and number of ptxas's message.
KNOWN_LOSSES: Final[frozenset[tuple[str, str, str]]] = frozenset(
    {
        # 64 rows at a head_dim of 256 over 8-bit pages: outputs take 128 registers of a thread, keys 64 and two blocks'
        # scores 64, which are all there are, so one product waits for the other. Prefill's own tiles do not fit
        # either, so steps of any size with prefill tokens run so (docs/architecture/18).
        ("paged_attention_decode", "decode float8_head_dim_256", "C7512"),
    }
)


class Job(NamedTuple):
    """A case by its name, and whether it is compiled; it is lowered at least."""

    name: str
    compiles: bool


def run_jobs(
    jobs: Sequence[Job], run: Callable[[str, bool], Row], *, processes: int, report: Callable[[Row], None]
) -> list[Row]:
    """Rows of the jobs, in their order; a case that ends its process is refused, and another process goes on.

    Args:
      jobs: begun in this order.
      run: what a process calls with a job's fields; a function of a module.
      processes: at once.
      report: told each row when it is there.
    """
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    rows: dict[Job, Row] = {}
    lock = threading.Lock()

    def work() -> None:
        process = None
        while not waiting.empty():
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                break
            process = process or ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            try:
                row = process.submit(run, *job).result()
            except BrokenProcessPool:
                row, process = {"case": job.name, "refused": "the compiler ended the process"}, None
            with lock:
                rows[job] = row
                report(row)
        if process is not None:
            process.shutdown()

    threads = [threading.Thread(target=work) for _ in range(max(1, min(processes, len(jobs))))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [rows[job] for job in jobs]


def failures(row: Row) -> list[str]:
    """What is wrong with a row: refused, the pool copied, registers spilled or speed lost that are not known to be."""
    if "refused" in row:
        return [row["refused"]]
    wrong = []
    if row.get("pool_copies"):
        wrong.append(f"{row['pool_copies']} copies of the pool")
    if row.get("aliased_bytes", 0) < row.get("pool_bytes", 0):
        wrong.append(f"{row['aliased_bytes']:,} bytes are written in place, expected the pool's {row['pool_bytes']:,}")
    for kernel in row["kernels"]:
        known = KNOWN_SPILLS.get((kernel["name"], row["case"]), 0)
        if kernel["spill_bytes"] > known:
            wrong.append(f"{kernel['name']} spills {kernel['spill_bytes']} bytes, expected at most {known}")
        for loss in kernel["losses"]:
            if (kernel["name"], row["case"], loss.partition(":")[0]) not in KNOWN_LOSSES:
                wrong.append(f"{kernel['name']}: {loss}")
    return wrong
