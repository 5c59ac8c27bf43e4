"""The real engine behind a client: answers, who leaves, faults, leaks. Each test leaves an engine without requests."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

import jax
import pytest

from jpaged.async_engine import AsyncEngine
from jpaged.engine import Engine
from jpaged.engine_thread import EngineThread
from jpaged.errors import EngineFailedError, PromptTooLongError, RequestError
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.pallas_kernels import make_pages
from jpaged.request import SamplingParams
from jpaged.tokenizer import Tokenizer
from tests.client_driver import read, run, text_of, tokens_of, until
from tests.engine_driver import GREEDY, PROMPTS, check_pages, make_engine_config, serve
from tests.fakes import tiny_llama
from tests.tiny_vocabs import byte_level_metadata

TOKENIZER = Tokenizer(gguf_vocabulary(byte_level_metadata(), "test.gguf"), "test.gguf")
LONG = SamplingParams(temperature=0.0, max_tokens=110, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Two programs: 4 and 32 tokens. 21 pages of 8 tokens, so that four long requests do not fit."""
    config = make_engine_config(num_pages=22)
    made = Engine(tiny_llama(vocab_size=TOKENIZER.vocab_size), config, tokenizer=TOKENIZER, eos_token_ids=(2,))
    made.warm_up()
    return made


@pytest.fixture
def served(engine) -> Iterator[Callable[[], AsyncEngine]]:
    """Clients of the engine; at the end nothing is left in it."""
    yield lambda: AsyncEngine(EngineThread(engine))
    assert not engine.has_work
    assert engine.stats().now.pages_used == 0
    check_pages(engine)


@contextlib.asynccontextmanager
async def held(client: AsyncEngine) -> AsyncIterator[None]:
    """No step is taken while the block runs: what is asked for there is there at once, however late it is asked."""
    await client.pause("keep", clear_cache=False)
    yield
    await client.resume()


def test_streams_say_what_the_engine_says_offline(engine, served):
    params = [
        GREEDY,
        SamplingParams(temperature=1.0, seed=3, max_tokens=20, logprobs=2),
        SamplingParams(temperature=1.0, seed=4, max_tokens=16, n=3),
        SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1),
        SamplingParams(temperature=1.0, seed=6, max_tokens=40, stop=["a", "!!"], ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=0),
    ]
    requests = [(prompt, one) for one in params for prompt in PROMPTS[:2]]
    offline = serve(engine, requests, cold=True)

    async def main():
        async with served() as client:
            streams = [await client.stream(prompt, one) for prompt, one in requests]
            whole = await asyncio.gather(*(client.generate(prompt, one) for prompt, one in requests))
            for stream, expected, output in zip(streams, offline, whole, strict=True):
                assert output.completions == expected.completions
                deltas = await read(stream)
                assert stream.prompt_logprobs == expected.prompt_logprobs
                for completion in expected.completions:
                    own = [delta for delta in deltas if delta.index == completion.index]
                    assert text_of(own, completion.index) == completion.text
                    assert tuple(tokens_of(own, completion.index)) == completion.token_ids
                    ends = [(delta.finish_reason, delta.stop_reason) for delta in own]
                    assert ends == [(None, None)] * (len(own) - 1) + [
                        (completion.finish_reason, completion.stop_reason)
                    ]
                    joined = [entry for delta in own for entry in delta.logprobs or ()]
                    assert joined == list(completion.logprobs or ())

    run(main())


def test_times_are_told_in_order(served):
    async def main():
        async with served() as client:
            output = await client.generate(PROMPTS[0], GREEDY)
            timing = output.timing
            moments = [
                timing.arrival_s,
                timing.scheduled_s,
                timing.first_token_s,
                timing.last_token_s,
                timing.finished_s,
            ]
            assert moments == sorted(moments)
            report = await client.report()
            counts = {name: histogram.count for name, histogram in report.histograms.items()}
            assert counts["iteration_tokens_total"] == report.stats.num_steps
            assert counts["e2e_request_latency_seconds"] == sum(report.finished.values())
            assert counts["inter_token_latency_seconds"] >= 11
            assert report.num_prompt_tokens >= 3

    run(main())


