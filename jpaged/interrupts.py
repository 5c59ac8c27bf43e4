"""Ctrl-C at a better moment."""

import importlib
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final

# The module beneath `signal`, which a step uses six times: what that one adds, enums for numbers, takes longer than all
# else here.
_signal: Final[Any] = importlib.import_module("_signal")
_SIGINT: Final = int(signal.SIGINT)


class deferred_interrupts:
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

    __slots__ = ("_came", "_handler")

    def __enter__(self) -> None:
        self._came: list[tuple[int, FrameType | None]] = []
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread() and callable(handler := _signal.getsignal(_SIGINT)):
            self._handler = handler
            _signal.signal(_SIGINT, lambda number, frame: self._came.append((number, frame)))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._handler is not None:
            _signal.signal(_SIGINT, self._handler)
            if self._came and error is None:
                self._handler(*self._came[0])
