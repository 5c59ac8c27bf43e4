"""`HttpClient`: HTTP/1.1 on asyncio's streams, as much of it as a load generator needs, at a few microseconds a piece.

A load generator shares the machine with the server that it measures, and may have to read tens of thousands of events a
second. General clients (httpx, aiohttp) spend more on one event than the server does; this one spends less, since it
knows what it talks to: answers with a length, in chunks, or that end with the connection; no redirects, no encodings.
Connections are kept and used again. Leaving an answer before its end closes its connection, as a client does that
leaves.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from jpaged.errors import ConfigError

_READ_BYTES = 1 << 18


class CutOffError(ConnectionError):
    """The connection ended, or something that is no HTTP came, before the answer was whole."""


class Dechunker:
    """Takes the frames off a body in chunks, however its bytes are split.

    Attributes:
      is_done: the last chunk has come.

    Example:
      >>> dechunker = Dechunker()
      >>> [dechunker.feed(part) for part in (b"3\\r\\nab", b"c\\r", b"\\n0\\r\\n\\r\\n")], dechunker.is_done
      ([b'ab', b'c', b''], True)
    """

    def __init__(self) -> None:
        self.is_done = False
        self._left = 0  # bytes of the chunk that are still to come, its line end included
        self._rest = b""  # of a line that has not come whole
        self._in_trailer = False

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body in `data`.

        Raises:
          CutOffError: the frames are wrong.
        """
        parts = []
        data = self._rest + data if self._rest else data
        place, size, self._rest = 0, len(data), b""
        while place < size and not self.is_done:
            if self._left:
                taken = min(self._left, size - place)
                parts.append(data[place : place + min(taken, max(self._left - 2, 0))])
                self._left -= taken
                place += taken
                continue
            line_end = data.find(b"\r\n", place)
            if line_end < 0:
                self._rest = data[place:]
                break
            line, place = data[place:line_end], line_end + 2
            if self._in_trailer:
                self.is_done = not line
                continue
            try:
                length = int(line.partition(b";")[0], 16)
            except ValueError:
                raise CutOffError(f"a chunk begins with {line[:20]!r}, expected its length") from None
            if length == 0:
                self._in_trailer = True
            else:
                self._left = length + 2
        return b"".join(parts)


class Answer:
    """An answer whose head has come.

    Attributes:
      status: of HTTP.
      headers: by their names in small letters.
      is_whole: everything has been read.
    """

    def __init__(self, head: bytes, reader: asyncio.StreamReader) -> None:
        lines = head.decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise CutOffError(f"got {lines[0][:40]!r}, expected an answer of HTTP/1.1")
        self.status = int(rest[:3])
        self.headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines[1:] if line)
        }
        self._reader = reader
        self._dechunker = Dechunker() if self.headers.get("transfer-encoding", "").lower() == "chunked" else None
        length = self.headers.get("content-length")
        self._left = None if length is None else int(length)
        self.is_whole = self._dechunker is None and self._left == 0
        self.may_keep = (
            self.headers.get("connection", "keep-alive").lower() != "close"
            and version == "HTTP/1.1"
            and (self._dechunker is not None or self._left is not None)
        )

    async def read(self) -> bytes:
        """What has come of the body since the last call; waits for it. Empty: the body is whole.

        Raises:
          CutOffError: the connection ended before that.
        """
        while not self.is_whole:
            data = await self._reader.read(_READ_BYTES)
            if self._dechunker is not None:
                body = self._dechunker.feed(data)
                self.is_whole = self._dechunker.is_done
            elif self._left is not None:
                body, self._left = data, self._left - len(data)
                self.is_whole = self._left <= 0
            else:
                body, self.is_whole = data, not data
            if not data and not self.is_whole:
                raise CutOffError("the connection ended in the middle of the answer")
            if body:
                return body
        return b""

    async def body(self) -> bytes:
        """All of the body that has not been read yet."""
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpClient:
    """Sends requests to one server.

    Args:
      url: of the server, such as "http://127.0.0.1:8000".
      headers: that go with each request.

    Raises:
      ConfigError: the URL has no scheme http or https, or no host.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"the server is {url!r}, expected a URL such as http://127.0.0.1:8000")
        self._host = parts.hostname
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._prefix = parts.path.rstrip("/")
        lines = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **(headers or {})}
        self._lines = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[Connection] = []

    async def connect(self) -> Connection:
        """A new connection; `request` makes its own."""
        return await asyncio.open_connection(self._host, self._port, ssl=self._ssl, limit=_READ_BYTES)

    def written(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
        """The bytes of a request."""
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._lines}{more}Content-Length: {len(body)}\r\n\r\n"
        return head.encode("latin-1") + body

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Answer]:
        """Sends a request, and gives its answer once its head has come.

        Raises:
          OSError: there is no connection, or it ended.
        """
        data = self.written(method, path, body, headers)
        while True:
            is_used = bool(self._idle)
            reader, writer = self._idle.pop() if is_used else await self.connect()
            try:
                writer.write(data)
                head = await reader.readuntil(b"\r\n\r\n")
                break
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError) as error:
                writer.close()
                # A server may end a connection that was idle just when it is used again: then nothing was done.
                if not is_used or getattr(error, "partial", b""):
                    raise CutOffError("the connection ended before the answer began") from None
            except BaseException:
                writer.close()
                raise
        answer = None
        try:
            answer = Answer(head[:-4], reader)
            yield answer
        finally:
            if answer is not None and answer.is_whole and answer.may_keep:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body."""
        async with self.request("GET", path) as answer:
            return answer.status, await answer.body()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Status and body."""
        async with self.request("POST", path, body, headers) as answer:
            return answer.status, await answer.body()

    def close(self) -> None:
        """Closes the connections that are idle."""
        while self._idle:
            self._idle.pop()[1].close()
