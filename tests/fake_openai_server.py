"""A server of OpenAI's API on raw sockets, in a thread: it answers as the request's `behaviour` says, right or not."""

import asyncio
import json
import threading
from typing import Any

BREATH_S = 0.002


class FakeServer:
    """Tokens are "a", "b", ... for each answer; a context manager.

    Attributes:
      url: where.
      most_at_once: requests that were being answered at the same time, at the most.
      num_connections: that were made.
      bodies: of the requests, in order of arrival.
    """

    def __init__(self) -> None:
        self.most_at_once = self.num_connections = 0
        self.bodies: list[dict[str, Any]] = []
        self._now = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.num_connections += 1
            tasks.add(asyncio.create_task(self._connection(reader, writer)))

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                lengths = [int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length")]
                body = json.loads(await reader.readexactly(sum(lengths)) or b"{}")
                if method == "GET":
                    self._whole(
                        writer, 200, {"/v1/models": {"data": [{"id": "fake", "owned_by": "nobody"}]}}.get(path, {})
                    )
                    continue
                self.bodies.append(body)
                self._now += 1
                self.most_at_once = max(self.most_at_once, self._now)
                try:
                    if not await self._answer(writer, body):
                        break
                finally:
                    self._now -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> bool:
        """Whether the connection is kept."""
        behaviour, count = body.get("behaviour", ""), body.get("max_tokens", 3)
        text = "".join(chr(97 + i % 26) for i in range(count))
        if behaviour == "busy":
            self._whole(writer, 503, {"error": {"message": "too many", "code": 503}}, retry="retry-after: 1\r\n")
            return True
        if behaviour == "leaky":
            self._whole(writer, 400, {"error": {"message": body["prompt"], "code": 400}})
            return True
        if behaviour == "hangs":
            await asyncio.sleep(60)
        usage = {"prompt_tokens": len(body.get("prompt", "")), "completion_tokens": count}
        usage["total_tokens"] = sum(usage.values())
        if not body.get("stream"):
            await asyncio.sleep(BREATH_S)
            choice = {"index": 0, "text": text, "finish_reason": "length"}
            self._whole(writer, 200, {"choices": [choice], "usage": usage})
            return True
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for index, letter in enumerate(text if behaviour != "differs" else text.upper()):
            await asyncio.sleep(BREATH_S)
            end = "length" if index == count - 1 else None
            self._event(writer, {"choices": [{"index": 0, "text": letter, "finish_reason": end}]})
            if behaviour == "cut off":
                return False
            if behaviour == "fails":
                self._event(writer, {"error": {"message": "it broke", "code": 500}})
                break
            await writer.drain()
        self._event(writer, {"choices": [], "usage": usage})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        return True

    @staticmethod
    def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        data = f"data: {json.dumps(event)}\n\n".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    @staticmethod
    def _whole(writer: asyncio.StreamWriter, status: int, body: dict[str, Any], retry: str = "") -> None:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\n{retry}content-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
