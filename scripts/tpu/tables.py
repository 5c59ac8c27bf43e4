"""The tables of `tpu_aot.py`."""

from typing import Any

from rich.console import Console
from rich.table import Table

_MODEL = "static issue cycles: a model, not a measurement"


def print_tables(rows: list[dict[str, Any]]) -> None:
    """One table a part that has rows, with what was refused below it."""
    for part, title, columns in (
        ("cost", f"Attention of one layer, one core ({_MODEL})", _COST),
        ("kernels", "A step of one layer, compiled (plan, KV write, attention)", _KERNELS),
        ("steps", "Whole steps, compiled", _STEPS),
    ):
        chosen = [row for row in rows if row["part"] == part]
        if chosen:
            _print(title, columns, chosen)


def _print(title: str, columns: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < 2 else "right")
    for row in rows:
        if "refused" not in row:
            table.add_row(*(str(show(row)) for show in columns.values()))
    console.print(table)
    for row in rows:
        if "refused" in row:
            console.print(f"refused: {row['case']} on {row['topology']}: {row['refused'][:300]}", markup=False)


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"


_COST = {
    "kernel": lambda r: f"{r['kernel'].removesuffix(' ragged_paged_attention')} {r['pages']}",
    "shape, load, chip": lambda r: f"{r['shape']}, {r['load']}, {r['topology'].partition(':')[0]}",
    "cycles": lambda r: f"{r['cycles']:,}",
    "loop runs": lambda r: f"{r['loop_iterations']:,}",
    "cycles/run": lambda r: f"{r['loop_cycles']:,.0f}",
    "KV KiB/run": lambda r: f"{r['loop_kv_bytes'] / 1024:,.0f}",
    "spills/run": lambda r: f"{r['loop_spills']:,.0f}",
    "cycles/KV KiB": lambda r: f"{r['cycles_per_kv_kib']:.2f}",
    "issue us": lambda r: f"{r['issue_us']:,.0f}",
    "memory us": lambda r: f"{r['memory_us']:,.0f}",
    "of HBM rate": lambda r: _percent(r["bandwidth_share"]),
    "of matrix peak": lambda r: _percent(r["matrix_share"]),
}
_KERNELS = {
    "case": lambda r: r["case"],
    "chip": lambda r: r["topology"].partition(":")[0],
    "kernels": lambda r: r["tpu_custom_calls"],
    "VMEM MiB": lambda r: _mib(r["vmem_bytes"]),
    "of VMEM": lambda r: _percent(r["vmem_share"]),
    "SMEM KiB": lambda r: f"{r['smem_bytes'] / 1024:,.1f}",
    "spills in loops": lambda r: f"{r['inner_spills']:,}",
    "pool MiB": lambda r: _mib(r["pool_bytes"]),
    "temp MiB": lambda r: _mib(r["temp_bytes"]),
    "pool copies": lambda r: r["pool_copies"],
    "s": lambda r: r["compile_s"],
}
_STEPS = {
    "step": lambda r: f"{r['case']}, {r['layers']} layers",
    "chip": lambda r: r["topology"].partition(":")[0],
    "attention": lambda r: r["implementation"],
    "kernels": lambda r: r["tpu_custom_calls"],
    "arguments MiB": lambda r: _mib(r["argument_bytes"]),
    "temp MiB": lambda r: _mib(r["temp_bytes"]),
    "code MiB": lambda r: _mib(r["code_bytes"]),
    "pages left": lambda r: f"{r['pages_that_fit']:,}",
    "fits": lambda r: "yes" if r["fits"] else "no",
    "pool copies": lambda r: r["pool_copies"],
    "collectives": lambda r: r["collectives"],
    "s": lambda r: r["compile_s"],
}
