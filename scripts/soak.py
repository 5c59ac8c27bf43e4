"""Thousands of random requests, many of them bad or left: nothing may leak, hang, crash or grow.

    python scripts/soak.py [--requests 10000] [--concurrency 48] [--process] [--seed 0]

A tiny random model on a page pool that is too small for all at once, so that requests queue and are preempted. Clients
stream or wait, leave at any moment, abort each other, ask for what is refused; some requests are sent twice, once
streaming, and must say the same; now and then the engine is paused. With --process the engine has a process of its own.

The run fails, with exit status 1, unless at its end: no request lives, no page is used, every request ended in a way
that was expected, and none was stuck. The last line is JSON.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from jpaged.async_engine import AsyncEngine
from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig
from jpaged.engine_process import EngineProcess, EngineRecipe
from jpaged.engine_thread import EngineThread
from jpaged.errors import RequestError
from jpaged.request import SamplingParams
from scripts.report import print_json, print_table

VOCAB, MAX_LEN, PAGE = 256, 256, 8
STUCK_S = 120.0


def make_engine(seed: int = 0) -> Any:
    """A Llama of two layers on 39 pages of 8 tokens, 8 rows a step."""
    from flax import nnx

    from jpaged.engine import Engine
    from jpaged.models import Llama, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
    )
    engine_config = EngineConfig(
        cache=CacheConfig(page_size=PAGE, num_pages=40),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=MAX_LEN),
        token_buckets=(8, 64),
        warmup="eager",
        check_invariants=True,
    )
    return Engine(Llama(config, rngs=nnx.Rngs(seed)), engine_config)


@dataclass(frozen=True)
class Case:
    """One request, and what its client does.

    Attributes:
      prompt, params, salt: of the request.
      refused: whether the engine must refuse it.
      stream: whether it streams.
      leaves_after_s: when the client leaves; `None`: not.
      twice: sent streaming and waiting, to be compared.
    """

    prompt: list[int]
    params: dict[str, Any]
    salt: str | None
    refused: bool
    stream: bool
    leaves_after_s: float | None
    twice: bool


def random_case(rng: random.Random) -> Case:
    """Mostly what people ask for, and now and then what nobody should."""
    length = rng.choice([1, 7, 8, 9, 31, 64, 65, 150])
    prefix = [rng.randrange(4)] * rng.choice([0, 8, 16, 40])  # few, so that caches are hit
    prompt = prefix + [rng.randrange(VOCAB) for _ in range(length)]
    params: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.7, 1.0]),
        "top_p": rng.choice([1.0, 0.9]),
        "max_tokens": rng.choice([1, 2, 8, 8, 40]),
        "seed": rng.randrange(2**40),
    }
    extras = [
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": {5: 10.0}},
        {"min_tokens": 1, "stop_token_ids": [5, 6, 7]},
    ]
    if rng.random() < 0.3:
        params |= rng.choice(extras)
    if params["temperature"] and len(prompt) < 100 and rng.random() < 0.2:  # three long ones can never fit
        params["n"] = rng.choice([2, 3])
    refused = rng.random() < 0.08
    if refused:
        bad = rng.choice(["long", "vocabulary", "empty", "bias", "logprobs", "answers"])
        prompt = {"long": [1] * MAX_LEN, "vocabulary": [1, VOCAB], "empty": []}.get(bad, prompt)
        params |= {"bias": {"logit_bias": {VOCAB: 1.0}}, "logprobs": {"logprobs": 1000}}.get(bad, {})
        params |= {"n": 9, "temperature": 1.0} if bad == "answers" else {}
    leaves = rng.expovariate(1 / 0.05) if rng.random() < 0.25 and not refused else None
    return Case(
        prompt=prompt,
        params=params,
        salt=rng.choice([None, None, "a", "b"]),
        refused=refused,
        stream=rng.random() < 0.6,
        leaves_after_s=leaves,
        twice=leaves is None and not refused and rng.random() < 0.15,
    )


@dataclass
class Soak:
    """The clients, and what became of their requests."""

    client: AsyncEngine
    rng: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    num_compared: int = 0
    num_tokens: int = 0

    async def serve(self, case: Case) -> None:
        """One request to its end, whatever that is."""
        try:
            async with asyncio.timeout(STUCK_S):
                await self._serve(case)
        except TimeoutError:
            self.outcomes["stuck"] += 1
            self.faults.append(f"stuck: {case}")
        except RequestError as error:
            self.outcomes["refused"] += 1
            if not case.refused:
                self.faults.append(f"refused ({error}): {case}")
        except Exception as error:
            self.outcomes["fault"] += 1
            self.faults.append(f"{type(error).__name__} ({error}): {case}")

    async def _serve(self, case: Case) -> None:
        if case.twice:
            streamed, whole = await asyncio.gather(self._stream(case), self._whole(case))
            self.num_compared += streamed is not None and whole is not None
            if streamed != whole and None not in (streamed, whole):
                self.faults.append(f"streamed {streamed}, whole {whole}: {case}")
            return
        answer = asyncio.create_task(self._stream(case) if case.stream else self._whole(case))
        if case.leaves_after_s is not None:
            await asyncio.wait([answer], timeout=case.leaves_after_s)
            if not answer.done():
                self.outcomes["left"] += 1
                answer.cancel()
                await asyncio.wait([answer])
                return
        await answer

    async def _stream(self, case: Case) -> list[list[int]] | None:
        stream = await self.client.stream(case.prompt, SamplingParams(**case.params), cache_salt=case.salt)
        answers: dict[int, list[int]] = {}
        reasons: set[str] = set()
        try:
            async for deltas in stream:
                for delta in deltas:
                    answers.setdefault(delta.index, []).extend(delta.token_ids)
                    reasons |= {delta.finish_reason} if delta.finish_reason else set()
        finally:
            await stream.aclose()
        return self._ended(case, [answers[index] for index in sorted(answers)], reasons)

    async def _whole(self, case: Case) -> list[list[int]] | None:
        output = await self.client.generate(case.prompt, SamplingParams(**case.params), cache_salt=case.salt)
        reasons = {completion.finish_reason or "none" for completion in output.completions}
        return self._ended(case, [list(completion.token_ids) for completion in output.completions], reasons)

    def _ended(self, case: Case, answers: list[list[int]], reasons: set[str]) -> list[list[int]] | None:
        """The answers, unless somebody aborted the request."""
        self.num_tokens += sum(map(len, answers))
        self.outcomes["abort" if "abort" in reasons else min(reasons)] += 1
        if case.refused:
            self.faults.append(f"not refused: {case}")
        if not reasons <= {"stop", "length", "abort"}:
            self.faults.append(f"ended with {reasons}: {case}")
        return None if "abort" in reasons else answers

    async def disturb(self) -> None:
        """Aborts others' requests, and pauses the engine."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / 0.2))
            names = [request.request_id for request in (await self.client.picture()).requests]
            if names and self.rng.random() < 0.8:
                await self.client.abort(self.rng.sample(names, 1))
            elif self.rng.random() < 0.3:
                await self.client.pause("keep", clear_cache=self.rng.random() < 0.5)
                await self.client.resume()


