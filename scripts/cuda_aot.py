"""Compiles jpaged's kernels and step programs for an H200, on a machine without a GPU.

    python scripts/cuda_aot.py [--only WORD ...] [--processes 2] [--json] [--ci]

Needs `scripts/cuda/target.py`'s PACKAGES for compiling; without them it lowers the kernels, which shows less: that each
back end builds its program for a GPU. With them it shows what the compiler makes of it:

    kernels  every configuration of our kernels: registers, spills, shared memory, and what ptxas says is slow in them.
    steps    programs of the engine: kernels by what they do, memory, whether the page pool is written in place.

Prints tables and a last line of JSON (with --json that line alone); exits with 1 if something does not compile, spills
registers, loses speed by ptxas's own words, or copies the pool. --only takes the cases whose names have one of the
words. --ci compiles one of each kind, in two minutes, and lowers the others. Nothing runs, so no time is a kernel's.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.cuda import runs, tables, target

# Compiled in CI: a program of each kind, which have the kernels that are used most, and of the others one of each kind.
CI = (
    "llama-3.1-8b forward T2048 S256 P512",
    "llama-3.1-8b forward T1 S1 P512",
    "smollm2-135m decode T64 S64 P128 x4",
    "smollm2-135m sampling S64 full",
    "decode mixed",
    "decode head_dim_256",
    "decode int8",
    "decode float8_everything",
    "prefill float8_everything",
    "pages bfloat16",
    "norm 4096",
    "products llama-3.1-8b 64",
    "layer llama-3.1-8b 1",
    "xla everything",
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compile jpaged for an H200 without one.")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases whose names have one of these in them")
    parser.add_argument("--processes", type=int, default=2, help="that compile at once")
    parser.add_argument("--json", action="store_true", help="print the line of JSON alone")
    parser.add_argument("--ci", action="store_true", help="compile the set of CI, and lower the others")
    return parser.parse_args(arguments)


def chosen(kernels: Sequence[str], programs: Sequence[str], only: list[str] | None, *, ci: bool) -> list[runs.Job]:
    """The cases that were asked for; programs of the engine are compiled or left out.

    Raises:
      ValueError: there are none.
    """
    compiled = {name for name in (*kernels, *programs) if target.can_compile() and (name in CI or not ci)}
    names = [*(name for name in programs if name in compiled), *kernels]  # what takes long comes first
    wanted = [name for name in names if only is None or any(word in name for word in only)]
    if not wanted:
        raise ValueError(f"no case has {' or '.join(only or ())} in its name; have {', '.join(names)}")
    return [runs.Job(name, name in compiled) for name in wanted]


def main() -> int:
    arguments = parse_arguments()
    target.prepare()  # inherited by the processes that compile
    from scripts.cuda import worker
    from scripts.report import print_table

    try:
        jobs = chosen(*worker.case_names(), arguments.only, ci=arguments.ci)
    except ValueError as error:
        sys.exit(str(error))
    done = []

    def report(row: dict[str, Any]) -> None:
        done.append(row)
        wrong = "; ".join(runs.failures(row)) or "ok"
        line = f"[{len(done)}/{len(jobs)}] {row['case']}: {row.get('cpu_s', 0)} s, {wrong}"
        print(line, file=sys.stderr, flush=True)

    start = time.perf_counter()
    rows = runs.run_jobs(jobs, worker.run_case, processes=arguments.processes, report=report)
    seconds = round(time.perf_counter() - start, 1)
    if not arguments.json:
        for title, columns, lines in (
            ("Kernels, compiled", tables.KERNEL_COLUMNS, tables.kernel_lines),
            ("Programs of the engine, compiled", tables.STEP_COLUMNS, tables.step_lines),
            ("What compiling takes", tables.TIME_COLUMNS, tables.time_lines),
        ):
            if shown := [list[object](line) for line in lines(rows)]:
                print_table(title, list(columns), shown)
    print(json.dumps({**summary(rows), "seconds": seconds}))
    return 1 if any(map(runs.failures, rows)) else 0


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The last line."""
    import jax

    from scripts.report import environment

    results = {"compiled": target.can_compile(), "rows": rows}
    failed = {row["case"]: wrong for row in rows if (wrong := runs.failures(row))}
    return {"script": "cuda_aot", "jax": jax.__version__, **environment(), "results": results, "failed": failed}


if __name__ == "__main__":
    sys.exit(main())
