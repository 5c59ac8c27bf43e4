"""The link between an engine's process and its client's: pickled messages with their lengths before them, on a socket.

Pickle runs what it reads, so it is for these two processes alone: the socket is a pair without a name, which the one
makes and the other inherits.
"""

import asyncio
import contextlib
import pickle
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

_LENGTH: Final = struct.Struct("<Q")
_READ_BYTES: Final = 1 << 18
_END: Final = object()


def frame(message: object) -> bytes:
    """A message as it goes over the link."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Takes the bytes of a link as they come, and gives the messages as they are whole.

    Example:
      >>> reader, data = FrameReader(), frame("a") + frame("b")
      >>> reader.feed(data[:3]), reader.feed(data[3:])
      ([], ['a', 'b'])
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that end in these bytes, in order."""
        buffer = self._buffer
        buffer += data
        messages, start = [], 0
        while len(buffer) - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(buffer, start)[0]
            if end > len(buffer):
                break
            with memoryview(buffer) as view, view[start + _LENGTH.size : end] as body:
                messages.append(pickle.loads(body))
            start = end
        if start:
            del buffer[:start]
        return messages


class ClientLink(asyncio.Protocol):
    """The client's end, in its event loop.

    Args:
      receive: takes each message.
      lost: called once the other end is gone, however that came.
    """

    def __init__(self, receive: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._receive = receive
        self._lost = lost
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # by its methods: uvloop's is of another class

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self._receive(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def send(self, message: object) -> None:
        """Never waits: the engine's end always reads. Dropped if the other end is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def close(self) -> None:
        """Ends the link; `lost` is called."""
        if self._transport is not None:
            self._transport.close()


class EngineLink:
    """The engine's end: one thread reads, one writes, so that the engine itself never waits for the socket.

    Unless the client is very late: then `send` waits, lest the messages fill the memory.

    Args:
      connection: the socket.
      max_unsent: messages that may wait to be sent; there is one a step.
    """

    def __init__(self, connection: socket.socket, *, max_unsent: int = 256) -> None:
        self._connection = connection
        self._unsent: queue.Queue[object] = queue.Queue(max_unsent)
        self._writer = threading.Thread(target=self._write, name="jpaged-link-writer", daemon=True)
        self._writer.start()

    def messages(self) -> Iterator[Any]:
        """Messages as they come; ends when the other end is gone. For one thread."""
        reader = FrameReader()
        while data := self._read():
            yield from reader.feed(data)

    def send(self, message: object) -> None:
        """Hands a message to the writer. It must not change any more."""
        self._unsent.put(message)

    def greet(self) -> None:
        """Sends an empty message, as a sign of life; left out if the client is late, since others wait to be sent."""
        with contextlib.suppress(queue.Full):
            self._unsent.put_nowait([])

    def close(self, timeout_s: float = 5.0) -> None:
        """Sends what waits, and ends the link."""
        self._unsent.put(_END)
        self._writer.join(timeout_s)
        self._connection.close()

    def _read(self) -> bytes:
        try:
            return self._connection.recv(_READ_BYTES)
        except OSError:
            return b""

    def _write(self) -> None:
        while (message := self._unsent.get()) is not _END:
            try:
                self._connection.sendall(frame(message))
            except OSError:  # the reader finds out as well, and ends the process
                return
