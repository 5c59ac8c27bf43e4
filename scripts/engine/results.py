"""`Results`: what was measured so far: printed as it comes, and kept as JSON."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jpaged.errors import ConfigError
from scripts.report import environment, print_table


class Results:
    """Results of one run.

    Args:
      output: a file that has the JSON so far, after each addition; `None`: none.
      quiet: print nothing.

    Attributes:
      values: name -> result.
    """

    def __init__(self, output: Path | None, *, quiet: bool):
        self._output, self._quiet = output, quiet
        self.values: dict[str, Any] = {}

    def say(self, text: str) -> None:
        """Prints a line."""
        if not self._quiet:
            print(text, flush=True)

    def table(self, title: str, columns: list[str], rows: Sequence[Sequence[object]]) -> None:
        """Prints a table."""
        if not self._quiet:
            print_table(title, columns, [list(row) for row in rows])
            sys.stdout.flush()

    def add(self, results: Mapping[str, Any]) -> None:
        """Keeps results, in the file too.

        Raises:
          ConfigError: the file cannot be written.
        """
        self.values |= results
        if self._output:
            try:
                self._output.write_text(self.line() + "\n", encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"{self._output} cannot be written: {error.strerror or error}") from error

    def line(self) -> str:
        """The last line of the script: a record as `scripts/render_benchmarks.py` reads it."""
        return json.dumps({"script": "bench_engine", **environment(), "results": self.values})
