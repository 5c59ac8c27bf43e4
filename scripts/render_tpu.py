"""Tables of docs/benchmarks/tpu-kernels.md, from the records of tpu_aot.py.

`scripts/render_benchmarks.py` writes them. Needs the standard library alone.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.markdown import table
from scripts.render_memory import Record

_MIB: Final = 1 << 20


def _rows(records: Sequence[Record], part: str) -> Iterator[Mapping[str, Any]]:
    for record in records:
        if record.script == "tpu_aot":
            yield from record.results.get(part, [])


def _chip(row: Mapping[str, Any]) -> str:
    return row["topology"].partition(":")[0]


def _costs(records: Sequence[Record]) -> list[Mapping[str, Any]]:
    """Rows of the comparison, our kernel beside jax's."""
    return sorted(_rows(records, "cost"), key=lambda r: (r["load"], r["shape"], _chip(r), r["kernel"]))


def _case(r: Mapping[str, Any]) -> list[str]:
    kernel = "jax" if r["kernel"].startswith("jax") else r["kernel"]
    return [f"{r['shape']}, {r['load']}", _chip(r), kernel, r["pages"]]


def cost_table(records: Sequence[Record]) -> str:
    """Our attention kernel beside jax's, by the static model."""
    columns = ["Shape, load", "Chip", "Kernel", "Pages", "Issue cycles", "Cycles a KiB of KV"]
    columns += ["Issue, us", "Memory, us", "Of the HBM rate", "Of the matrix peak", "Matrix units busy"]
    return table(
        columns,
        (
            [
                *_case(r),
                *(["refused"] + ["–"] * 6 if "refused" in r else _cost(r)),
            ]
            for r in _costs(records)
        ),
        num_text=4,
    )


def _cost(r: Mapping[str, Any]) -> list[str]:
    return [
        f"{r['cycles']:,}",
        f"{r['cycles_per_kv_kib']:.2f}",
        f"{r['issue_us']:,.0f}",
        f"{r['memory_us']:,.0f}",
        f"{r['bandwidth_share']:.0%}",
        f"{r['matrix_share']:.0%}",
        f"{r['loop_matrix']:.0%}",
    ]


def loop_table(records: Sequence[Record]) -> str:
    """One iteration of the busiest loop of each kernel."""
    columns = ["Shape, load", "Chip", "Kernel", "Pages", "Runs", "Cycles a run", "KV KiB a run", "Spills a run"]
    return table(
        columns,
        (
            [
                *_case(r),
                f"{r['loop_iterations']:,}",
                f"{r['loop_cycles']:,.0f}",
                f"{r['loop_kv_bytes'] / 1024:,.0f}",
                f"{r['loop_spills']:,.0f}",
            ]
            for r in _costs(records)
            if "refused" not in r
        ),
        num_text=4,
    )


def kernel_table(records: Sequence[Record]) -> str:
    """Steps of one layer, on every generation."""
    columns = ["Case", "Chip", "Kernels", "VMEM, MiB", "Of VMEM", "SMEM, KiB", "Temporaries, MiB", "Pool copies"]
    return table(
        columns,
        (
            [
                r["case"],
                _chip(r),
                *(
                    ["refused"] + ["–"] * 5
                    if "refused" in r
                    else [
                        f"{r['tpu_custom_calls']}",
                        f"{r['vmem_bytes'] / _MIB:,.1f}",
                        f"{r['vmem_share']:.0%}",
                        f"{r['smem_bytes'] / 1024:,.1f}",
                        f"{r['temp_bytes'] / _MIB:,.1f}",
                        f"{r['pool_copies']}",
                    ]
                ),
            ]
            for r in _rows(records, "kernels")
        ),
        num_text=2,
    )


def step_table(records: Sequence[Record]) -> str:
    """Whole steps, on every generation."""
    columns = ["Step", "Chip", "Attention", "Arguments, MiB", "Temporaries, MiB", "Pages left", "Pool copies"]
    return table(
        [*columns, "Collectives", "Compiled in, s"],
        (
            [
                f"{r['case']}",
                _chip(r),
                *(
                    ["too large" if "hbm" in r["refused"].lower() else "refused"] + ["–"] * 6
                    if "refused" in r
                    else [
                        f"{r['implementation']}, {r['tpu_custom_calls']} calls",
                        f"{r['argument_bytes'] / _MIB:,.0f}",
                        f"{r['temp_bytes'] / _MIB:,.1f}",
                        f"{r['pages_that_fit']:,}",
                        f"{r['pool_copies']}",
                        f"{r['collectives']}",
                        f"{r['compile_s']}",
                    ]
                ),
            ]
            for r in _rows(records, "steps")
        ),
        num_text=3,
    )


PARTS: Final[Mapping[str, Callable[[Sequence[Record]], str]]] = {
    "tpu-cost": cost_table,
    "tpu-loops": loop_table,
    "tpu-kernels": kernel_table,
    "tpu-steps": step_table,
}
