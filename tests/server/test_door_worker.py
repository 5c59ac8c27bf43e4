"""A door in another process reads what a door reads, and is ended when it must be."""

import json
import os
import signal
from multiprocessing.context import SpawnProcess
from threading import Event
from typing import Any

import pytest

from jpaged.server.api_error import ApiError
from jpaged.server.body import ClientLeftError
from jpaged.server.door import Door
from jpaged.server.door_worker import DoorWorker
from jpaged.server.parameters import Limits
from jpaged.tokenizer import Tokenizer

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


class Link:
    """A worker's link; something happens when it has been asked for `name`."""

    def __init__(self, link: Any, name: str, happens: Any) -> None:
        self._link, self._name, self._happens = link, name, happens

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            answer = getattr(self._link, name)(*arguments)
            if name == self._name:
                self._happens()
            return answer

        return call


def test_what_was_given_up_before_it_begins_is_not_read(tokenizer) -> None:
    worker, left = DoorWorker(tokenizer, LIMITS, timeout_s=3600), Event()
    worker.give_up(left)
    with pytest.raises(ClientLeftError):
        worker.read("chat", body(**CHAT, chat_template=ENDLESS), left)
    assert worker._running is None


def test_what_is_given_up_while_the_process_starts_is_not_read(tokenizer, monkeypatch) -> None:
    """The process is not known to the worker yet."""
    worker, left, started = DoorWorker(tokenizer, LIMITS, timeout_s=3600), Event(), []
    start = SpawnProcess.start

    def start_and_give_up(process) -> None:
        start(process)
        started.append(process.pid)
        assert worker._running is None
        worker.give_up(left)

    monkeypatch.setattr(SpawnProcess, "start", start_and_give_up)
    with pytest.raises(ClientLeftError):
        worker.read("chat", body(**CHAT, chat_template=ENDLESS), left)
    assert worker._running is None
    (process_id,) = started
    with pytest.raises(ProcessLookupError):  # it is dead, and has been waited for
        os.kill(process_id, 0)


@pytest.mark.parametrize("moment", ["send", "send_bytes", "recv"])
def test_what_is_given_up_ends_and_the_next_call_has_another_process(worker, moment) -> None:
    """While it is read, or as its answer arrives: the process that was killed may still look alive."""
    assert json.loads(worker.read("tokenize", body(prompt="a")))["count"] == 1
    process, link = worker._running
    process_id, left = process.pid, Event()
    worker._running = worker._running._replace(link=Link(link, moment, lambda: worker.give_up(left)))
    if moment == "recv":
        assert json.loads(worker.read("tokenize", body(prompt="abc"), left))["count"] == 3
    else:
        with pytest.raises(ClientLeftError):
            worker.read("chat", body(**CHAT, chat_template=ENDLESS), left)
    assert worker._running is None
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
    assert json.loads(worker.read("tokenize", body(prompt="ab")))["count"] == 2


def test_what_others_wait_for_is_not_given_up(worker) -> None:
    assert json.loads(worker.read("tokenize", body(prompt="a")))["count"] == 1
    process, link = worker._running
    worker._running = worker._running._replace(link=Link(link, "send", lambda: worker.give_up(Event())))
    assert json.loads(worker.read("tokenize", body(prompt="ab"), Event()))["count"] == 2
    assert worker._running.process is process
    worker._running = worker._running._replace(link=link)


@pytest.mark.parametrize(("ending", "status"), [(signal.SIGABRT, 400), (signal.SIGKILL, 503)])
def test_whose_fault_it_is_that_a_worker_dies(worker, ending, status) -> None:
    """The tokenizer aborts where there is no memory for what it makes: to send the same again would not help."""
    assert json.loads(worker.read("tokenize", body(prompt="a")))["count"] == 1
    process, link = worker._running

    class Dying:
        """The link to a process that ends before it answers."""

        def send(self, endpoint) -> None:
            os.kill(process.pid, ending)
            link.send(endpoint)

        def __getattr__(self, name):
            return getattr(link, name)

    worker._running = worker._running._replace(link=Dying())
    with pytest.raises(ApiError) as caught:
        worker.read("tokenize", body(prompt="a"))
    assert (caught.value.status, caught.value.retry_after_s) == (status, 1 if status == 503 else None)


def test_a_worker_that_dies_is_replaced(worker) -> None:
    assert json.loads(worker.read("tokenize", body(prompt="a")))["count"] == 1
    worker._running.process.kill()
    worker._running.process.join()
    assert json.loads(worker.read("tokenize", body(prompt="ab")))["count"] == 2
