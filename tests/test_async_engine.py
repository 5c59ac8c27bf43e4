"""What a client sees of an engine in a thread: streams, refusals, aborts, pauses, failures and the end."""

import asyncio
import threading
import time

import pytest

from jpaged.async_engine import AsyncEngine
from jpaged.engine_client import EngineClient
from jpaged.engine_thread import EngineThread
from jpaged.errors import EngineFailedError, JpagedError, PromptTooLongError, RequestError
from jpaged.request import SamplingParams
from jpaged.restarts import RestartPolicy
from tests.client_driver import read, run, text_of, tokens_of, until
from tests.fake_engine import MAX_LEN, FakeEngine, make, process_id

LONG = SamplingParams(max_tokens=90_000)  # longer than any test


def few(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def serving(engine: FakeEngine, policy: RestartPolicy | None = None) -> AsyncEngine:
    return AsyncEngine(EngineThread(engine, restarts=policy))


def test_streams_and_whole_answers_are_the_same():
    async def main():
        async with serving(FakeEngine()) as client:
            served: EngineClient = client  # pyright checks that it is one
            assert served.alive
            assert served.info.max_model_len == MAX_LEN
            streams = [await client.stream([i, 1], few(i + 1)) for i in range(20)]
            outputs = [await client.generate([i, 1], few(i + 1)) for i in range(20)]
            for stream, output in zip(streams, outputs, strict=True):
                deltas = await read(stream)
                assert (text_of(deltas), tuple(tokens_of(deltas))) == (output.text, output.token_ids)
                assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
                assert (stream.num_cached_tokens, stream.error) == (output.num_cached_tokens, None)
                assert stream.timing is not None
                assert stream.timing.e2e_s >= 0
            assert client.num_live == 0

    run(main())


def test_a_slow_reader_gets_all_in_few_lists():
    async def main():
        async with serving(FakeEngine()) as client:
            stream = await client.stream([1], few(500))
            await until(lambda: stream.timing)
            first = await anext(stream)
            assert len(first) == 500
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    run(main())


def test_what_is_sent_arrives():
    async def main():
        engine = FakeEngine()
        async with serving(engine) as client:
            await client.generate([1], few(1), request_id="a", priority=3, cache_salt="s", arrival_s=4.5)
            await client.generate((1, 2), None, request_id="b")
        assert engine.about["a"] == {"priority": 3, "cache_salt": "s", "arrival_s": 4.5}
        assert engine.about["b"]["arrival_s"] == pytest.approx(time.monotonic(), abs=30)

    run(main())


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([1, 100], RequestError, "outside of the vocabulary"),
        ([1] * MAX_LEN, PromptTooLongError, "1000 tokens are too many"),
        ([13], JpagedError, r"an internal error \(KeyError\); the engine goes on"),
        ("text", RequestError, "list of token ids, got str"),
        ([1.5], RequestError, "list of token ids, got list"),
        ([True], RequestError, "list of token ids, got list"),
        ([2**63], RequestError, "list of token ids, got list"),
        (None, RequestError, "list of token ids, got NoneType"),
    ],
)
def test_what_is_refused_is_refused_at_once_and_the_next_is_served(prompt, error, message, caplog):
    async def main():
        async with serving(FakeEngine()) as client:
            for begin in (client.stream, client.generate):
                with pytest.raises(error, match=message):
                    await begin(prompt, few(2))
            assert client.num_live == 0
            assert (await client.generate([1], few(2))).token_ids == (1, 2)

    run(main())
    assert "thirteen" not in caplog.text  # what the engine says of an internal error may quote a prompt


def test_ids_are_unique_among_live_requests_only():
    async def main():
        async with serving(FakeEngine(step_s=0.001)) as client:
            stream = await client.stream([1], LONG, request_id="a")
            with pytest.raises(RequestError, match="'a' is still being served"):
                await client.generate([2], request_id="a")
            with pytest.raises(RequestError, match="expected a non-empty string"):
                await client.generate([2], request_id="")
            await stream.aclose()
            again = await client.stream([5], few(2), request_id="a")  # events of the old one may still come
            assert tokens_of(await read(again)) == [5, 6]
            await client.generate([2], few(1), request_id="7")
            for _ in range(10):
                await client.generate([2], few(1))

    run(main())


