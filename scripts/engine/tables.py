"""Tables of docs/benchmarks/engine.md, from the records of bench_engine.py.

`scripts/render_benchmarks.py` writes them. Needs the standard library alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from scripts.markdown import table
from scripts.render_memory import Record, source

_LOADS: Final = {
    "prefill": "prefill, prompt tokens/s",
    "uniform": "uniform, output tokens/s",
    "azure": "azure, tokens/s",
    "shared_prefix": "shared-prefix, s",
    "alone": "alone, output tokens/s",
}


_SUMMARY_ROWS: Final = (1, 32, 256)
_SUMMARY_LOADS: Final = {
    "prefill": "32 prompts of 4,096 tokens, tokens/s",
    "uniform": "256 requests of 100 to 1,024 tokens and answers likewise, output tokens/s",
    "azure": "1,000 conversations of the Azure trace, tokens/s",
    "shared_prefix": "256 requests that share 2,048 tokens, s",
}


def _records(records: Sequence[Record], part: str) -> Iterator[Record]:
    for record in records:
        if record.script == "bench_engine" and part in record.results:
            yield record


def whole_records(records: Sequence[Record]) -> Iterator[Record]:
    """Of runs that came from decode steps to whole workloads, before their time limit; one each, for a first screen."""
    for record in _records(records, "decode"):
        if any(name in record.results for name in _LOADS):
            yield record


def _model(record: Record) -> str:
    r = record.results
    weights = "" if r.get("weights", r["dtype"]) == r["dtype"] else f", weights in {r['weights']}"
    pages = weights + ("" if r.get("kv_dtype", r["dtype"]) == r["dtype"] else f", pages in {r['kv_dtype']}")
    scale = "" if r.get("scale", 1) == 1 else f", at scale {r['scale']:g}"
    return f"{r['model']}, {r['dtype']}{pages}{scale}"


def _beside(row: Mapping[str, Any], digits: int) -> list[str]:
    vllm = f"{row['vllm']:,.{digits}f}" if "vllm" in row else "–"
    times = f"{row['times_vllm']:.2f}" if "vllm" in row else "–"
    reach = f"{row['reach']:,.{digits}f}" if "reach" in row else "–"
    return [vllm, times, reach]


def summary_table(records: Sequence[Record]) -> str:
    """A few of the figures below beside vLLM's, for the first screen of the README."""
    columns = ["Hardware", "Model", "What", "jpaged", "vLLM", "Times as fast", "Measured"]
    return table(
        columns,
        (
            [record.device, _model(record), what, f"{value:,.{digits}f}", *_beside(r, digits)[:2], source(record)]
            for record in whole_records(records)
            for what, r, value, digits in _summary(record.results)
            if "vllm" in r
        ),
        num_text=3,
    )


def _summary(results: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], float, int]]:
    """What is measured, its row, its value and the digits that are shown."""
    for cell in results["decode"]["cells"]:
        if cell["rows"] in _SUMMARY_ROWS and cell["context"] == 1024:
            rows = f"{cell['rows']} row{'s' * (cell['rows'] > 1)}"
            yield f"decode step, {rows} of 1,024 tokens, ms", cell, cell["ms"], 2
    for name, title in _SUMMARY_LOADS.items():
        if name in results:
            row = results[name]
            yield title, row, row[row["figure"]], 2 if row["figure"] == "seconds" else 0


def decode_table(records: Sequence[Record]) -> str:
    """Milliseconds of a decode step."""
    columns = ["Model", "Hardware", "Rows x context", "ms", "Roofline, ms", "Of the roofline"]
    return table(
        [*columns, "Tokens/s", "vLLM, ms", "Times as fast", "To reach, ms", "Each, ms", "Measured"],
        (
            [
                _model(record),
                record.device,
                f"{r['rows']} x {r['context']:,}",
                f"{r['ms']:.2f}",
                f"{r['roofline_ms']:.2f}",
                f"{r['roofline_fraction']:.0%}",
                f"{r['tokens_per_s']:,.0f}",
                *_beside(r, 2),
                ", ".join(f"{each:.2f}" for each in r.get("ms_of_each", [])) or "–",
                source(record),
            ]
            for record in _records(records, "decode")
            for r in record.results["decode"]["cells"]
        ),
        num_text=3,
    )


def load_table(records: Sequence[Record]) -> str:
    """Whole workloads."""
    columns = ["Model", "Hardware", "Workload", "Measured", "Seconds", "Roofline, s", "Of the roofline"]
    return table(
        [*columns, "vLLM", "Times as good", "To reach", "Steps", "Rows a step", "Padding", "Preemptions", "Run"],
        (
            [
                _model(record),
                record.device,
                title,
                f"{r[r['figure']]:,.{2 if r['figure'] == 'seconds' else 0}f}",
                f"{r['seconds']:.2f}",
                f"{r['roofline_s']:.2f}",
                f"{r['roofline_fraction']:.0%}",
                *_beside(r, 2 if r["figure"] == "seconds" else 0),
                f"{r['steps']:,}",
                f"{r['rows_per_step']:.1f}",
                f"{r['padded_fraction']:.1%}",
                f"{r['preemptions']}",
                source(record),
            ]
            for name, title in _LOADS.items()
            for record in _records(records, name)
            for r in [record.results[name]]
        ),
        num_text=3,
    )


