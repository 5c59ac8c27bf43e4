"""Reads the body of a request, piece by piece, with limits on one body, on all of them together, and on the time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from jpaged.server.api_error import ApiError

Receive = Callable[[], Awaitable[Any]]


class ClientLeftError(Exception):
    """The client closed the connection: there is nobody to answer."""


class BodyReader:
    """Reads bodies.

    Args:
      max_bytes: of one body.
      max_total_bytes: of all bodies that are in memory, being read or checked.
      timeout_s: for one body to come.
    """

    def __init__(self, *, max_bytes: int, max_total_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._timeout_s = timeout_s
        self.held_bytes = 0

    async def read(self, headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> bytes:
        """The whole body. `release` it once it is no longer held.

        Raises:
          ApiError: 400, 408, 413, 415 or 503: it is refused.
          ClientLeftError: the client has gone.
        """
        fields = {name: value for name, value in headers if name.startswith(b"content-")}
        kind = fields.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise ApiError(415, "the content type is not application/json: send JSON, and say so in Content-Type")
        if fields.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise ApiError(415, "the body is compressed: send it as it is, without Content-Encoding")
        length = fields.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > self._max_bytes:
            raise self._too_large()
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeftError
                    piece = message.get("body", b"")
                    size += len(piece)
                    self.held_bytes += len(piece)
                    pieces.append(piece)
                    if size > self._max_bytes:
                        raise self._too_large()
                    if self.held_bytes > self._max_total_bytes:
                        raise ApiError(503, "too many large requests at once; try again", retry_after_s=5)
                    if not message.get("more_body", False):
                        return b"".join(pieces)
        except TimeoutError:
            self.release(size)
            raise ApiError(408, f"the body did not come within {self._timeout_s:g} s") from None
        except BaseException:
            self.release(size)
            raise

    def release(self, num_bytes: int) -> None:
        """A body of so many bytes is no longer held."""
        self.held_bytes -= num_bytes

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes; send less at once")
