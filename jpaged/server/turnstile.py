"""`Turnstile`: lets few in during one turn of the event loop, so that who need not wait here is served between them."""

import asyncio
from collections import deque
from collections.abc import Callable


class Turnstile:
    """A thousand requests that come at once would else be read and begun in one turn, which takes most of a second.

    Args:
      width: calls in one turn.

    Example:
      >>> async def main():
      ...     turnstile, passed = Turnstile(2), []
      ...     for number in range(5):
      ...         turnstile.enter(lambda number=number: passed.append(number))
      ...     lengths = [len(passed)]
      ...     while len(passed) < 5:
      ...         await asyncio.sleep(0)
      ...         lengths.append(len(passed))
      ...     return lengths
      >>> asyncio.run(main())
      [2, 4, 5]
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._free = width  # in this turn
        self._line: deque[Callable[[], None]] = deque()
        self._turns = False

    def enter(self, call: Callable[[], None]) -> None:
        """Calls it now, or in a later turn, behind all that wait."""
        if not self._turns:
            self._turns = True
            asyncio.get_running_loop().call_soon(self._turn)
        if self._free and not self._line:
            self._free -= 1
            call()
        else:
            self._line.append(call)

    def _turn(self) -> None:
        self._free = self._width
        self._turns = bool(self._line)
        if self._turns:
            asyncio.get_running_loop().call_soon(self._turn)  # first: a call that fails must not stop the line
        while self._free and self._line:
            self._free -= 1
            self._line.popleft()()