def test_who_leaves_is_aborted():
    async def main():
        engine = FakeEngine(step_s=0.001)
        async with serving(engine) as client:
            stream = await client.stream([1], LONG)
            waiting = asyncio.create_task(client.generate([2], LONG))
            await anext(stream)
            await until(lambda: len(engine.live) == 2)
            waiting.cancel()
            await stream.aclose()
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await until(lambda: not engine.live)
            assert client.num_live == 0
            left = asyncio.create_task(client.stream([3], LONG))  # leaves before it is taken
            await asyncio.sleep(0)
            left.cancel()
            await asyncio.wait([left])
            await until(lambda: not engine.live)
            report = await client.report()
            assert report.finished == {"abort": 3}

    run(main())


def test_aborted_requests_end_with_what_they_have():
    async def main():
        async with serving(FakeEngine(step_s=0.001)) as client:
            stream = await client.stream([1], LONG, request_id="a")
            whole = asyncio.create_task(client.generate([2], LONG, request_id="b"))
            other = asyncio.create_task(client.generate([3], few(50), request_id="c"))
            await asyncio.sleep(0)
            assert await client.abort(["a", "b", "nobody", "a"]) == 2
            assert (await read(stream))[-1].finish_reason == "abort"
            output = await whole
            assert output.finish_reason == "abort"
            assert output.token_ids[:1] in ((), (2,))
            assert (await other).finish_reason == "length"
            stream = await client.stream([1], LONG)
            for wrong in ("b", [["b"]], [None]):
                with pytest.raises(RequestError, match="request_ids"):
                    await client.abort(wrong)
            assert await client.abort() == 1
            assert (await read(stream))[-1].finish_reason == "abort"
            assert await client.abort() == 0

    run(main())


def test_pause_keeps_aborts_or_waits():
    async def main():
        engine = FakeEngine(step_s=0.001)
        async with serving(engine) as client:
            stream = await client.stream([1], few(300))
            await client.pause("keep", clear_cache=False)
            assert (client.is_paused, client.alive, engine.num_resets) == (True, True, 0)
            queued = await client.stream([2], few(2))  # it is taken, and waits
            steps = engine.num_steps
            await asyncio.sleep(0.05)
            assert engine.num_steps == steps
            assert (await client.report()).is_paused
            await client.resume()
            assert tokens_of(await read(queued)) == [2, 3]
            assert len(tokens_of(await read(stream))) == 300

            stream = await client.stream([1], LONG)
            await client.pause()
            assert (await read(stream))[-1].finish_reason == "abort"
            assert engine.num_resets == 1
            await client.resume()

            stream = await client.stream([1], few(100))
            pausing = asyncio.create_task(client.pause("wait"))
            await asyncio.sleep(0)
            late = asyncio.create_task(client.generate([2], few(3)))
            bad = asyncio.create_task(client.stream([100], few(3)))
            left = asyncio.create_task(client.stream([4], few(3), request_id="left"))
            await pausing
            assert len(tokens_of(await read(stream))) == 100
            with pytest.raises(RequestError, match="vocabulary"):
                await bad
            await left
            await client.abort(["left"])
            await asyncio.sleep(0.02)
            assert not late.done()
            await client.resume()
            await client.resume()
            assert (await late).token_ids == (2, 3, 4)
            with pytest.raises(RequestError, match="expected one of keep, wait, abort"):
                await client.pause("stop")  # pyright: ignore[reportArgumentType]

    run(main())


def test_a_pause_that_waits_can_be_taken_back():
    async def main():
        async with serving(FakeEngine(step_s=0.001)) as client:
            stream = await client.stream([1], LONG)
            pausing = asyncio.create_task(client.pause("wait"))
            held = asyncio.create_task(client.generate([2], few(2)))
            aborted = asyncio.create_task(client.generate([3], few(2), request_id="x"))
            await asyncio.sleep(0.02)
            assert not held.done()
            with pytest.raises(RequestError, match="about to be paused"):
                await client.pause("keep")
            await client.abort(["x"])
            assert (await aborted).finish_reason == "abort"
            await client.resume()
            with pytest.raises(RequestError, match="resumed before it paused"):
                await pausing
            assert not client.is_paused
            assert (await held).token_ids == (2, 3)
            await stream.aclose()

    run(main())


