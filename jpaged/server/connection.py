"""`Connection`: uvicorn's protocol of a connection, with ends to what a client may leave undone, and a line to wait in.

uvicorn closes a connection on which nothing comes after an answer. Four more ways to keep one, and what it holds, for
ever are closed here: to send no request at all, to send one's head byte by byte or without an end, and to read nothing
of an answer.

Many connections that open, or begin a request, at once wait in line: a few a turn of the event loop are let in. Who
only looks (GET: `/health`, `/metrics`) goes past it. The time in which what has come waits there is not the client's.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

from starlette.types import Message, Send

from jpaged.server.turnstile import Turnstile

_LOGGER: Final = logging.getLogger("jpaged.server")
STATE_KEY: Final = "jpaged.connection"
_MAX_HEAD_BYTES: Final = 512 * 1024  # one read, which may begin with the end of a body, is at most half of it


class Connection(asyncio.Protocol):
    """One connection. The application says, by `serving`, while a request is being served on it.

    Args:
      inner: makes uvicorn's protocol, given the rest of the arguments by name.
      turnstile: of all connections.
      request_timeout_s: for the head of a request to come, from the connection's begin or the last answer's end; not
        counted while the connection's turn to be read has not come.
      send_timeout_s: for a client to read anything of what fills the buffers; then it counts as gone.
      app_state: of the application; this connection goes with it, into the scopes of its requests.
      given: what uvicorn gives a protocol.
    """

    def __init__(
        self,
        inner: Callable[..., Any],
        *,
        turnstile: Turnstile,
        request_timeout_s: float,
        send_timeout_s: float,
        app_state: dict[str, Any],
        **given: Any,
    ) -> None:
        self._make_inner = lambda: inner(app_state={**app_state, STATE_KEY: self}, **given)
        self._inner: Any = None  # until the connection is let in
        self._turnstile = turnstile
        self._in_line = False
        self._held = b""  # came before its turn
        self._is_paused = False  # reading, by this class: uvicorn's protocol pauses it too
        self._request_timeout_s = request_timeout_s
        self._send_timeout_s = send_timeout_s
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.TimerHandle | None = None  # for a request
        self._left_s = 0.0  # of the time for it, while it is in line
        self._blocked: asyncio.TimerHandle | None = None  # by a client that does not read
        self._num_served = 0
        self._head_bytes = 0

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """A request is served while the block runs."""
        self._num_served += 1
        self._waiting = _stopped(self._waiting)
        try:
            yield
        finally:
            self._num_served -= 1
            self._await_request()

    def without_chunks(self, send: Send) -> Send:
        """`send` of the request that is served now, for a client of HTTP/1.0.

        That has no chunks: an answer whose length nobody knows ends with the connection, which uvicorn closes then. But
        its protocol on httptools writes chunks for every client, unless it believes that it was told a length.

        `send` must be uvicorn's own, a method of the request's cycle: the protocol itself only knows the cycle of the
        request that it read last, and clients may send several at once. Behind something that wraps `send`, as
        uvicorn's log of messages does, there is but that one to go by.
        """
        cycle, is_open = getattr(send, "__self__", self._inner.cycle), False

        async def sending(message: Message) -> None:
            nonlocal is_open
            if message["type"] == "http.response.start":
                is_open = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = False if is_open else None
            elif is_open:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        return sending

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._await_request()
        self._wait_in_line()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._waiting, self._blocked = _stopped(self._waiting), _stopped(self._blocked)
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._in_line and (self._num_served or self._head_bytes):  # more of what has begun
            self._feed(data)
            return
        self._held += data
        if self._held.startswith(b"GET "):
            self._let_in()
        else:
            self._wait_in_line()

    def _wait_in_line(self) -> None:
        if not self._in_line:
            self._in_line = True
            self._turnstile.enter(self._let_in)
        if self._in_line and self._held and self._transport is not None and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()  # what else it sends stays with the client
            if self._waiting is not None:
                self._left_s = max(self._waiting.when() - asyncio.get_running_loop().time(), 0.0)
                self._waiting = _stopped(self._waiting)

    def _let_in(self) -> None:
        """Its turn has come, or comes before the others'; then there is nothing to do when it comes again."""
        transport, held, is_paused = self._transport, self._held, self._is_paused
        self._in_line, self._held, self._is_paused = False, b"", False
        if transport is None or transport.is_closing():
            return
        if self._inner is None:
            self._inner = self._make_inner()
            self._inner.connection_made(transport)
        if is_paused:
            transport.resume_reading()
            if self._waiting is None:
                self._await_request(self._left_s)
        if held:
            self._feed(held)

    def _feed(self, data: bytes) -> None:
        self._inner.data_received(data)
        # The parser of httptools keeps a head of any length; that of h11 refuses long ones itself. The path is the last
        # that uvicorn adds to a scope, once its head is whole.
        scope = getattr(self._inner, "scope", None)
        self._head_bytes = 0 if scope is None or "path" in scope else self._head_bytes + len(data)
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._drop("sends a head without an end")

    def eof_received(self) -> bool | None:
        return None if self._inner is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._blocked = _stopped(self._blocked)
        self._inner.resume_writing()

    def _await_request(self, limit_s: float | None = None) -> None:
        if self._transport is not None and not self._num_served:
            limit_s = self._request_timeout_s if limit_s is None else limit_s
            given = (self._await_request, "sends no whole request", self._transport.get_write_buffer_size())
            self._waiting = asyncio.get_running_loop().call_later(limit_s, self._give_up, *given)

    def _await_reader(self) -> None:
        if self._transport is not None:
            given = (self._await_reader, "reads nothing", self._transport.get_write_buffer_size())
            self._blocked = asyncio.get_running_loop().call_later(self._send_timeout_s, self._give_up, *given)

    def _give_up(self, go_on: Callable[[], None], why: str, unread_before: int) -> None:
        """Drops a client, unless it has read something of the `unread_before` bytes meanwhile: then it waits on."""
        if self._transport is None:
            return
        unread = self._transport.get_write_buffer_size()
        if unread < unread_before:
            go_on()
        elif unread or not self._transport.is_closing():
            self._drop(why)

    def _drop(self, why: str) -> None:
        if self._transport is not None:
            _LOGGER.info("a client %s and is dropped", why)
            self._transport.abort()  # which the application sees as a client that has left


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
