"""`RequestStream`: the deltas of one request on their way from the engine to who reads them."""

import asyncio
from collections.abc import Callable

from jpaged.delta import Delta
from jpaged.engine_messages import Begun, Ended
from jpaged.errors import EngineFailedError
from jpaged.request import TokenLogprobs
from jpaged.timing import RequestTiming


class RequestStream:
    """As `engine_client.RequestStream`. One task reads; `AsyncEngine` writes, in the same event loop.

    Deltas wait here for a slow reader: no more than the request may have tokens. The engine never waits for a reader.

    Args:
      request_id: of the request.
      drop: ends the request in the engine.
    """

    __slots__ = (
        "_deltas",
        "_drop",
        "_ended",
        "_failure",
        "_waiter",
        "error",
        "num_cached_tokens",
        "num_preemptions",
        "prompt_logprobs",
        "request_id",
        "timing",
    )

    def __init__(self, request_id: str, drop: Callable[[], None]) -> None:
        self.request_id = request_id
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.error: str | None = None
        self.timing: RequestTiming | None = None
        self._drop = drop
        self._deltas: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._failure: EngineFailedError | None = None

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> list[Delta]:
        """What came since the last call, at least one delta; waits for it.

        Raises:
          EngineFailedError: the engine failed, or was closed, before the request ended.
        """
        while not self._deltas:
            if self._failure is not None:
                raise self._failure
            if self._ended:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError(f"request {self.request_id!r} is being read by another task")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas, self._deltas = self._deltas, []
        return deltas

    async def aclose(self) -> None:
        """Ends the request, if it has not ended. Idempotent."""
        if not self._ended:
            self._ended = True
            self._deltas.clear()
            self._drop()
            self._wake()

    def push(self, delta: Delta) -> None:
        """A new delta."""
        self._deltas.append(delta)
        self._wake()

    def begin(self, event: Begun) -> None:
        """Comes before the first delta."""
        self.num_cached_tokens, self.prompt_logprobs = event.num_cached_tokens, event.prompt_logprobs

    def end(self, event: Ended) -> None:
        """Comes after the last delta."""
        self.num_cached_tokens, self.num_preemptions = event.num_cached_tokens, event.num_preemptions
        self.error, self.timing, self._ended = event.error, event.timing, True
        self._wake()

    def fail(self, failure: EngineFailedError) -> None:
        """Nothing comes any more."""
        self._failure, self._ended = failure, True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
