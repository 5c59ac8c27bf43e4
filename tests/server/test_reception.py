"""Large and dangerous requests are read elsewhere, and keep nobody waiting."""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.server.door_worker import DoorWorker
from jpaged.server.reception import LARGE_BODY_BYTES
from jpaged.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.server.running import running
from tests.tiny_vocabs import byte_level_metadata

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def test_who_leaves_while_a_request_is_read_keeps_nobody_waiting(start, monkeypatch) -> None:
    """What is read for them ends with the process that reads it, which is stopped here: it would never be done."""
    begun, link_to_process = Event(), DoorWorker._started

    def begin(worker: DoorWorker, left: Event) -> Any:
        link = link_to_process(worker, left)
        begun.set()
        return link

    monkeypatch.setattr(DoorWorker, "_started", begin)
    with start(trust_request_chat_template=True, reading_timeout_s=3600) as server:
        server.http.timeout = None
        others = set(multiprocessing.active_children())

        def reader() -> int:
            content = CHAT | {"chat_template": "{{ messages[0].content }}"}
            assert server.http.post("/tokenize", json=content).json()["count"] == 2
            (process,) = set(multiprocessing.active_children()) - others
            assert process.pid is not None
            return process.pid

        content = json.dumps(CHAT | {"chat_template": "{{ 1 }}"}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        first = reader()
        begun.clear()
        os.kill(first, signal.SIGSTOP)
        try:
            with socket.create_connection(
                ("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=None
            ) as connection:
                connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
                begun.wait()
            while "jpaged:num_requests_at_door 0.0" not in server.http.get("/metrics").text:
                time.sleep(0.01)  # until the server knows that the client has left
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGCONT)
        assert reader() != first


@pytest.mark.parametrize("vocabulary", ["of a folder", "made up", "none"])
def test_large_bodies_go_to_the_worker(tokenizer, vocabulary) -> None:
    """Whatever the model's vocabulary came from: the decoder of JSON would hold up everything else for seconds."""
    made_up = Tokenizer(gguf_vocabulary(byte_level_metadata(), "made up"), "made up")
    made_up.apply_chat_template([{"role": "user", "content": "x"}], chat_template="{{ messages[0].content }}")
    served = {"of a folder": tokenizer, "made up": made_up, "none": None}[vocabulary]

    async def make() -> FakeClient:
        return FakeClient(tokenizer)

    with running(make, served) as server:
        others = set(multiprocessing.active_children())
        assert server.http.post("/tokenize", json={"prompt": "a"}).status_code == (400 if served is None else 200)
        assert set(multiprocessing.active_children()) <= others
        large = LARGE_BODY_BYTES
        for path, field in (("/v1/completions", {"prompt": [3] * large}), ("/tokenize", {"prompt": "x" * large})):
            response = server.http.post(path, json=field)
            assert response.status_code == 400
            words = "maximum context length" if served or path != "/tokenize" else "no tokenizer"
            assert words in response.json()["error"]["message"]
        (worker,) = set(multiprocessing.active_children()) - others
        assert worker.name == "door"
    assert worker not in multiprocessing.active_children(), "it outlived the server"


def test_a_flood_of_requests_is_served(start) -> None:
    """1,280 prompts in 64 requests at once, and a large body beside them; health stays good."""
    with start() as server, ThreadPoolExecutor(17) as pool:
        large = pool.submit(server.http.post, "/v1/completions", json={"prompt": [3] * 10**6})
        asked = [
            pool.submit(server.http.post, "/v1/completions", json={"prompt": ["ab"] * 20, "max_tokens": 2})
            for _ in range(64)
        ]
        assert all(server.http.get("/health").status_code == 200 for _ in range(20))
        assert [one.result().status_code for one in asked] == [200] * 64
        assert large.result().status_code == 400
