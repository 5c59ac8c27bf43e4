"""`table`: a Markdown table. Needs the standard library alone."""

from collections.abc import Iterable


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
