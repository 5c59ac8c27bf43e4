"""Work for a client that may leave: it ends when the client does."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from jpaged.server.body import ClientLeftError, Receive

Result = TypeVar("Result")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Runs `work` to its end, or until the client closes the connection; then the work is cancelled.

    Args:
      receive: of the request, whose body has been read.
      work: what to do; its clean-up is waited for.

    Raises:
      ClientLeftError: the client left.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        for one in (task, watch):
            if not one.done():
                one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
