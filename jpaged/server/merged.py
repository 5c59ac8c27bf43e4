"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from jpaged.delta import Delta
from jpaged.engine_client import RequestStream


@asynccontextmanager
async def opened(opening: Sequence[Coroutine[Any, Any, RequestStream]]) -> AsyncIterator[list[RequestStream]]:
    """Opens streams all at once, so that the engine takes them for one step; whatever happens, they are closed.

    Raises:
      Exception: what the first one that cannot be opened raises.
    """
    tasks = [asyncio.ensure_future(one) for one in opening]
    try:
        yield await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        for stream in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(stream, BaseException):
                await stream.aclose()


async def merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, list[Delta]], None]:
    """(number of the stream, its next deltas) as they come; ends when all have ended.

    Raises:
      Exception: what the first stream that fails raises.
    """
    if len(streams) == 1:  # nearly always; no queue between
        async for deltas in streams[0]:
            yield 0, deltas
        return
    queue: asyncio.Queue[tuple[int, list[Delta] | Exception | None]] = asyncio.Queue(maxsize=len(streams))

    async def pump(number: int, stream: RequestStream) -> None:
        ending: Exception | None = None
        try:
            async for deltas in stream:
                await queue.put((number, deltas))
        except Exception as error:
            ending = error
        await queue.put((number, ending))

    tasks = [asyncio.ensure_future(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            number, item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
