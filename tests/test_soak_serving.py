"""The soak over HTTP: it must find what is wrong with a server; and servers as processes that scripts start."""

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jpaged.errors import ConfigError
from scripts.serving.cpu_time import CpuMeter, cpu_s, process_tree
from scripts.serving.http_client import HttpClient
from scripts.serving.server_process import is_fault, spawned
from scripts.serving.soak_case import SECRET, Case, random_case
from scripts.serving.soak_client import FaultError, joined, serve_case
from tests.fake_openai_server import FakeServer


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


def serve(server: FakeServer, *, refused: tuple[int, ...] = (), **more: Any) -> str:
    fields = {name: more.pop(name) for name in ("leaves", "leaves_after", "twice") if name in more}
    case = Case("completions", {"prompt": "ab", "max_tokens": 4, **more}, None, refused, **fields)

    async def run() -> str:
        client = HttpClient(server.url)
        try:
            return await serve_case(client, case, "name")
        finally:
            client.close()

    return asyncio.run(run())


# Clients


def test_good_answers_are_good(server: FakeServer) -> None:
    assert serve(server) == "answered"
    assert serve(server, stream=True) == "answered"
    assert serve(server, twice=True) == "compared"
    assert serve(server, behaviour="busy") == "told to come again (503)"
    assert server.bodies[-1]["request_id"] == "name"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"twice": True, "behaviour": "differs"}, "streamed"),
        ({"stream": True, "behaviour": "fails"}, "failed in the stream"),
        ({"refused": (400,)}, "answered, expected status"),
        ({"behaviour": "leaky", "prompt": SECRET, "refused": (400,)}, "with the prompt in it"),
        ({"behaviour": "leaky"}, "expected 200"),
    ],
)
def test_faults_are_found(server: FakeServer, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(FaultError, match=words):
        serve(server, **fields)


def test_a_stream_that_is_cut_off_is_an_error(server: FakeServer) -> None:
    with pytest.raises(ConnectionError):
        serve(server, stream=True, behaviour="cut off")


def test_clients_leave_when_they_are_told_to(server: FakeServer) -> None:
    before = len(server.bodies)
    assert serve(server, leaves="sending", leaves_after=5.0) == "left while sending"
    assert serve(server, leaves="waiting", leaves_after=0.05, behaviour="hangs") == "left while waiting"
    assert serve(server, leaves="reading", leaves_after=2.0, stream=True, max_tokens=500) == "left while reading"
    assert len(server.bodies) == before + 2  # the first one never came whole


def test_pieces_after_the_end_are_a_fault() -> None:
    piece = {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}
    with pytest.raises(FaultError, match="after the end"):
        joined([piece, piece])


def test_random_cases_are_many_kinds_and_come_again_with_their_seed() -> None:
    first, second = (
        [random_case(rng, structured=True) for _ in range(800)] for rng in (random.Random(0), random.Random(0))
    )
    assert first == second
    kinds = Counter((case.endpoint, bool(case.refused), case.leaves, case.stream) for case in first)
    assert {leaves for _, _, leaves, _ in kinds} == {None, "sending", "waiting", "reading"}
    assert {status for case in first for status in case.refused} == {400, 401, 404, 413}
    assert sum(case.twice for case in first) > 40
    only = [random_case(random.Random(i), structured=False, only_twice=True) for i in range(50)]
    assert all(case.twice and not case.refused and case.leaves is None for case in only)
    assert json.loads(only[0].data("x", stream=True))["stream_options"] == {"include_usage": True}


# Processes


def test_cpu_time_of_a_child_is_counted() -> None:
    with subprocess.Popen([sys.executable, "-c", "i = 0\nwhile True: i += 1"], stdout=subprocess.DEVNULL) as child:
        try:
            meter = CpuMeter(os.getpid())
            before = cpu_s(child.pid)
            while cpu_s(child.pid) < before + 0.03:
                time.sleep(0.01)
            assert child.pid in process_tree(os.getpid())
            assert sum(meter.spent_s().values()) >= 0.03
        finally:
            child.kill()


def test_a_server_that_does_not_start_is_quoted(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"ended with status 3.*\n.*no weights"),
        spawned("python -c \"print('no weights'); raise SystemExit(3)\"", "http://127.0.0.1:9", tmp_path / "log"),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="cannot be started"),
        spawned("no-such", "http://127.0.0.1:9", tmp_path / "log"),
    ):
        pass


def test_a_server_runs_while_the_block_does(tmp_path: Path, server: FakeServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "health").write_text("")
    command = f"python -m http.server {port} --bind 127.0.0.1 --directory {tmp_path}"
    with spawned(command, f"http://127.0.0.1:{port}", tmp_path / "log") as running:
        assert running.process.poll() is None
        assert running.faults() == []
    assert running.process.poll() is not None
    with pytest.raises(ConfigError, match="something answers"), spawned("python", server.url, tmp_path / "log"):
        pass


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("listening at http://127.0.0.1:8000", False),
        ('{"level": "warning", "message": "ending requests"}', False),
        ('{"level": "error", "message": "a request failed"}', True),
        ('{"level": ', True),
        ("RuntimeWarning: coroutine 'x' was never awaited", True),
        ("Task exception was never retrieved", True),
    ],
)
def test_faults_of_a_log_are_found(line: str, fault: bool) -> None:
    assert is_fault(line) is fault
