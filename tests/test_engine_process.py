"""The engine's process serves, fails, crashes, is killed, loses its client: what each side sees, and what follows."""

import asyncio
import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from jpaged.async_engine import AsyncEngine
from jpaged.engine_host import ORPHANED
from jpaged.engine_process import EngineProcess, EngineRecipe
from jpaged.errors import EngineFailedError, JpagedError, RequestError
from jpaged.request import SamplingParams
from jpaged.restarts import RestartPolicy
from tests.client_driver import read, run, text_of, tokens_of, until
from tests.fake_engine import count_frozen_and_arenas, hang, modules, process_id, unpicklable, warn

FEW = SamplingParams(max_tokens=2)
LONG = SamplingParams(max_tokens=90_000)  # longer than any test


def process(policy: RestartPolicy | None = None, **options) -> EngineProcess:
    recipe = EngineRecipe(maker="tests.fake_engine:make", options=options)
    return EngineProcess(recipe, restarts=policy, retry_s=0.01)


class Elsewhere:
    """Pickles as a function that the engine's process cannot import."""

    def __reduce__(self):
        return __import__, ("no_such_module",)

    def __call__(self, engine):
        raise AssertionError


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_it_serves_without_jax_in_either_process():
    async def main():
        port = process()
        async with AsyncEngine(port) as client:
            assert client.info.process_id == port.process_id != os.getpid()
            streams = [await client.stream([i, 1], SamplingParams(max_tokens=i + 1)) for i in range(20)]
            outputs = [await client.generate([i, 1], SamplingParams(max_tokens=i + 1)) for i in range(20)]
            for stream, output in zip(streams, outputs, strict=True):
                deltas = await read(stream)
                assert (text_of(deltas), tuple(tokens_of(deltas))) == (output.text, output.token_ids)
                assert stream.timing is not None
                assert stream.timing.e2e_s < 60  # one monotonic clock serves both processes
            with pytest.raises(RequestError, match="vocabulary"):
                await client.stream([100], FEW)
            assert (await client.report()).finished == {"length": 40}
            assert len((await client.picture()).states) == 64
            assert await client.call(process_id) == port.process_id
            assert await client.call(modules) == []
            with pytest.raises(JpagedError, match="cannot be sent to this process"):
                await client.call(unpicklable)
            with pytest.raises((AttributeError, TypeError)):
                await client.call(lambda engine: None)  # which does not pickle
            with pytest.raises(JpagedError, match="ModuleNotFoundError"):
                await client.call(Elsewhere())
            assert (await client.generate([3], FEW)).token_ids == (3, 4)
            pid = port.process_id
        assert port.process_id is None
        assert is_gone(pid)

    run(main())


def test_an_engine_that_cannot_be_made_says_why():
    async def main():
        client = AsyncEngine(process(fails="start"))
        with pytest.raises(RequestError, match="no such model"):  # as it was raised there
            await client.start()
        assert (client.state, client.failure) == ("dead", "no such model")
        await client.close()
        client = AsyncEngine(process(nonsense=1))
        with pytest.raises(EngineFailedError, match=r"TypeError: .*nonsense"):
            async with client:
                pass

    run(main())


def test_a_failed_step_restarts_the_engine_and_a_crash_the_process():
    async def main():
        port = process(fails="step", step_s=0.001)
        async with AsyncEngine(port) as client:
            first = port.process_id
            stream = await client.stream([1], LONG)
            with pytest.raises(EngineFailedError, match="OSError: device lost"):
                await client.generate([66], FEW)
            with pytest.raises(EngineFailedError, match="device lost"):
                await read(stream)
            await until(lambda: client.alive)
            assert port.process_id == first
            stream = await client.stream([1], LONG)
            os.kill(first, signal.SIGKILL)
            with pytest.raises(EngineFailedError, match="the engine's process ended"):
                await read(stream)
            assert client.state == "restarting"
            await until(lambda: client.alive)
            assert client.info.process_id == port.process_id != first
            assert (await client.generate([3], FEW)).token_ids == (3, 4)
            assert (await client.report()).num_restarts == 2

    run(main())


def test_too_many_crashes_are_final():
    async def main():
        async with AsyncEngine(process(RestartPolicy(max_restarts=1), fails="crash")) as client:
            for _ in range(2):
                await until(lambda: client.alive)
                with pytest.raises(EngineFailedError):
                    await client.generate([66], FEW)
            await until(lambda: client.state == "dead")
            assert client.failure == "the engine's process ended with status 9"

    run(main())