@pytest.mark.parametrize(("state", "prompt_length"), [("queued", 3), ("prefill", 100), ("decode", 3)])
def test_who_leaves_frees_its_pages(served, state, prompt_length):
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)

    async def main():
        async with served() as client:
            async with held(client):
                streams = [await client.stream([i] * prompt_length, params) for i in range(6)]
                tasks = [asyncio.create_task(client.generate([i] * prompt_length, params)) for i in range(3)]
                while state not in {request.status for request in (await client.picture()).requests}:
                    await client.call(lambda engine: engine.step())
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*(stream.aclose() for stream in streams))
                await asyncio.wait(tasks)
            before = (await client.report()).stats.num_steps
            after = (await client.report()).stats
            assert after.now.pages_used == after.num_running == after.num_waiting == 0
            assert after.num_steps - before <= 2
            assert (await client.report()).finished["abort"] >= 9
            assert len((await client.generate(PROMPTS[0], GREEDY)).token_ids) == 12

    run(main())


def test_a_full_pool_preempts_and_all_are_served(engine, served):
    before = engine.stats().num_preemptions
    alone = serve(engine, [([i] * 5, LONG) for i in range(4)], at_once=False, cold=True)

    async def main():
        async with served() as client:
            await client.reset_prefix_cache()
            async with held(client):
                tasks = [asyncio.create_task(client.generate([i] * 5, LONG)) for i in range(4)]
                await asyncio.sleep(0)  # they ask
            assert [(await task).token_ids for task in tasks] == [o.token_ids for o in alone]

    run(main())
    assert engine.stats().num_preemptions > before


def test_what_can_never_fit_is_refused_and_the_next_is_served(served):
    async def main():
        async with served() as client:
            with pytest.raises(PromptTooLongError, match="128 tokens") as refusal:
                await client.stream([11] * 128, GREEDY)
            assert "11, 11" not in str(refusal.value)
            with pytest.raises(PromptTooLongError, match="lower max_tokens"):
                await client.generate([1] * 120, GREEDY)
            with pytest.raises(RequestError, match="cannot stream"):
                await client.stream([1], SamplingParams(temperature=0.0, use_beam_search=True, best_of=2))
            assert len((await client.generate(PROMPTS[0], GREEDY)).token_ids) == 12

    run(main())


def test_a_fault_of_one_request_ends_that_one_alone(engine, served, monkeypatch, caplog):
    async def main():
        async with served() as client:
            expected = (await client.generate(PROMPTS[0], GREEDY)).token_ids
            by_token = replace(LONG, stop=("never",))  # its text is made token by token

            def break_it(engine):
                def fail(*args, **options):
                    raise ValueError("secret prompt")

                monkeypatch.setattr(engine._collector._live["bad"].builder, "add_token", fail)

            async with held(client):
                bad = await client.stream(PROMPTS[1], by_token, request_id="bad")
                other = await client.stream(PROMPTS[0], GREEDY)
                await client.call(break_it)
            deltas = await read(bad)
            assert deltas[-1].finish_reason == "error"
            assert "an internal error (ValueError)" in bad.error
            assert tuple(tokens_of(await read(other))) == expected

    run(main())
    assert "secret prompt" not in caplog.text


def test_a_failed_step_fails_all_and_the_engine_serves_again(engine, served, monkeypatch):
    expected = serve(engine, [(prompt, GREEDY) for prompt in PROMPTS], cold=True)
    compiled = engine.stats().num_compilations

    async def main():
        async with served() as client:
            run_step = engine._runner.run
            for consume in (False, True):  # the device fails before, and after it took the pages

                def fail(kv_pages, state, packed, shape, consume=consume):
                    if consume:
                        for leaf in jax.tree.leaves((kv_pages, state)):
                            leaf.delete()
                    monkeypatch.setattr(engine._runner, "run", run_step)
                    raise RuntimeError("INTERNAL: device lost")

                async with held(client):
                    streams = [await client.stream(prompt, LONG) for prompt in PROMPTS]
                    monkeypatch.setattr(engine._runner, "run", fail)
                for stream in streams:
                    with pytest.raises(EngineFailedError, match="device lost"):
                        await read(stream)
                await until(lambda: client.alive)
                outputs = await asyncio.gather(*(client.generate(prompt, GREEDY) for prompt in PROMPTS))
                assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
                assert not jax.tree.leaves(engine._kv_pages)[0].is_deleted()
            assert (await client.report()).num_restarts == 2

    run(main())
    assert engine.stats().num_compilations == compiled  # programs are kept


