"""The flood that is measured is a flood, and `/health` is asked meanwhile."""

import asyncio
import json
from collections import Counter
from types import SimpleNamespace

from scripts.serving import flood
from scripts.serving.http_client import HttpClient


def test_who_has_no_answer_in_time_leaves_and_is_counted(server, monkeypatch) -> None:
    bodies = [json.dumps({"prompt": "ab", "max_tokens": 1}).encode()] * 5
    made: list[asyncio.Timeout] = []
    given: list[float | None] = []

    def timeout(delay: float | None) -> asyncio.Timeout:
        given.append(delay)
        made.append(asyncio.timeout(None))
        return made[-1]

    async def main() -> Counter[str]:
        sending = asyncio.ensure_future(flood._send_all(HttpClient(server.url), "/v1/completions", bodies, 5))
        while server.client.num_live < 5:
            await asyncio.sleep(0.002)
        made[0].reschedule(asyncio.get_running_loop().time())  # that much time has passed, as soon as all are served
        return await sending

    monkeypatch.setattr(flood, "asyncio", SimpleNamespace(**vars(asyncio) | {"timeout": timeout}))
    server.do(server.client.gate.clear)
    try:
        assert asyncio.run(main()) == {"left": 5}
        assert given == [flood.PATIENCE_S]
        server.wait_until(lambda: server.client.num_live == 0)
    finally:
        server.do(server.client.gate.set)


def test_everything_is_sent_and_health_is_asked(server, monkeypatch) -> None:
    monkeypatch.setattr(flood, "BODY_BYTES", 100_000)
    monkeypatch.setattr(flood, "NUM_AT_ONCE", 30)
    asked: list[float] = []

    class Watch:
        """In the place of a process."""

        def __init__(self, url: str) -> None:
            self.url = url

        def __enter__(self) -> "Watch":
            return self

        def __exit__(self, *exception: object) -> None:
            asked.append(server.http.get(f"{self.url}/health").elapsed.total_seconds())

        def figures(self) -> dict:
            return {"asked": len(asked)}

    monkeypatch.setattr(flood, "HealthWatch", Watch)
    figures = flood.measure_flood(server.url, "tiny", headers={}, vocab_size=300)
    statuses = {name: one["statuses"] for name, one in figures.items()}
    assert statuses["nothing"] == {"200": 20}
    assert statuses["27 MB of token ids"] == {"400": 3}  # far too long
    assert statuses["27 MB of text"] == {"200": 1}  # truncated
    assert statuses["30 requests"] == {"400": 30}  # 400 bytes are too long for this model
    assert statuses["30 to /tokenize"] == {"200": 30}
    assert figures["30 to /tokenize"]["health"] == {"asked": len(asked) == 6 and 6}
