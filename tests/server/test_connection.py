"""`Connection`: who is dropped, and when."""

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any, cast

import pytest

from jpaged.server.connection import Connection
from jpaged.server.turnstile import Turnstile


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

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Inner(asyncio.Protocol):
    def __init__(self, app_state: dict[str, Any]) -> None:
        self.app_state = app_state

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...

    def data_received(self, data: bytes) -> None: ...


class Line:
    """A turnstile that turns when it is told to."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.enter = self.calls.append


def connection(transport: Transport) -> Connection:
    made = Connection(Inner, turnstile=Turnstile(1), request_timeout_s=0.01, send_timeout_s=0.01, app_state={})
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


@pytest.mark.parametrize("first", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%s\r\n"])
def test_a_head_without_an_end_is_dropped(server, first):
    """The first of a connection, and one behind a request that is being served."""
    body = b'{"prompt": "ab"}'
    if first:
        first = first % (b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)) + body
    server.do(server.client.gate.clear)
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20) as connection:
        connection.sendall(first)
        if first:
            server.wait_until(lambda: server.client.num_live == 1)
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        with pytest.raises(ConnectionError):
            connection.sendall(b"x" * 2**26)
    server.wait_until(lambda: server.client.num_live == 0)
    server.do(server.client.gate.set)


def test_long_bodies_and_heads_behind_them_are_no_heads_without_an_end(server):
    body = json.dumps({"prompt": "ab", "user": "x" * 2**21, "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20) as connection:
        connection.sendall((head % len(body) + body) * 2 + b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
        answers = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answers.count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_of_http_1_0_gets_its_answer_without_chunks(server, stream):
    """Its protocol has none: an answer of a length that nobody knows ends with the connection."""
    body = json.dumps({"prompt": "ab", "max_tokens": 5, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    head += b"Connection: keep-alive\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20) as connection:
        connection.sendall(head % len(body) + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    headers, _, content = answer.partition(b"\r\n\r\n")
    assert headers.split(b" ")[1] == b"200"
    assert b"connection: close" in headers.split(b"\r\n")
    assert b"transfer-encoding" not in headers.lower()
    if stream:
        assert [json.loads(event.removeprefix(b"data: ")) for event in content.split(b"\n\n")[:-2]]
        assert content.startswith(b"data: {")
        assert content.endswith(b"\n\ndata: [DONE]\n\n")
    else:
        assert b"content-length: %d" % len(content) in headers
        assert json.loads(content)["usage"]["completion_tokens"] == 5


def test_a_client_of_http_1_0_gets_the_first_event_before_the_last(server):
    body = json.dumps({"prompt": "ab", "max_tokens": 5, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    server.do(server.client.gate.clear)
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20) as connection:
        connection.sendall(head % len(body) + body)
        server.wait_until(lambda: server.client.num_live == 1)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")  # while the answer waits
        server.do(server.client.gate.set)
        assert b"".join(iter(lambda: connection.recv(65536), b"")).endswith(b"data: [DONE]\n\n")


def streamed(version: bytes, *, stream: bool = True) -> bytes:
    body = json.dumps({"prompt": "ab", "max_tokens": 3, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/%s\r\nHost: x\r\nConnection: keep-alive\r\n" % version
    return head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    ("requests", "chunked"),
    [
        ([streamed(b"1.0"), streamed(b"1.0")], [False]),
        ([streamed(b"1.0"), streamed(b"1.1")], [False]),
        ([streamed(b"1.1"), streamed(b"1.0")], [True, False]),
        ([streamed(b"1.1", stream=False), streamed(b"1.0"), streamed(b"1.1")], [False, False]),
    ],
    ids=["1.0 1.0", "1.0 1.1", "1.1 1.0", "1.1 whole, 1.0, 1.1"],
)
def test_requests_in_one_packet_get_chunks_by_their_own_protocol(server, requests, chunked):
    """uvicorn has read all of them when it begins to serve the first; one of HTTP/1.0 is the last that is answered."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20) as connection:
        connection.sendall(b"".join(requests))
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    nothing, *answers = received.split(b"HTTP/1.1 200 OK\r\n")
    assert nothing == b""
    heads, contents = zip(*(answer.split(b"\r\n\r\n", 1) for answer in answers), strict=True)
    assert [b"transfer-encoding: chunked" in head for head in heads] == chunked
    assert [content.endswith(b"\r\n0\r\n\r\n") for content in contents] == chunked
    assert contents[-1].startswith(b"data: {")
    assert contents[-1].endswith(b"\n\ndata: [DONE]\n\n")


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


def in_line(transport: Transport, timeout_s: float) -> tuple[Connection, Line]:
    """A connection that waits to be let in."""
    line = Line()
    given = {"turnstile": cast(Turnstile, line), "request_timeout_s": timeout_s, "send_timeout_s": 60, "app_state": {}}
    made = Connection(Inner, **given)
    made.connection_made(cast(asyncio.Transport, transport))
    return made, line


def test_who_waits_in_line_with_a_request_is_not_dropped():
    async def main():
        transport = Transport()
        made, line = in_line(transport, 0.01)
        made.data_received(b"POST / HT")
        made.data_received(b"TP/1.1")  # was under way when reading was paused
        await asyncio.sleep(0.05)
        assert not transport.dropped.is_set()
        (let_in,) = line.calls
        let_in()
        await dropped(transport)  # what came is not a whole head, and the time goes on

    asyncio.run(main())


def test_who_waits_in_line_with_nothing_is_dropped():
    async def main():
        transport = Transport()
        in_line(transport, 0.01)
        await dropped(transport)

    asyncio.run(main())


def test_the_time_for_a_request_goes_on_behind_the_line_where_it_was():
    async def main():
        now = asyncio.get_running_loop().time
        made, line = in_line(Transport(), 3600)
        assert made._waiting is not None
        due_s = made._waiting.when()
        await asyncio.sleep(0.02)
        begin_s = now()
        made.data_received(b"POST ")
        assert made._waiting is None
        await asyncio.sleep(0.01)
        line.calls.pop()()
        waiting: Any = made._waiting
        assert 0 < waiting.when() - due_s <= now() - begin_s + 1e-6  # and not as much as before it
        made.connection_lost(None)

    asyncio.run(main())


def test_a_request_that_is_served_meanwhile_has_no_time_to_come():
    """Its body, or the next one's head, waits in line while the application takes it up."""

    async def main():
        made, line = in_line(Transport(), 3600)
        made.data_received(b"x")
        with made.serving():
            line.calls.pop()()
            assert made._waiting is None
        due = made._waiting
        assert due is not None
        made.connection_lost(None)
        assert due.cancelled()

    asyncio.run(main())
