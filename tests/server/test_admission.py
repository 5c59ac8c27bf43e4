"""Places are given back before answers end; the server ends after them."""

import asyncio
import json
from typing import Any

import pytest

from jpaged.server import Server, ServerConfig
from jpaged.server.admission import Admission
from jpaged.server.api_error import ApiError
from jpaged.server.keys import ANYBODY
from tests.server.fake_client import FakeClient


def test_a_place_that_was_left_is_free_and_its_answer_is_waited_for() -> None:
    async def main() -> None:
        admission = Admission(max_requests=1, max_requests_per_key=None)
        with admission.place(ANYBODY) as place:
            with pytest.raises(ApiError, match="too many requests"), admission.place(ANYBODY):
                pass
            place.leave()
            assert admission.num_sequences == 0
            with admission.place(ANYBODY):
                assert admission.num_sequences == 1
            waiting = asyncio.ensure_future(admission.wait_empty())
            await asyncio.sleep(0)
            assert not waiting.done()  # the end of an answer is still being sent
        await waiting

    asyncio.run(main())


def test_who_does_not_read_a_stream_keeps_the_place(tokenizer) -> None:
    """An empty piece, for which the client is waited for, comes before the last one, for which it is not counted."""

    async def main() -> list[bool]:
        app = Server(ServerConfig(models=("tiny",), max_requests=1), FakeClient(tokenizer), tokenizer)
        holds_place: list[bool] = []
        bodies = [json.dumps({"prompt": "ab", "max_tokens": 4, "stream": True}).encode()]

        async def receive() -> dict[str, Any]:
            if not bodies:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                holds_place.append(app.admission.num_sequences == 1)

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
        }
        await app(scope | {"headers": [(b"content-type", b"application/json")]}, receive, send)
        app.close()
        return holds_place

    *begun, last = asyncio.run(main())
    assert len(begun) > 1
    assert all(begun)
    assert not last
