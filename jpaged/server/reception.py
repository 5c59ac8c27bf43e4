"""`Reception`: reads requests off the event loop, few at once: harmless ones in threads, others in a process."""

import asyncio
import functools
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from jpaged.server.api_error import ApiError
from jpaged.server.body import BodyReader, Receive
from jpaged.server.disconnect import while_connected
from jpaged.server.door import Door
from jpaged.server.door_worker import DoorWorker
from jpaged.server.parameters import Endpoint

LARGE_BODY_BYTES: Final = 256 * 1024  # a thread that parses so much holds the interpreter for 10 ms at the worst
_NUM_THREADS: Final = 2  # tokenizing lets other threads run; more of them would only contend with the event loop


class Reception:
    """The way from the bytes of a request to what it asks for, as the event loop sees it.

    Args:
      bodies: reads what clients send.
      door: reads in threads.
      worker: reads large bodies, and those that may have a chat template of their own.
      foreign_templates: requests may bring chat templates.

    Attributes:
      num_waiting: requests whose bodies have come, and are not read yet.
    """

    def __init__(self, bodies: BodyReader, door: Door, worker: DoorWorker, *, foreign_templates: bool = False) -> None:
        self.door = door
        self._bodies = bodies
        self._worker = worker
        self._foreign_templates = foreign_templates
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="door")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large-door")
        # So many at once that no thread waits, and so few that a flood does not fill one turn of the event loop.
        self._places = asyncio.Semaphore(2 * _NUM_THREADS)
        self.num_waiting = 0

    async def read(self, endpoint: Endpoint, headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> Any:
        """What a request asks for: see `Door.read`.

        Args:
          endpoint: that it is sent to.
          headers, receive: of the request.

        Raises:
          ApiError: the request is refused.
          ClientLeftError: the client has gone.
        """
        body = await self._bodies.read(headers, receive)
        self.num_waiting += 1
        try:
            if len(body) > LARGE_BODY_BYTES or (self._foreign_templates and b"chat_template" in body):
                return await while_connected(receive, self._read_elsewhere(endpoint, body))
            async with self._places:
                return await self._in_thread(self._threads, self.door.read, endpoint, body)
        finally:
            self.num_waiting -= 1
            self._bodies.release(len(body))

    async def _read_elsewhere(self, endpoint: Endpoint, body: bytes) -> Any:
        left = threading.Event()
        read = functools.partial(self._worker.read, left=left)
        try:
            return await self._in_thread(self._large, read, endpoint, body)
        except asyncio.CancelledError:  # nobody waits for it, and others may
            self._worker.give_up(left)
            raise

    async def _in_thread(self, threads: ThreadPoolExecutor, read: Any, endpoint: Endpoint, body: bytes) -> Any:
        reading = functools.partial(_without_stop, read, endpoint, body)
        return await asyncio.get_running_loop().run_in_executor(threads, reading)

    def close(self) -> None:
        """Ends threads and process; what they read is lost."""
        self._worker.close()
        for threads in (self._threads, self._large):
            threads.shutdown(wait=False, cancel_futures=True)


def _without_stop(read: Any, endpoint: Endpoint, body: bytes) -> Any:
    try:
        return read(endpoint, body)
    except StopIteration as error:  # cannot pass through a future
        raise ApiError(500, "reading the request failed") from error
