"""What it costs to bring tokens from the engine's process to the coroutines that wait for them.

    python scripts/bench_link.py [--streams 64] [--tokens 400] [--step-ms 4]

The engine is a stand-in without a model: each step it gives every request a token with four characters of text. The
steps come at a pace, as a device's do, so that readers are woken for each of them. CPU time of both processes, of all
their threads, is divided by the tokens; what the stand-in itself takes is in the engine's part. The last line is JSON.
"""

import argparse
import asyncio
import importlib
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jpaged.async_engine import AsyncEngine
from jpaged.delta import Delta, StreamNews
from jpaged.engine_client import EngineInfo
from jpaged.engine_process import EngineProcess, EngineRecipe
from jpaged.request import Completion, Output, SamplingParams
from jpaged.request_metrics import RequestMetrics
from scripts.report import print_json, print_table


class StandIn:
    """As much of an `Engine` as `EngineLoop` needs here."""

    def __init__(self, step_s: float) -> None:
        self.metrics = RequestMetrics()
        self.info = EngineInfo(
            version="0",
            max_model_len=1 << 20,
            vocab_size=1 << 20,
            eos_token_ids=(),
            page_size=16,
            num_pages=2,
            max_num_seqs=1 << 10,
            max_num_batched_tokens=1 << 10,
            max_num_prefill_tokens=None,
            max_logprobs=0,
            prefix_cache=False,
            policy="fcfs",
            has_tokenizer=True,
            implementation="none",
            implementation_reason="a stand-in",
            dtype="none",
            device="none",
            process_id=0,
        )
        self._step_s = step_s
        self._due = 0.0
        self._live: dict[str, list[Any]] = {}  # tokens to give, stream, prompt
        self._news = StreamNews([], [])

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def add(self, prompt: Any, params: SamplingParams, *, request_id: str, stream: Any, **_: Any) -> str:
        self._live[request_id] = [params.max_tokens, stream, prompt]
        return request_id

    def abort(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def step(self) -> list[Output]:
        self._due = max(self._due, time.perf_counter() - self._step_s) + self._step_s
        time.sleep(max(self._due - time.perf_counter(), 0))
        ended = []
        for name, request in list(self._live.items()):
            request[0] -= 1
            last = request[0] == 0
            if request[1] == "deltas":
                self._news.deltas.append((name, Delta(0, "text", (12345,), None, "length" if last else None)))
            if last:
                del self._live[name]
                ended.append(_output(name, request[2]))
        return ended

    def take_news(self) -> StreamNews:
        news, self._news = self._news, StreamNews([], [])
        return news


def _output(name: str, prompt: Any) -> Output:
    completion = Completion(index=0, text="text" * 400, token_ids=tuple(range(400)), finish_reason="length")
    return Output(
        request_id=name, prompt=None, prompt_token_ids=tuple(prompt), completions=(completion,), finished=True
    )


def cpu_s(_: object = None) -> float:
    """CPU seconds of a process so far; the argument is the engine, where the engine's process is asked."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def measure(*, streams: int, tokens: int, step_s: float, streaming: bool) -> dict[str, float]:
    """Microseconds of CPU a token, here and in the engine's process."""
    cpu_s_there = importlib.import_module("scripts.bench_link").cpu_s  # not that of __main__, which is another there
    recipe = EngineRecipe(maker="scripts.bench_link:StandIn", options={"step_s": step_s})
    async with AsyncEngine(EngineProcess(recipe)) as client:
        params, prompt = SamplingParams(max_tokens=tokens), list(range(200))

        async def one() -> int:
            if not streaming:
                return len((await client.generate(prompt, params)).token_ids)
            stream = await client.stream(prompt, params)
            return sum([len(deltas) async for deltas in stream])

        await asyncio.gather(*(one() for _ in range(streams)))  # imports, allocations
        here, there, begin = cpu_s(), await client.call(cpu_s_there), time.perf_counter()
        await asyncio.gather(*(one() for _ in range(streams)))
        total = streams * tokens
        return {
            "streams": streams,
            "tokens": total,
            "client_us_per_token": (cpu_s() - here) / total * 1e6,
            "engine_us_per_token": (await client.call(cpu_s_there) - there) / total * 1e6,
            "step_ms": (time.perf_counter() - begin) / tokens * 1e3,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=4.0)
    options = parser.parse_args()
    results = {}
    for name, streaming in (("streaming", True), ("whole", False)):
        results[name] = asyncio.run(
            measure(streams=options.streams, tokens=options.tokens, step_s=options.step_ms / 1e3, streaming=streaming)
        )
    rows = [
        [name, *(f"{result[key]:.2f}" for key in ("client_us_per_token", "engine_us_per_token", "step_ms"))]
        for name, result in results.items()
    ]
    print_table(
        "CPU a token over the link", ["requests", "client (us)", "engine's process (us)", "a step took (ms)"], rows
    )
    print_json("bench_link", results)


if __name__ == "__main__":
    main()
