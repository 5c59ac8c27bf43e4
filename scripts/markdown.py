"""`table`: a Markdown table; `measured`: where its figures come from. Needs the standard library alone."""

from collections.abc import Iterable, Mapping
from typing import Any


def table(columns: list[str], rows: Iterable[list[str]], *, num_text: int = 1) -> str:
    """A Markdown table: `num_text` columns of text, then figures; without rows it says so.

    Example:
      >>> print(table(["name", "figure"], [["a|b", "1"]]), end="")
      | name | figure |
      | :-- | --: |
      | a\\|b | 1 |
    """
    rows = list(rows) or [["not measured yet", *["–"] * (len(columns) - 1)]]
    lines = [columns, [*[":--"] * num_text, *["--:"] * (len(columns) - num_text)]]
    lines += [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def measured(record: Mapping[str, Any]) -> str:
    """The line that says where the figures of a record (`scripts/report.py`) come from.

    Example:
      >>> measured({"date": "2026-01-31", "device": "NVIDIA H200", "commit": "0a1b", "versions": {"jax": "0.11.2"},
      ...           "python": "3.12.3"})
      'Measured 2026-01-31 on one NVIDIA H200, commit `0a1b`, jax 0.11.2, Python 3.12.3.\\n'
    """
    return (
        f"Measured {record['date']} on one {record['device']}, commit `{record['commit']}`, jax "
        f"{record['versions']['jax']}, Python {record['python']}.\n"
    )
