"""Tables of `cuda_aot.py` and of docs/benchmarks/h200-compile.md. Needs the standard library alone."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from scripts.markdown import table
from scripts.render_memory import Record

Row = Mapping[str, Any]

_MIB: Final = 1 << 20
KERNEL_COLUMNS: Final = ("Case", "Kernel", "Blocks", "Threads", "Registers", "Spilled, bytes", "Shared, KiB", "C7519")
STEP_COLUMNS: Final = ("Program", "Kernels", "By what they do", "Arguments, MiB", "Temporaries, MiB", "Pool")
TIME_COLUMNS: Final = ("Program", "Trace, CPU s", "Lower, CPU s", "Compile, CPU s")


def kernel_lines(rows: Iterable[Row]) -> Iterator[list[str]]:
    """A line for each kernel of each case; those that look alike in a case have one."""
    for row in rows:
        lines = {}
        for kernel in row.get("kernels", ()):
            figures = [f"{kernel[key]:,}" for key in ("blocks", "threads", "registers", "spill_bytes")]
            shared = f"{kernel['shared_bytes'] / 1024:,.1f}"
            line = [row["case"], kernel["name"], *figures, shared, str(kernel["said"].get("C7519", 0))]
            lines[tuple(line)] = line
        yield from lines.values()


def step_lines(rows: Iterable[Row]) -> Iterator[list[str]]:
    """A line for each program of the engine."""
    for row in rows:
        if launches := row.get("launches"):
            sizes = f"{row['argument_bytes'] / _MIB:,.0f}", f"{row['temp_bytes'] / _MIB:,.1f}"
            yield [row["case"], f"{sum(launches.values()):,}", by_class(launches), *sizes, pool_words(row)]


def time_lines(rows: Iterable[Row]) -> Iterator[list[str]]:
    """What compiling a program of the engine takes."""
    for row in rows:
        if "launches" in row:
            yield [row["case"], *(f"{row[key]:.1f}" for key in ("trace_s", "lower_s", "compile_s"))]


def by_class(launches: Mapping[str, int]) -> str:
    """What the kernels of a program do.

    Example:
      >>> by_class({"attention": 2, "plan": 5})
      '2 attention, 5 plan'
    """
    return ", ".join(f"{count} {name}" for name, count in launches.items())


def pool_words(row: Row) -> str:
    """What becomes of the page pool.

    Example:
      >>> pool_words({"pool_bytes": 8, "aliased_bytes": 9, "pool_copies": 0})
      'in place'
    """
    if not row["pool_bytes"]:
        return "–"
    in_place = row["aliased_bytes"] >= row["pool_bytes"] and not row["pool_copies"]
    return "in place" if in_place else "copied"


def _part(columns: Sequence[str], lines: Callable[[Iterable[Row]], Iterator[list[str]]], num_text: int):
    def render(records: Sequence[Record]) -> str:
        rows = [row for record in records if record.script == "cuda_aot" for row in record.results["rows"]]
        return table(list(columns), lines(rows), num_text=num_text)

    return render


PARTS: Final[Mapping[str, Callable[[Sequence[Record]], str]]] = {
    "h200-kernel-resources": _part(KERNEL_COLUMNS, kernel_lines, 2),
    "h200-programs": _part(STEP_COLUMNS, step_lines, 1),
    "h200-compile-times": _part(TIME_COLUMNS, time_lines, 1),
}