def test_a_restart_that_fails_is_tried_again(engine, served, monkeypatch):
    def fail(*args):
        raise RuntimeError("INTERNAL: device lost")

    def no_room(spec):
        monkeypatch.setattr("jpaged.engine.make_pages", make_pages)
        raise RuntimeError("RESOURCE_EXHAUSTED")

    async def main():
        async with served() as client:
            run_step = engine._runner.run
            async with held(client):
                stream = await client.stream(PROMPTS[0], LONG)
                monkeypatch.setattr("jpaged.engine.make_pages", no_room)
                monkeypatch.setattr(engine._runner, "run", fail)
            with pytest.raises(EngineFailedError):
                await read(stream)
            monkeypatch.setattr(engine._runner, "run", run_step)
            await until(lambda: client.alive)
            assert len((await client.generate(PROMPTS[0], GREEDY)).token_ids) == 12

    run(main())


def test_new_weights_between_two_steps(engine, served):
    weights = tiny_llama(seed=1, vocab_size=TOKENIZER.vocab_size)
    old = tiny_llama(vocab_size=TOKENIZER.vocab_size)

    async def main():
        async with served() as client:
            first = await client.generate(PROMPTS[0], GREEDY)
            stream = await client.stream(PROMPTS[1], LONG)
            await client.pause("keep")
            await client.call(lambda engine: engine.update_weights(weights))
            await client.resume()
            assert len(tokens_of(await read(stream))) == 110
            assert (await client.generate(PROMPTS[0], GREEDY)).token_ids != first.token_ids
            await client.call(lambda engine: engine.update_weights(old))
            assert (await client.generate(PROMPTS[0], GREEDY)).token_ids == first.token_ids

    run(main())


def test_random_requests_and_aborts_leave_nothing(engine, served):
    rng = random.Random(0)
    ended: list[str] = []

    async def one(client: AsyncEngine) -> None:
        prompt = [rng.randrange(3, 60)] * rng.choice([1, 7, 8, 9, 40, 90, 130])
        params = SamplingParams(max_tokens=rng.choice([1, 5, 30]), n=rng.choice([1, 1, 1, 3]))
        if rng.random() < 0.1:
            params = SamplingParams(max_tokens=0, logit_bias=rng.choice([{}, {10**6: 1.0}]))
        try:
            if rng.random() < 0.5:
                stream = await client.stream(prompt, params)
                leaves_after = rng.choice([0, 1, 3, None])
                if leaves_after is None:
                    ended.append((await read(stream))[-1].finish_reason or "")
                else:
                    for _ in range(leaves_after):
                        await anext(stream, None)
                    await stream.aclose()
                    ended.append("left")
            else:
                waiting = asyncio.create_task(client.generate(prompt, params))
                if rng.random() < 0.4:
                    await asyncio.wait([waiting], timeout=rng.random() * 0.02)
                    waiting.cancel()
                try:
                    ended.append((await waiting).finish_reason or "")
                except asyncio.CancelledError:
                    ended.append("left")
        except RequestError:
            ended.append("refused")

    async def main():
        async with served() as client:
            todo = [asyncio.create_task(one(client)) for _ in range(300)]
            while left := [task for task in todo if not task.done()]:
                await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                if rng.random() < 0.1:
                    await client.abort(rng.sample(list(client._numbers), min(2, client.num_live)))
            await asyncio.gather(*todo)
            async with held(client):  # one abort at least that comes in time, whatever the machine does
                doomed = asyncio.create_task(client.generate(PROMPTS[0], LONG))
                await asyncio.sleep(0)  # it asks
                assert await client.abort() == 1
            ended.append((await doomed).finish_reason or "")
            await until(lambda: not engine.has_work)
            stats = (await client.report()).stats
            assert stats.pages_free + stats.pages_cached + 1 == stats.num_pages
            assert client.num_live == 0

    run(main(), 120)
    assert len(ended) == 301
    assert {"left", "refused", "abort", "length"} <= set(ended)
