"""Large and dangerous requests are read elsewhere, and keep nobody waiting."""

import json
import multiprocessing
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.server.api_error import ApiError
from jpaged.server.door import Door
from jpaged.server.door_worker import DoorWorker
from jpaged.server.parameters import Limits
from jpaged.server.reception import LARGE_BODY_BYTES
from jpaged.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.server.running import running
from tests.tiny_vocabs import byte_level_metadata

LIMITS = Limits(
    models=("tiny",),
    vocab_size=300,
    max_model_len=256,
    max_logprobs=5,
    max_n=8,
    max_prompts=2000,
    trusts_templates=True,
)
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ENDLESS = "{% for i in range(90000) %}{{ ('a' * 16000000).replace('a', 'b') | length }}{% endfor %}"


@pytest.fixture(scope="module")
def worker(tokenizer: Tokenizer):
    worker = DoorWorker(tokenizer, LIMITS, timeout_s=60)
    yield worker
    worker.close()


def body(**fields) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("completions", {"prompt": ["abc", "d"], "n": 2, "stop": "x", "logit_bias": {"1": 2}, "stream": True}),
        ("chat", CHAT | {"chat_template": "{{ messages[0].content }}", "response_format": {"type": "json_object"}}),
        ("tokenize", {"prompt": "abc"}),
        ("detokenize", {"tokens": [100]}),
    ],
)
def test_a_worker_reads_what_a_door_reads(worker, tokenizer, endpoint, fields) -> None:
    assert worker.read(endpoint, body(**fields)) == Door(tokenizer, LIMITS).read(endpoint, body(**fields))


def test_a_worker_refuses_what_a_door_refuses(worker) -> None:
    with pytest.raises(ApiError) as caught:
        worker.read("completions", body(prompt="a", top_p=7))
    assert (caught.value.status, caught.value.param) == (400, "top_p")
    assert caught.value.message == "top_p is 7, expected a number in (0, 1]"


def test_a_template_that_takes_all_memory_is_stopped(worker) -> None:
    text = "{{ 'a'.center(8000000000) }}"
    with pytest.raises(ApiError, match=r"MemoryError|too much memory"):
        worker.read("chat", body(**CHAT, chat_template=text))
    assert json.loads(worker.read("tokenize", body(prompt="a")))["count"] == 1


def test_a_worker_that_takes_too_long_is_replaced(tokenizer) -> None:
    worker = DoorWorker(tokenizer, LIMITS, timeout_s=0.2)
    try:
        loop = "{% for i in range(2000) %}{{ ('a' * 16000000).replace('a', 'b') | length }}{% endfor %}"
        with pytest.raises(ApiError, match=r"takes longer than 0\.2 s"):
            worker.read("chat", body(**CHAT, chat_template=loop))
        worker._timeout_s = 60.0  # the next one may take as long as a busy machine makes it take
        assert json.loads(worker.read("tokenize", body(prompt="a")))["count"] == 1
    finally:
        worker.close()


def test_a_worker_gives_up_what_nobody_waits_for_and_nothing_else(worker) -> None:
    endless = body(**CHAT, chat_template=ENDLESS)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(worker.read, "chat", endless)
        while worker._body is not endless:
            time.sleep(0.001)
        worker.give_up(bytes(bytearray(endless)))  # an equal one, of somebody else
        assert not reading.done()
        while not reading.done():  # at any moment, be the process starting or reading
            worker.give_up(endless)
            time.sleep(0.001)
        with pytest.raises(ApiError, match="ended"):
            reading.result()
    worker.give_up(endless)
    assert json.loads(worker.read("tokenize", body(prompt="ab")))["count"] == 2


def test_who_leaves_while_a_request_is_read_keeps_nobody_waiting(start) -> None:
    with start(trust_request_chat_template=True, reading_timeout_s=3600) as server:
        content = body(**CHAT, chat_template=ENDLESS)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20) as connection:
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
            while "jpaged:num_requests_at_door 1.0" not in server.http.get("/metrics").text:
                time.sleep(0.01)
        answer = server.http.post("/tokenize", json=CHAT | {"chat_template": "{{ messages[0].content }}"})
        assert answer.json()["count"] == 2


@pytest.mark.parametrize(("ending", "status"), [(signal.SIGABRT, 400), (signal.SIGKILL, 503)])
def test_whose_fault_it_is_that_a_worker_dies(worker, ending, status) -> None:
    """The tokenizer aborts where there is no memory for what it makes: to send the same again would not help."""
    assert json.loads(worker.read("tokenize", body(prompt="a")))["count"] == 1
    link, process = worker._link, worker._process

    class Dying:
        """The link to a process that ends before it answers."""

        def send(self, endpoint) -> None:
            os.kill(process.pid, ending)
            link.send(endpoint)

        def __getattr__(self, name):
            return getattr(link, name)

    worker._link = Dying()
    with pytest.raises(ApiError) as caught:
        worker.read("tokenize", body(prompt="a"))
    assert (caught.value.status, caught.value.retry_after_s) == (status, 1 if status == 503 else None)


def test_a_worker_that_dies_is_replaced(worker) -> None:
    assert json.loads(worker.read("tokenize", body(prompt="a")))["count"] == 1
    worker._process.kill()
    worker._process.join()
    assert json.loads(worker.read("tokenize", body(prompt="ab")))["count"] == 2


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
