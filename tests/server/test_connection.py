"""`Connection`: who is dropped, and when."""

import asyncio
from typing import Any, cast

from jpaged.server.connection import Connection


class Transport:
    """A client that reads so many bytes each time it is looked at."""

    def __init__(self, unread: int = 0, reads: int = 0) -> None:
        self.unread, self.reads = unread, reads
        self.num_looks, self.dropped = 0, asyncio.Event()

    def get_write_buffer_size(self) -> int:
        self.num_looks += 1
        self.unread = max(self.unread - self.reads, 0)
        return self.unread

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.dropped.set()


class Inner(asyncio.Protocol):
    def __init__(self, app_state: dict[str, Any]) -> None:
        self.app_state = app_state

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


def connection(transport: Transport) -> Connection:
    made = Connection(Inner, request_timeout_s=0.01, send_timeout_s=0.01, app_state={})
    made.connection_made(cast(asyncio.Transport, transport))
    return made


async def dropped(transport: Transport) -> None:
    await asyncio.wait_for(transport.dropped.wait(), 10)


def test_a_client_that_sends_nothing_is_dropped():
    async def main():
        transport = Transport()
        connection(transport)
        await dropped(transport)

    asyncio.run(main())


def test_a_client_that_reads_slowly_gets_its_whole_answer():
    async def main():
        transport = Transport(unread=50, reads=10)
        made = connection(transport)
        with made.serving():
            made.pause_writing()
            while transport.unread:
                assert not transport.dropped.is_set()
                await asyncio.sleep(0.001)
            made.resume_writing()
        await dropped(transport)  # which sends nothing more

    asyncio.run(main())


def test_an_answer_that_is_still_being_read_is_no_idle_connection():
    async def main():
        transport = Transport(unread=50, reads=10)
        with connection(transport).serving():
            pass
        await dropped(transport)
        assert transport.unread == 0

    asyncio.run(main())


def test_a_client_that_reads_nothing_is_dropped():
    async def main():
        transport = Transport(unread=50)
        made = connection(transport)
        with made.serving():
            made.pause_writing()
            await dropped(transport)

    asyncio.run(main())
