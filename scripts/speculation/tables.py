"""Tables of docs/benchmarks/speculation.md, from the records of bench_speculation.py.

`scripts/render_benchmarks.py` writes them. Needs the standard library alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from scripts.markdown import table
from scripts.render_memory import Record, source


def _records(records: Sequence[Record]) -> Iterator[Record]:
    return (record for record in records if record.script == "bench_speculation")


def _part(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}".replace("%", " %")


def cells_table(records: Sequence[Record]) -> str:
    """Steps and tokens/s with and without guesses."""
    columns = ["Hardware", "Model", "Prompts", "Rows", "Steps", "With guesses", "Guesses", "Right"]
    columns += ["Tokens/s", "With guesses", "Times as fast", "By CPU seconds", "Equal answers", "Measured"]
    return table(
        columns,
        (
            [
                record.device,
                record.results["model"],
                f"{cell['workload']}, {cell['kind']}",
                f"{cell['rows']}",
                f"{cell['plain_steps']:,}",
                f"{cell['guessing_steps']:,}",
                f"{cell['guesses']:,}",
                _part(cell["acceptance"]),
                f"{cell['plain_tokens_per_s']:,.1f}",
                f"{cell['guessing_tokens_per_s']:,.1f}",
                f"{cell['speedup']:.2f}",
                f"{cell['cpu_speedup']:.2f}",
                f"{cell['equal_answers']} of {cell['answers']}",
                source(record),
            ]
            for record in _records(records)
            for cell in record.results["cells"]
        ),
        num_text=3,
    )


def replay_table(records: Sequence[Record]) -> str:
    """What the same answers would take at other devices' costs, by rows."""

    def line(found: Sequence[Mapping[str, Any]]) -> list[str]:
        first = found[0]
        cells = [f"{one['speedup']:.2f} ({one['slow_row']:.2f})" for one in found]
        return [first["device"], f"{first['workload']}, {first['kind']}", *cells]

    lines: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    rows: dict[int, None] = {}
    for record in _records(records):
        for one in record.results["replayed"]:
            lines.setdefault((record.name, one["device"], one["workload"], one["kind"]), []).append(one)
            rows[one["rows"]] = None
    return table(
        ["Costs of", "Prompts", *(f"{count} row{'s' * (count > 1)}" for count in rows)],
        map(line, lines.values()),
        num_text=2,
    )


PARTS: Final[Mapping[str, Callable[[Sequence[Record]], str]]] = {
    "speculation": cells_table,
    "speculation-replay": replay_table,
}
