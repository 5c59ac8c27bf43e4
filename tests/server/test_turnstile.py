"""`Turnstile` and the line of connections: few begin in a turn of the event loop, and who only looks goes past."""

import asyncio
from typing import Any, cast

import pytest

from jpaged.server.connection import Connection
from jpaged.server.turnstile import Turnstile

POST = b"POST /v1/completions HTTP/1.1\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\n\r\n"


class Transport:
    def __init__(self) -> None:
        self.is_paused, self.is_closed = False, False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        assert self.is_paused
        self.is_paused = False

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0


class Inner(asyncio.Protocol):
    """Keeps what it is told."""

    def __init__(self, app_state: dict[str, Any], told: list[Any]) -> None:
        self._told = told

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._told.append("made")

    def data_received(self, data: bytes) -> None:
        self._told.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._told.append("lost")


class Client:
    """A connection, and what uvicorn's protocol was told of it."""

    def __init__(self, turnstile: Turnstile) -> None:
        self.told: list[Any] = []
        self.transport = Transport()
        self.connection = Connection(
            Inner, turnstile=turnstile, request_timeout_s=60, send_timeout_s=60, app_state={}, told=self.told
        )
        self.connection.connection_made(cast(asyncio.Transport, self.transport))

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    def leave(self) -> None:
        self.connection.connection_lost(None)


def in_loop(main: Any) -> None:
    asyncio.run(main())


def test_few_connections_are_made_in_a_turn() -> None:
    async def main() -> None:
        turnstile = Turnstile(2)
        clients = [Client(turnstile) for _ in range(7)]
        made = []
        for _ in range(5):
            made.append(sum(bool(client.told) for client in clients))
            await asyncio.sleep(0)
        assert made == [2, 4, 6, 7, 7]
        for client in clients:
            client.leave()

    in_loop(main)


def test_few_requests_begin_in_a_turn_and_whoever_looks_goes_past() -> None:
    async def main() -> None:
        turnstile = Turnstile(1)
        clients = [Client(turnstile) for _ in range(4)]
        while any(not client.told for client in clients):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        for client in clients[:3]:
            client.send(POST)
        clients[3].send(GET)
        assert [client.told[1:] for client in clients] == [[POST], [], [], [GET]]
        assert [client.transport.is_paused for client in clients] == [False, True, True, False]
        await asyncio.sleep(0)
        assert [client.told[1:] for client in clients] == [[POST], [POST], [], [GET]]
        await asyncio.sleep(0)
        assert [client.told[1:] for client in clients] == [[POST], [POST], [POST], [GET]]
        assert not any(client.transport.is_paused for client in clients)
        for client in clients:
            client.leave()

    in_loop(main)


def test_a_new_connection_that_looks_goes_past_those_that_are_not_made_yet() -> None:
    async def main() -> None:
        turnstile = Turnstile(1)
        clients = [Client(turnstile) for _ in range(9)]
        clients[8].send(GET)
        assert [client.told for client in clients] == [["made"], *[[]] * 7, ["made", GET]]
        for _ in range(10):
            await asyncio.sleep(0)
        assert [client.told for client in clients] == [*[["made"]] * 8, ["made", GET]]
        for client in clients:
            client.leave()

    in_loop(main)


def test_what_comes_in_pieces_stays_in_order() -> None:
    async def main() -> None:
        turnstile = Turnstile(1)
        first, second = Client(turnstile), Client(turnstile)
        second.send(POST[:3])
        second.send(POST[3:])  # was under way when reading was paused
        assert second.told == []
        await asyncio.sleep(0)
        assert second.told == ["made", POST]
        with second.connection.serving():
            for part in (b"a", b"b", b"GET c"):
                second.send(part)  # of a body: it waits no more
            assert second.told[2:] == [b"a", b"b", b"GET c"]
        first.leave()
        second.leave()

    in_loop(main)


@pytest.mark.parametrize("how", ["lost", "closing"])
def test_who_leaves_in_the_line_is_not_let_in(how: str) -> None:
    async def main() -> None:
        turnstile = Turnstile(1)
        first, second, third = (Client(turnstile) for _ in range(3))
        second.send(POST)
        if how == "lost":
            second.leave()
        else:
            second.transport.is_closed = True
        for _ in range(4):
            await asyncio.sleep(0)
        assert (first.told, second.told, third.told) == (["made"], [], ["made"])
        for client in (first, second, third):
            client.leave()
        assert second.told == []

    in_loop(main)


def test_a_call_that_fails_does_not_stop_the_line() -> None:
    async def main() -> None:
        loop, failures, passed = asyncio.get_running_loop(), [], []
        loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
        turnstile = Turnstile(1)
        turnstile.enter(lambda: passed.append(0))
        turnstile.enter(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
        turnstile.enter(lambda: passed.append(2))
        for _ in range(4):
            await asyncio.sleep(0)
        assert passed == [0, 2]
        assert [type(failure) for failure in failures] == [ZeroDivisionError]

    in_loop(main)
