"""Compiles jpaged's kernels and steps for TPUs, on a machine without one (needs libtpu: `pip install jax[tpu]`).

    python scripts/tpu_aot.py [--only cost kernels steps] [--topology v5e:2x2 ...] [--layers 2] [--json] [--ci]

Three parts, by libtpu's own compiler:

    cost     the attention kernel beside jax's own `ragged_paged_attention`: issue cycles, bytes, and the share of the
             HBM rate or of the matrix units that follows. A model, not a measurement.
    kernels  a donated step of one layer at serving shapes: does it compile, and is the pool copied.
    steps    whole prefill and decode steps, and several decode steps in one program: HBM, pages that remain, copies of
             the pool, collectives.

Prints tables and a last line of JSON (with --json that line alone); exits with 1 if something of jpaged's does not
compile. That a chip is too small for a model is a finding, and so is a shape that jax's kernel refuses. --ci runs a set
that takes well under a minute. Everything takes an hour or more on two free cores.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # with libtpu installed, jax would look for a TPU

from scripts.tpu import runs, tables
from scripts.tpu.chips import CHIPS, chip_of

PARTS = ("cost", "kernels", "steps")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compile jpaged for TPUs without one.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run; all if left out")
    parser.add_argument("--topology", nargs="+", help="such as v5e:2x2 tpu7x:2x2x1; each part's own set if left out")
    parser.add_argument(
        "--pages", nargs="+", default=["bfloat16", "int8"], help="dtypes of the pages; steps take the first"
    )
    parser.add_argument(
        "--implementation",
        choices=("mosaic_tpu", "xla"),
        help="attention of the steps; the first that can run if left out",
    )
    parser.add_argument("--layers", type=int, help="layers that are compiled of a step's model; all if left out")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile at once")
    parser.add_argument("--json", action="store_true", help="print the line of JSON alone")
    parser.add_argument("--ci", action="store_true", help="the reduced set of CI")
    parsed = parser.parse_args(arguments)
    for topology in parsed.topology or ():
        try:
            chip_of(topology)
        except ValueError as error:
            parser.error(str(error))
    if importlib.util.find_spec("libtpu") is None:
        parser.error("libtpu, which holds the compiler, is not installed; expected `pip install 'jax[tpu]'`")
    if parsed.layers is not None and parsed.layers < 1:
        parser.error(f"--layers is {parsed.layers}; expected at least 1")
    return parsed


def main() -> int:
    arguments = parse_arguments()
    all_topologies = [chip.topology for chip in CHIPS.values()]
    jobs: list[runs.Job] = []
    if arguments.ci:
        jobs = runs.ci_jobs(arguments.topology or ["v5e:2x2"])
    else:
        if "cost" in arguments.only:
            jobs += runs.cost_jobs(arguments.topology or runs.COST_TOPOLOGIES, arguments.pages)
        if "kernels" in arguments.only:
            jobs += runs.kernel_jobs(arguments.topology or all_topologies)
        if "steps" in arguments.only:
            jobs += runs.step_jobs(
                arguments.topology or all_topologies, arguments.pages[:1], arguments.implementation, arguments.layers
            )
    start = time.perf_counter()
    rows = runs.run_jobs(jobs, processes=arguments.jobs)
    seconds = round(time.perf_counter() - start, 1)
    if not arguments.json:
        tables.print_tables(rows)
    failed = [row for row in rows if runs.failure(row)]
    for row in failed:
        print(f"{row['part']} {row['case']} on {row['topology']}: {runs.failure(row)}", file=sys.stderr)
    print(json.dumps({**summary(rows, failed), "seconds": seconds}))
    return 1 if failed else 0


def summary(rows: list[dict[str, Any]], failed: list[dict[str, Any]]) -> dict[str, Any]:
    """The last line."""
    import jax

    from scripts.report import environment

    results = {part: [row for row in rows if row["part"] == part] for part in PARTS}
    names = sorted(f"{row['part']} {row['case']} on {row['topology']}" for row in failed)
    return {"script": "tpu_aot", "jax": jax.__version__, **environment(), "results": results, "failed": names}


if __name__ == "__main__":
    sys.exit(main())