def test_a_process_that_cannot_be_started_is_tried_again_ever_later_and_then_final(monkeypatch):
    waits = []

    def no_more(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    async def main():
        port = process(RestartPolicy(max_restarts=3))
        engine = AsyncEngine(port)
        async with engine:
            nap = asyncio.sleep
            monkeypatch.setattr(subprocess, "Popen", no_more)
            monkeypatch.setattr("jpaged.engine_process.asyncio.sleep", lambda s: waits.append(s) or nap(0))
            os.kill(port.process_id, signal.SIGKILL)
            await asyncio.wait_for(asyncio.shield(port._watcher), 20)
            with pytest.raises(EngineFailedError, match="cannot be started: Too many open files"):
                await engine.report()
            monkeypatch.undo()

    run(main())
    assert waits == [0.01, 0.02, 0.04]


@pytest.mark.parametrize(
    ("fails", "ask", "what"),
    [
        ("hang", lambda client: client.generate([66], FEW), "step"),
        ("restart", lambda client: client.generate([66], FEW), "restart"),
        ("", lambda client: client.call(hang), "call"),
    ],
)
def test_what_does_not_end_counts_as_a_crash(fails, ask, what):
    async def main():
        recipe = EngineRecipe(maker="tests.fake_engine:make", options={"fails": fails})
        port = EngineProcess(recipe, hang_s=0.5, retry_s=0.01)  # what ends must not be late on a busy machine
        async with AsyncEngine(port) as client:
            port._boot = port._boot._replace(hang_s=60.0)  # the next process does nothing that hangs
            first = port.process_id
            with pytest.raises(
                EngineFailedError, match="device lost" if what == "restart" else f"a {what} did not end"
            ):
                await ask(client)
            await until(lambda: port.process_id not in (None, first) and client.alive)
            assert (await client.generate([3], FEW)).token_ids == (3, 4)

    run(main())


def test_an_engine_that_is_still_being_made_is_not_waited_for_at_the_end():
    async def main():
        recipe = EngineRecipe(maker="tests.fake_engine:make", options={"fails": "load"})
        port = EngineProcess(recipe, stop_s=1e6)
        client = AsyncEngine(port)
        starting = asyncio.create_task(client.start())
        await until(lambda: port.process_id is not None)
        await client.close()
        assert port.process_id is None
        starting.cancel()

    run(main())


def test_a_process_that_is_stopped_counts_as_a_crash():
    """Its own watchdog is stopped with it."""

    async def main():
        port = process(step_s=0.001)
        port._silence_s = 8.0  # a look a second
        async with AsyncEngine(port) as client:
            first = port.process_id
            stream = await client.stream([1], LONG)
            os.kill(first, signal.SIGSTOP)
            port._silence_s = 0.8
            with pytest.raises(EngineFailedError, match=r"gave no sign of life for 0\.8 s"):
                await read(stream)
            port._silence_s = 60.0  # the next process is not stopped, however late it comes to speak
            await until(lambda: port.process_id not in (None, first) and client.alive)
            assert is_gone(first)
            assert (await client.generate([3], FEW)).token_ids == (3, 4)

    run(main())


def test_an_idle_process_gives_signs_of_life():
    async def main():
        port = EngineProcess(EngineRecipe(maker="tests.fake_engine:make"), hang_s=0.2)
        async with AsyncEngine(port) as client:
            first = port.process_id
            for _ in range(3):
                port._num_silent = 1  # a look found none
                await until(lambda: port._num_silent == 0)
            assert (client.alive, port.process_id) == (True, first)

    run(main())


def test_an_engine_whose_making_does_not_end_is_given_up():
    async def main():
        recipe = EngineRecipe(maker="tests.fake_engine:make", options={"fails": "load"})
        client = AsyncEngine(EngineProcess(recipe, load_s=0.1))
        with pytest.raises(EngineFailedError, match=r"making the engine did not end within 0\.1 s"):
            await client.start()
        await client.close()

    run(main())


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="needs glibc")
def test_it_keeps_no_memory_that_it_does_not_use(monkeypatch):
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)

    async def main():
        async with AsyncEngine(process()) as client:
            num_frozen, num_arenas = await client.call(count_frozen_and_arenas)
            assert num_frozen > 10_000
            assert num_arenas == 1

    run(main())


def test_its_log_is_set_up_as_it_is_told(capfd):
    async def main():
        recipe = EngineRecipe(
            maker="tests.fake_engine:make",
            prepare="jpaged.server.log:set_up_logging",
            prepare_options={"level": "warning"},
        )
        async with AsyncEngine(EngineProcess(recipe)) as client:
            await client.call(warn)

    run(main())
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(line["level"], line["logger"]) for line in lines] == [
        ("warning", "jpaged.test"),
        ("warning", "py.warnings"),
    ]
    assert "from a library" in lines[1]["message"]


def test_a_process_whose_client_ended_before_its_first_word_ends_in_silence():
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        command = [sys.executable, "-m", "jpaged.engine_host", f"{theirs.fileno()}"]
        done = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (ORPHANED, "")


def test_a_process_that_hangs_is_killed_at_the_end():
    async def main():
        recipe = EngineRecipe(maker="tests.fake_engine:make", options={"fails": "hang"})
        port = EngineProcess(recipe, stop_s=0.2)
        async with AsyncEngine(port) as client:
            pid = port.process_id
            stream = await client.stream([66], FEW)
            await anext(stream)  # it hangs after its first token
        with pytest.raises(EngineFailedError, match="was closed"):
            await read(stream)
        assert is_gone(pid)

    run(main())


def test_signals_to_the_whole_group_do_not_cut_off_what_is_drained():
    async def main():
        port = process(step_s=0.001)
        async with AsyncEngine(port) as client:
            stream = await client.stream([1], SamplingParams(max_tokens=200))
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(port.process_id, number)
            assert len(tokens_of(await read(stream))) == 200

    run(main())


ORPHAN = """
import asyncio, os, sys
from jpaged.async_engine import AsyncEngine
from jpaged.engine_host import ORPHANED
from jpaged.engine_process import EngineProcess, EngineRecipe

async def main():
    port = EngineProcess(EngineRecipe(maker="tests.fake_engine:make", options={"fails": "hang"}))
    async with AsyncEngine(port) as client:
        stream = await client.stream([66])
        await anext(stream)  # it hangs after its first token
        print(port.process_id, "jax" in sys.modules, flush=True)
        await anext(stream)

asyncio.run(main())
"""


def test_the_engine_ends_with_its_client_even_in_the_middle_of_a_step():
    client = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    with contextlib.closing(client.stdout):
        pid, has_jax = client.stdout.readline().split()
        client.kill()
        client.wait()
    assert has_jax == "False"
    end = time.monotonic() + 30
    while not is_gone(int(pid)):
        assert time.monotonic() < end
        time.sleep(0.01)