def test_questions():
    async def main():
        engine = FakeEngine(step_s=0.001)
        async with serving(engine) as client:
            stream = await client.stream([1, 2], LONG, request_id="me")
            await anext(stream)
            picture = await client.picture()
            assert [request.request_id for request in picture.requests] == ["me"]
            assert picture.requests[0].status == "decode"
            await client.reset_prefix_cache()
            assert engine.num_resets == 1
            assert await client.call(process_id) == client.info.process_id
            with pytest.raises(JpagedError, match="ZeroDivisionError"):
                await client.call(lambda engine: 1 / 0)
            report = await client.report()
            assert (report.stats.num_running, report.num_restarts, report.is_paused) == (1, 0, False)
            assert report.histograms["e2e_request_latency_seconds"].count == 0
            await stream.aclose()

    run(main())


def test_a_failed_step_fails_all_and_the_engine_restarts():
    async def main():
        engine = make(fails="step", step_s=0.001)
        async with serving(engine) as client:
            stream = await client.stream([1], LONG)
            whole = asyncio.create_task(client.generate([2], LONG))
            received = await anext(stream)
            assert received
            with pytest.raises(EngineFailedError, match="OSError: device lost"):
                await client.generate([66], few(2))
            with pytest.raises(EngineFailedError, match="device lost"):
                await read(stream)
            with pytest.raises(EngineFailedError, match="device lost"):
                await whole
            assert client.num_live == 0
            await until(lambda: client.alive)
            assert client.failure is None
            assert (await client.generate([3], few(2))).token_ids == (3, 4)
            assert (await client.report()).num_restarts == engine.num_restarts == 1

    run(main())


def test_too_many_failures_are_final():
    async def main():
        client = serving(make(fails="step"), RestartPolicy(max_restarts=1, window_s=600))
        async with client:
            for _ in range(2):
                await until(lambda: client.alive)
                with pytest.raises(EngineFailedError, match="device lost"):
                    await client.generate([66], few(2))
            await until(lambda: client.state == "dead")
            assert not client.alive
            assert client.failure is not None
            assert "device lost" in client.failure
            with pytest.raises(EngineFailedError, match=r"the engine is dead: .*device lost"):
                await client.stream([1])
            with pytest.raises(EngineFailedError, match="the engine is dead"):
                await client.report()
        assert client.state == "closed"

    run(main())


def test_a_restart_that_fails_counts_as_one():
    engine = make(fails="step")
    tries = iter([True, False])

    def restart():
        if next(tries):
            raise MemoryError("no room")
        FakeEngine.restart(engine)

    engine.restart = restart

    async def main():
        async with serving(engine, RestartPolicy(max_restarts=2)) as client:
            with pytest.raises(EngineFailedError):
                await client.generate([66], few(2))
            await until(lambda: client.alive)
            assert (await client.generate([3], few(2))).token_ids == (3, 4)

    run(main())


def test_closing_fails_what_lives_and_leaves_the_engine_usable():
    async def main():
        engine = FakeEngine(step_s=0.001)
        client = serving(engine)
        with pytest.raises(EngineFailedError, match="not ready yet"):
            client.info  # noqa: B018
        with pytest.raises(EngineFailedError, match="the engine is starting"):
            await client.generate([1])
        await client.start()
        with pytest.raises(RuntimeError, match="started before"):
            await client.start()
        stream = await client.stream([1], LONG)
        whole = asyncio.create_task(client.generate([2], LONG))
        await until(lambda: len(engine.live) == 2)
        await client.close()
        await client.close()
        assert client.state == "closed"
        with pytest.raises(EngineFailedError, match="was closed"):
            await read(stream)
        with pytest.raises(EngineFailedError, match="was closed"):
            await whole
        with pytest.raises(EngineFailedError, match="the engine is closed"):
            await client.generate([1])
        await stream.aclose()
        assert not engine.live
        async with serving(engine) as second:
            assert (await second.generate([4], few(1))).token_ids == (4,)

    run(main())


def test_two_tasks_cannot_read_one_stream():
    async def main():
        go = threading.Event()
        # Not in the first step, whose end tells that the engine has taken the request.
        async with serving(FakeEngine(on_step=lambda engine: engine.num_steps == 0 or go.wait(60))) as client:
            stream = await client.stream([1], few(3))
            first = asyncio.create_task(read(stream))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="read by another task"):
                await anext(stream)
            go.set()
            assert tokens_of(await first) == [1, 2, 3]

    run(main())


def test_nothing_is_kept_of_requests_that_ended():
    async def main():
        async with serving(FakeEngine()) as client:
            for i in range(50):
                await read(await client.stream([i, 1], few(2)))
                await client.generate([i, 1], few(2))
            await client.report()
            held = [value for value in vars(client).values() if isinstance(value, dict) and value]
            assert held == [client._handlers]

    run(main())