def resident_bytes(process_id: int | str) -> int:
    """Memory of a process that is in RAM."""
    return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    """The whole run, and what came of it."""
    rng = random.Random(options.seed)
    recipe = EngineRecipe(maker="scripts.soak:make_engine")
    port = EngineProcess(recipe) if options.process else EngineThread(make_engine())
    async with AsyncEngine(port) as client:
        run = Soak(client, rng)
        processes = {os.getpid(), client.info.process_id}
        memory: list[tuple[int, int]] = []  # requests done, bytes
        begin, todo, done = time.monotonic(), set[asyncio.Task[None]](), 0
        disturber = asyncio.create_task(run.disturb())
        for number in range(options.requests):
            todo.add(asyncio.create_task(run.serve(random_case(rng))))
            if len(todo) >= options.concurrency or number == options.requests - 1:
                ended, todo = await asyncio.wait(todo, return_when=asyncio.FIRST_COMPLETED)
                done += len(ended)
            if number % max(options.requests // 200, 1) == 0:
                memory.append((done, sum(map(resident_bytes, processes))))
        if todo:
            await asyncio.wait(todo)
        disturber.cancel()
        await asyncio.wait([disturber])
        if not disturber.cancelled():
            run.faults.append(f"the disturber failed: {disturber.exception()!r}")
        stats = (await client.report()).stats
        return {
            "requests": options.requests,
            "concurrency": options.concurrency,
            "engine": "process" if options.process else "thread",
            "seconds": time.monotonic() - begin,
            "outcomes": dict(sorted(run.outcomes.items())),
            "tokens": run.num_tokens,
            "compared": run.num_compared,
            "preemptions": stats.num_preemptions,
            "cached_tokens": stats.num_cached_tokens,
            "restarts": (await client.report()).num_restarts,
            "leaked_pages": stats.num_pages - 1 - stats.pages_free - stats.pages_cached,
            "live_at_the_end": client.num_live + stats.num_running + stats.num_waiting,
            "stuck": run.outcomes["stuck"],
            "faults": len(run.faults),
            "first_faults": [fault[:300] for fault in run.faults[:3]],
            "resident_mib": memory[-1][1] / 2**20,
            "growth_kib_per_1000_requests": growth(memory) / 1024 * 1000,
        }


def growth(memory: list[tuple[int, int]]) -> float:
    """Bytes a request, by least squares over the second half of the run: the first one fills caches and arenas."""
    half = np.array(memory[len(memory) // 2 :], np.float64)
    return float(np.polyfit(half[:, 0], half[:, 1], 1)[0]) if len(set(half[:, 0])) > 1 else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--process", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    results = asyncio.run(soak(parser.parse_args()))
    print_table("soak", ["what", "figure"], [[name, value] for name, value in results.items()])
    print_json("soak", results)
    bad = results["leaked_pages"] + results["live_at_the_end"] + results["stuck"] + results["faults"]
    return 1 if bad or results["restarts"] else 0


if __name__ == "__main__":
    sys.exit(main())
