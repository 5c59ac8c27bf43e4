"""Draws docs/benchmarks/engine.png from the records beside it: step time against the roofline, throughput by batch.

    python scripts/engine/figures.py

Needs matplotlib (the extra `plots`).
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jpaged.errors import ConfigError
from jpaged.plots import Lines, Panel, StackedBars, save_figure
from scripts.engine.tables import whole_records
from scripts.render_benchmarks import ROOT, load_records
from scripts.render_memory import Record

_FOLDER: Final = ROOT / "docs" / "benchmarks"
# As many as there are colours.
_SMALL: Final = ("norm", "activation")
_PARTS: Final = {
    "GEMM": "GEMMs",
    "attention": "attention",
    "KV write": "KV write",
    "small": "norm, activation",
    "sampling": "sampling",
    "other": "other kernels",
    "between": "between kernels",
    "idle": "idle",
}


def panels_of(records: Sequence[Record]) -> list[Panel]:
    """Two panels for each whole record with decode steps of several sizes, one more where steps were broken down."""
    panels: list[Panel] = []
    for record in whole_records(records):
        times, rates = _lines(record.results["decode"]["cells"])
        if all(len(xs) < 2 for xs, _ in times.values()):
            continue
        title = f"{record.results['model']}, {record.results['dtype']}, {record.device}"
        axes: dict[str, Any] = {"xlabel": "rows", "log2_x": True, "title": title}
        panels.append(Lines(series=times, ylabel="decode step, ms", **axes))
        panels.append(Lines(series=rates, ylabel="output tokens/s", log_y=True, **axes))
        if bars := _bars(record.results.get("breakdown", [])):
            panels.append(StackedBars(bars=bars, ylabel="decode step, ms", title=title, labels=_PARTS))
    return panels


def _lines(cells: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Step times and rates, a line for each context and source."""
    times: dict[str, tuple[list[float], list[float]]] = {}
    for context in sorted({cell["context"] for cell in cells}):
        mine = sorted((cell for cell in cells if cell["context"] == context), key=lambda cell: cell["rows"])
        for key, name in (("ms", "jpaged"), ("vllm", "vLLM"), ("roofline_ms", "roofline")):
            found = [cell for cell in mine if key in cell]
            if found:
                times[f"{name}, {context:,} tokens"] = [c["rows"] for c in found], [c[key] for c in found]
    rates = {
        name: (rows, [1e3 * n / ms for n, ms in zip(rows, values, strict=True)])
        for name, (rows, values) in times.items()
    }
    return times, rates


def _bars(cells: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Rows and context -> part of the step -> milliseconds."""
    bars = {}
    for cell in cells:
        if "classes_ms" in cell:
            bar: dict[str, float] = dict.fromkeys(_PARTS, 0.0)
            for name, ms in cell["classes_ms"].items():
                if name != "copy":  # they run beside the others
                    bar["small" if name in _SMALL else name] += ms
            bar |= {"between": cell["between_kernels_ms"], "idle": cell["idle_fraction"] * cell["step_ms"]}
            bars[f"{cell['rows']} x {cell['context']:,}"] = bar
    return bars


def main() -> int:
    if len(sys.argv) > 1:
        sys.exit("takes no arguments; it reads and writes docs/benchmarks")
    panels = panels_of(load_records(_FOLDER))
    if not panels:
        sys.exit("no record of bench_engine.py has decode steps of several batch sizes")
    target = _FOLDER / "engine.png"
    try:
        save_figure(target, *panels)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
