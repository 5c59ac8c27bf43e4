"""Progress bars of loading and generating: on a terminal, never in a pipe."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jpaged.stats import EngineStats


class _HasStats(Protocol):
    def stats(self) -> EngineStats: ...


def progress_wanted(asked: bool | None) -> bool:
    """What was asked; `None`: only if the error stream, where bars are drawn, is a terminal."""
    return sys.stderr.isatty() if asked is None else asked


def _bar(*columns) -> Progress:
    # Bars go to the error stream: the output stream belongs to the results.
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)


class GenerationProgress:
    """A bar of finished requests, with tokens a second, batch size and pages in use.

    Args:
      enabled: `False`: every method does nothing.
      total: requests in all; `None` where nothing is counted.
      what: the bar's name.
    """

    def __init__(self, *, enabled: bool, total: int | None = None, what: str = "requests"):
        self._progress: Progress | None = None
        if enabled:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._progress = _bar(*columns)
            self._task = self._progress.add_task(what, total=total, note="")
            self._tokens_before: int | None = None

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress:
            self._progress.stop()

    def note(self, text: str) -> None:
        """Shows what is going on, until the next advance."""
        if self._progress:
            self._progress.update(self._task, note=text)
            self._progress.refresh()

    def advance(self, finished: int, source: _HasStats) -> None:
        """Counts finished requests and shows the engine's state."""
        if not self._progress:
            return
        stats = source.stats()
        if self._tokens_before is None:
            self._tokens_before = stats.num_generated_tokens
        elapsed = self._progress.tasks[0].elapsed or 0.0
        rate = (stats.num_generated_tokens - self._tokens_before) / elapsed if elapsed else 0.0
        note = f"{rate:.0f} tok/s, {stats.num_running} running, {stats.now.pages_used}/{stats.num_pages - 1} pages"
        self._progress.update(self._task, advance=finished, note=note)

    @staticmethod
    @contextmanager
    def loading(what: str, enabled: bool) -> Iterator[Callable[[int, int], None] | None]:
        """A bar for `load_model`'s callback (done, total)."""
        if not enabled:
            yield None
            return
        with _bar(TextColumn("{task.description}"), BarColumn()) as progress:
            task = progress.add_task(what, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
