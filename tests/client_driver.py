"""What tests of an `EngineClient` do again and again."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from jpaged.delta import Delta
from jpaged.engine_client import RequestStream


def run(main: Coroutine[Any, Any, Any], timeout_s: float = 60.0) -> Any:
    """Runs a test's coroutine; hanging is a failure."""
    return asyncio.run(asyncio.wait_for(main, timeout_s))


async def read(stream: RequestStream) -> list[Delta]:
    """All deltas of a stream."""
    return [delta for deltas in [deltas async for deltas in stream] for delta in deltas]


async def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    """Waits until something holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.005)


def text_of(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def tokens_of(deltas: list[Delta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]
