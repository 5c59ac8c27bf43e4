"""Ctrl-C at a better moment."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Holds a Ctrl-C back until the block is left, so that the block happens as a whole or not at all.

    For short blocks only. In other threads than the main one, which never get the signal, it does nothing.

    Example:
      >>> done = []
      >>> try:
      ...     with deferred_interrupts():
      ...         signal.raise_signal(signal.SIGINT)
      ...         done.append("the whole block")
      ... except KeyboardInterrupt:
      ...     done.append("then the interrupt")
      >>> done
      ['the whole block', 'then the interrupt']
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(*came[0])