def setting_table(records: Sequence[Record]) -> str:
    """What the engines were told, the roofs of their devices, and what was compiled."""
    columns = ["Model", "Hardware", "Read roof, TB/s", "Matrix roof, TFLOP/s", "Weights, GB", "KV of a token, KiB"]
    columns += ["Rows", "Budget", "Pages x tokens", "Step shapes", "Compiled", "After the start", "Measured"]
    return table(
        columns,
        (
            [
                _model(record),
                record.device,
                f"{r['roofs']['read_tb_per_s']:.2f}",
                f"{r['roofs']['matmul_tflop_per_s']:,.1f}",
                f"{r['weight_gb']:.2f}",
                f"{r['kv_token_kib']:g}",
                f"{r['max_num_seqs']}",
                f"{r['token_budget']:,}",
                f"{r['num_pages']:,} x {r['page_size']}",
                f"{len(r['step_shapes'])}",
                f"{r['compiled_at_start']}",
                f"{r['compiled_at_end'] - r['compiled_at_start']}" if "compiled_at_end" in r else "–",
                source(record),
            ]
            for record in _records(records, "roofs")
            for r in [record.results]
        ),
        num_text=2,
    )


def start_table(records: Sequence[Record]) -> str:
    """Seconds until an engine has answered its first request."""
    columns = ["Model", "Hardware", "Cold, s", "vLLM, s", "Warm cache, s", "vLLM, s", "Times as fast", "To reach, s"]
    return table(
        [*columns, "Measured"],
        (
            [
                _model(record),
                record.device,
                f"{r['cold_s']:.1f}",
                _beside(r.get("cold", {}), 0)[0],
                f"{r['warm_s']:.1f}",
                *_beside(r.get("warm", {}), 0),
                source(record),
            ]
            for record in _records(records, "start")
            for r in [record.results["start"]]
        ),
        num_text=2,
    )


def breakdown_table(records: Sequence[Record]) -> str:
    """Milliseconds of a decode step on the device, by what its kernels do."""
    cells = list(_profiled(records))
    classes = list(dict.fromkeys(name for _, r in cells for name in r["classes_ms"]))
    columns = ["Model", "Hardware", "Rows x context", "Step, ms", *classes, "Between kernels", "Device idle"]
    return table(
        [*columns, "Kernels", "Outside CUDA graphs", "Graph launches", "Graph updates", "Measured"],
        (
            [
                *_cell(record, r),
                f"{r['step_ms']:.2f}",
                *(f"{r['classes_ms'].get(name, 0.0):.3f}" for name in classes),
                f"{r['between_kernels_ms']:.3f}",
                f"{r['idle_fraction']:.1%}",
                f"{r['kernels_per_step']:.0f}",
                *_graphs(r),
                source(record),
            ]
            for record, r in cells
        ),
        num_text=3,
    )


def _graphs(r: Mapping[str, Any]) -> list[str]:
    outside, calls = r["kernels_outside_graphs_per_step"], r["calls_per_step"]
    if outside is None:
        return ["–"] * 3
    return [f"{each:.1f}" for each in (outside, calls.get("cuGraphLaunch", 0), calls.get("command_buffer::update", 0))]


def host_table(records: Sequence[Record]) -> str:
    """Milliseconds of a decode step on the host, by phase."""
    cells = [(record, r) for record in _records(records, "decode") for r in record.results["decode"]["cells"]]
    phases = list(dict.fromkeys(name for _, r in cells for name in r["host_ms"]))
    return table(
        ["Model", "Hardware", "Rows x context", "Step, ms", *(phase.removesuffix("_s") for phase in phases)],
        (
            [
                *_cell(record, r),
                f"{r['ms']:.2f}",
                *(f"{r['host_ms'].get(phase, 0.0):.3f}" for phase in phases),
            ]
            for record, r in cells
        ),
        num_text=3,
    )


def kernel_table(records: Sequence[Record]) -> str:
    """The kernels that take most of a decode step."""
    columns = ["Model, hardware, rows x context", "Kernel", "Class", "us", "A step", "us a step"]
    return table(
        columns,
        (
            [
                ", ".join(_cell(record, r)),
                f"`{kernel['name'][:60]}`",
                kernel["class"],
                f"{kernel['us']:.2f}",
                f"{kernel['per_step']:.1f}",
                f"{kernel['us'] * kernel['per_step']:,.1f}",
            ]
            for record, r in _profiled(records)
            for kernel in r["kernels"][:12]
        ),
        num_text=3,
    )


def _profiled(records: Sequence[Record]) -> Iterator[tuple[Record, Mapping[str, Any]]]:
    for record in _records(records, "breakdown"):
        for cell in record.results["breakdown"]:
            if "classes_ms" in cell:
                yield record, cell


def _cell(record: Record, r: Mapping[str, Any]) -> list[str]:
    return [_model(record), record.device, f"{r['rows']} x {r['context']:,}"]


PARTS: Final[Mapping[str, Callable[[Sequence[Record]], str]]] = {
    "engine-summary": summary_table,
    "engine-decode": decode_table,
    "engine-loads": load_table,
    "engine-settings": setting_table,
    "engine-start": start_table,
    "engine-breakdown": breakdown_table,
    "engine-host": host_table,
    "engine-kernels": kernel_table,
}
