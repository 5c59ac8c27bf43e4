"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from jpaged.delta import Delta
from jpaged.engine_client import RequestStream


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
