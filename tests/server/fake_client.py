"""An engine that anybody can follow by hand: it answers each prompt with the prompt, over and over.

Text is made as the real engine makes it, by `IncrementalDecoder` and the rules of stop strings, one token a step.
"""

import asyncio
import itertools
from collections.abc import Iterable

from jpaged.delta import Delta
from jpaged.engine_client import EngineInfo, EngineReport, EngineState, LiveRequest, PauseMode, PoolPicture
from jpaged.errors import EngineFailedError, RequestError
from jpaged.metrics import Histogram
from jpaged.request import Completion, Output, SamplingParams, TokenLogprobs
from jpaged.stats import EngineStats, PoolUse, StatsCounter
from jpaged.timing import RequestTiming
from jpaged.tokenizer import IncrementalDecoder, Tokenizer

INFO = EngineInfo(
    version="test",
    max_model_len=256,
    vocab_size=300,
    eos_token_ids=(2,),
    page_size=16,
    num_pages=65,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_num_prefill_tokens=None,
    max_logprobs=5,
    prefix_cache=True,
    policy="fcfs",
    has_tokenizer=True,
    implementation="fake",
    implementation_reason="it is a test",
    dtype="float32",
    device="cpu",
    process_id=0,
)


class FakeStream:
    """The answers to one request, one token of each a list."""

    def __init__(self, client: "FakeClient", request_id: str, prompt: tuple[int, ...], params: SamplingParams):
        self._client, self._params = client, params
        self.request_id, self.num_cached_tokens, self.num_preemptions = request_id, 0, 0
        self.prompt_logprobs, self.error, self.timing = None, None, None
        self._aborted = asyncio.Event()
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = (None, *(self._logprob(token) for token in prompt[1:]))
        self._steps = self._answer(prompt)

    def _logprob(self, token: int) -> TokenLogprobs:
        top = tuple(((token + i) % INFO.vocab_size, -0.5 * (i + 1)) for i in range(5))
        return TokenLogprobs(token, -0.5, top)

    def _answer(self, prompt: tuple[int, ...]):
        count = self._params.max_tokens
        count = INFO.max_model_len - len(prompt) if count is None else count
        decoders = [
            IncrementalDecoder(self._client.tokenizer, self._params.skip_special_tokens) for _ in range(self._params.n)
        ]
        texts, given = [""] * self._params.n, [0] * self._params.n
        if count == 0:
            yield [Delta(0, "", (), None, "length")]
            return
        for step in range(count):
            token, deltas = prompt[step % len(prompt)], []
            for index, decoder in enumerate(decoders):
                texts[index] += decoder.add(token)
                reason = stopped = None
                if token in self._params.stop_token_ids or (
                    token in INFO.eos_token_ids and not self._params.ignore_eos
                ):
                    reason, stopped = "stop", token if token in self._params.stop_token_ids else None
                elif step == count - 1:
                    reason = "length"
                    texts[index] += decoder.finish()
                found = [(texts[index].find(stop), stop) for stop in self._params.stop if stop in texts[index]]
                if found:
                    at, stopped = min(found)
                    texts[index], reason = (
                        texts[index][: at + len(stopped) * self._params.include_stop_str_in_output],
                        "stop",
                    )
                held = (
                    0
                    if reason
                    else max(
                        (
                            n
                            for stop in self._params.stop
                            for n in range(1, len(stop))
                            if texts[index].endswith(stop[:n])
                        ),
                        default=0,
                    )
                )
                end = max(len(texts[index]) - held, given[index])
                logprobs = (self._logprob(token),) if self._params.logprobs is not None else None
                deltas.append(Delta(index, texts[index][given[index] : end], (token,), logprobs, reason, stopped))
                given[index] = end
            yield deltas
            if deltas[0].finish_reason:
                return

    def __aiter__(self):
        return self

    async def __anext__(self) -> list[Delta]:
        if self.timing is not None:
            raise StopAsyncIteration
        await self._client.step(self)
        if self._client.failure:
            raise EngineFailedError(self._client.failure)
        if self._client.fails_next:
            self.error, self._client.fails_next = self._client.fails_next, ""
            self._end("error")
            return [Delta(0, "", (), None, "error")]
        deltas = (
            [Delta(i, "", (), None, "abort") for i in range(self._params.n)]
            if self._aborted.is_set()
            else next(self._steps)
        )
        if deltas[0].finish_reason:
            self._end(deltas[0].finish_reason)
        return deltas

    def _end(self, reason: str) -> None:
        self.timing = RequestTiming(arrival_s=0.0, finished_s=1.0)
        self._client.finished[reason] = self._client.finished.get(reason, 0) + 1
        self._client.live.pop(self.request_id, None)

    async def aclose(self) -> None:
        if self.timing is None:
            self._end("abort")


