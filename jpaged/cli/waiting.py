"""A spinner until the first text comes: prefill takes a while, and the first step of its shape is compiled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jpaged.progress import progress_wanted


@contextmanager
def waiting(what: str, asked: bool | None) -> Iterator[Callable[[], None]]:
    """Shows a spinner on the error stream until the yielded function is called or the block ends.

    Args:
      what: says what goes on.
      asked: `None`: on a terminal only.
    """
    if not progress_wanted(asked):
        yield lambda: None
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{what} (the first time, this compiles the step)") as status:
        yield status.stop
