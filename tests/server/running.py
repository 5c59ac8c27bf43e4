"""A server in a thread of the test's process, on a free port."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx

from jpaged.server import ServerConfig, serve

PATIENCE_S = 60


class Running:
    """A server that runs.

    Attributes:
      url: where.
      client: the engine.
      http: an HTTP client for it.
    """

    def __init__(self, make_client: Callable[[], Awaitable[Any]], tokenizer: Any, config: ServerConfig) -> None:
        self._make, self._tokenizer, self._config = make_client, tokenizer, config
        self.url = ""
        self._ready = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S, trust_env=False)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self.failure = error
        self._ready.set()

    async def _main(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.client = await self._make()

        def ready(url: str) -> None:
            self.url = url
            self._ready.set()

        try:
            await serve(self._config, self.client, self._tokenizer, stop=self._stop, on_ready=ready)
        finally:
            await self.client.close()

    def do(self, call: Callable[[], Any]) -> Any:
        """Calls something in the server's event loop, and waits for it."""

        async def run() -> Any:
            result = call()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_S)

    def wait_until(self, true: Callable[[], bool]) -> None:
        """Waits, in the server's event loop, until something is true."""

        async def wait() -> None:
            async with asyncio.timeout(PATIENCE_S):
                while not true():
                    await asyncio.sleep(0.002)

        self.do(wait)

    def stop(self) -> None:
        """Begins to end."""
        self.loop.call_soon_threadsafe(self._stop.set)

    def close(self) -> None:
        """Ends, and tells what went wrong."""
        if self._thread.is_alive():
            self.stop()
        self._thread.join(PATIENCE_S)
        self.http.close()
        if self.failure is not None:
            raise self.failure


@contextlib.contextmanager
def running(make_client: Callable[[], Awaitable[Any]], tokenizer: Any, **settings: Any) -> Iterator[Running]:
    server = Running(make_client, tokenizer, ServerConfig(**{"models": ("tiny", "other-name"), "port": 0, **settings}))
    try:
        yield server
    finally:
        server.close()


def events(response: httpx.Response) -> list[Any]:
    """The events of a whole answer, checked for their form; "[DONE]" is the last one and is left out."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    pieces = response.text.split("\n\n")
    assert pieces.pop() == ""
    assert all(piece.startswith("data: ") and "\n" not in piece for piece in pieces)
    assert pieces.pop() == "data: [DONE]"
    return [json.loads(piece[len("data: ") :]) for piece in pieces]