class FakeClient:
    """An `EngineClient`. Steps wait while `gate` is clear."""

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer, self.info = tokenizer, INFO
        self.state: EngineState = "ready"
        self.failure: str | None = None
        self.fails_next = ""  # the error of whatever comes next
        self.is_paused = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.live: dict[str, FakeStream] = {}
        self.finished: dict = {}
        self.seen: list[dict] = []
        self._ids = itertools.count()

    @property
    def alive(self) -> bool:
        return self.state == "ready"

    @property
    def num_live(self) -> int:
        return len(self.live)

    async def step(self, stream: FakeStream) -> None:
        await asyncio.sleep(0)
        waits = [asyncio.ensure_future(event.wait()) for event in (self.gate, stream._aborted)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    async def stream(self, prompt, params=None, *, request_id=None, **options) -> FakeStream:
        if not self.alive:
            raise EngineFailedError(f"the engine is {self.state}")
        request_id = request_id or f"{next(self._ids)}"
        if request_id in self.live:
            raise RequestError(f"request_id is {request_id!r}, which is live")
        self.seen.append({"prompt": tuple(prompt), "params": params, "request_id": request_id, **options})
        self.live[request_id] = FakeStream(self, request_id, tuple(prompt), params)
        return self.live[request_id]

    async def generate(self, prompt, params=None, **options) -> Output:
        n = params.n
        stream = await self.stream(prompt, params, **options)
        texts, tokens, logprobs, ends = [""] * n, [()] * n, [()] * n, [None] * n
        try:
            async for deltas in stream:
                for delta in deltas:
                    texts[delta.index] += delta.text
                    tokens[delta.index] += delta.token_ids
                    logprobs[delta.index] += delta.logprobs or ()
                    if delta.finish_reason:
                        ends[delta.index] = (delta.finish_reason, delta.stop_reason)
        finally:
            await stream.aclose()
        return Output(
            request_id=stream.request_id,
            prompt=None,
            prompt_token_ids=tuple(prompt),
            completions=tuple(
                Completion(
                    index=i,
                    text=texts[i],
                    token_ids=tokens[i],
                    finish_reason=ends[i][0],
                    stop_reason=ends[i][1],
                    logprobs=logprobs[i] if params.logprobs is not None else None,
                )
                for i in range(n)
                if ends[i]
            ),
            finished=True,
            prompt_logprobs=stream.prompt_logprobs,
            error=stream.error,
        )

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        names = list(self.live) if request_ids is None else [name for name in request_ids if name in self.live]
        for name in names:
            self.live[name]._aborted.set()
        return len(names)

    async def report(self) -> EngineReport:
        if not self.alive:
            raise EngineFailedError(f"the engine is {self.state}")
        histogram = Histogram((0.1, 1.0))
        histogram.observe(0.5)
        return EngineReport(
            stats=_stats(len(self.live)),
            histograms={"time_to_first_token_seconds": histogram.snapshot()},
            finished=self.finished,
            num_prompt_tokens=7,
            num_cached_prompt_tokens=3,
            num_refused=0,
            num_restarts=0,
            is_paused=self.is_paused,
        )

    async def picture(self) -> PoolPicture:
        live = [
            LiveRequest(
                request_id=name,
                status="decode",
                num_prompt_tokens=1,
                num_computed_tokens=1,
                num_output_tokens=1,
                num_preemptions=0,
                age_s=0.0,
                num_pages=1,
                pages=((1,),),
            )
            for name in self.live
        ]
        return PoolPicture(states=bytes([4, 1, 2, 3, 0]), requests=tuple(live))

    async def reset_prefix_cache(self) -> None:
        self.seen.append({"reset": True})

    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        self.is_paused = True
        self.seen.append({"pause": mode, "clear_cache": clear_cache})

    async def resume(self) -> None:
        self.is_paused = False

    async def close(self) -> None:
        self.state = "closed"


def _stats(num_running: int) -> EngineStats:
    others = {
        "now": PoolUse(pages_used=2, tokens_held=20, running=num_running, page_size=16),
        "num_pages": 65,
        "num_running": num_running,
    }
    for name in EngineStats.__dataclass_fields__:
        if name not in others and name != "mean_wasted_fraction" and name not in StatsCounter.__dataclass_fields__:
            others[name] = 0
    return StatsCounter(peak=PoolUse()).snapshot(**others)
