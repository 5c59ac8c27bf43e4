"""`SharedAnswer`: what the engine says of itself, for all who look, however many they are and however busy it is."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

from jpaged.server.api_error import ApiError

FRESH_S: Final = 0.25
PATIENCE_S: Final = 2.0  # the engine answers between two steps, and may be compiling one

Answer = TypeVar("Answer")


class SharedAnswer(Generic[Answer]):
    """Asks one question at a time, and not again while the last answer is fresh. Used by one event loop.

    Args:
      ask: asks it.
      fresh_s: so long an answer is given out again.
      patience_s: so long an answer is waited for; then the last one is given out, however old it is.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[Answer]], *, fresh_s: float = FRESH_S, patience_s: float = PATIENCE_S
    ) -> None:
        self._ask = ask
        self._fresh_s = fresh_s
        self._patience_s = patience_s
        self._last: tuple[Answer, float] | None = None  # and when it came
        self._asking: asyncio.Future[Any] | None = None

    async def get(self) -> tuple[Answer, float]:
        """The answer, and how many seconds old it is.

        Raises:
          ApiError: 503: there is none yet, and the engine does not answer in time.
          EngineFailedError: the engine does not serve.
        """
        if self._last is None or time.monotonic() - self._last[1] >= self._fresh_s:
            if self._asking is None:
                self._asking = asyncio.ensure_future(self._renew())
                self._asking.add_done_callback(self._forget_question)
            # Who leaves does not take the question along: others wait for it too.
            done, _ = await asyncio.wait((self._asking,), timeout=self._patience_s)
            for asked in done:
                asked.result()
        if self._last is None:
            raise ApiError(503, "the engine is too busy to say how it is; try again", retry_after_s=5)
        answer, at_s = self._last
        return answer, time.monotonic() - at_s

    async def _renew(self) -> None:
        try:
            self._last = (await self._ask(), time.monotonic())
        except BaseException:
            self._last = None  # it was about an engine that is gone
            raise

    def _forget_question(self, asked: "asyncio.Future[Any]") -> None:
        self._asking = None
        if not asked.cancelled():
            asked.exception()  # somebody was told of it, or nobody waits any more
