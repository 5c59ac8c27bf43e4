"""An engine without jax whose tokens can be computed in the head, for tests of what stands above the engine."""

import ctypes
import gc
import logging
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, Literal

from jpaged.delta import Delta, StreamNews, StreamStart
from jpaged.engine_client import EngineInfo, LiveRequest, PoolPicture
from jpaged.errors import PromptTooLongError, RequestError
from jpaged.request import Completion, Output, SamplingParams
from jpaged.request_metrics import RequestMetrics
from jpaged.stats import EngineStats, PoolUse, StatsCounter
from jpaged.timing import RequestTiming

MAX_LEN = 1000  # of prompts; an answer may be as long as a test needs it


class FakeEngine:
    """Token i of an answer to a prompt is (sum of the prompt + i) % 100; its text is "<token>".

    Args:
      step_s: seconds a step takes.
      on_step: called before each step with the engine; may raise.

    Attributes:
      live: by request id, in order: (prompt, params, stream, tokens so far).
      salts: by request id.
    """

    def __init__(self, *, step_s: float = 0.0, on_step: Callable[["FakeEngine"], None] | None = None) -> None:
        self.live: dict[str, tuple[list[int], SamplingParams, Any, list[int]]] = {}
        self.about: dict[str, dict[str, Any]] = {}
        self.metrics = RequestMetrics()
        self.num_steps = self.num_restarts = self.num_resets = 0
        self._step_s = step_s
        self._on_step = on_step
        self._news = StreamNews([], [])
        self.info = EngineInfo(
            version="0",
            max_model_len=MAX_LEN,
            vocab_size=100,
            eos_token_ids=(0,),
            page_size=16,
            num_pages=64,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_num_prefill_tokens=None,
            max_logprobs=20,
            prefix_cache=True,
            policy="fcfs",
            has_tokenizer=True,
            implementation="xla",
            implementation_reason="a fake",
            dtype="float32",
            device="none",
            process_id=os.getpid(),
        )

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def add(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool | Literal["deltas"] = False,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_s: float | None = None,
    ) -> str:
        params, prompt = params or SamplingParams(), list(prompt)
        assert request_id is not None
        if prompt == [13]:
            raise KeyError("the prompt said thirteen")
        if any(token >= 100 for token in prompt):
            raise RequestError("a token id is outside of the vocabulary")
        if len(prompt) >= MAX_LEN:
            raise PromptTooLongError(f"{len(prompt)} tokens are too many")
        self.live[request_id] = (prompt, params, stream, [])
        self.about[request_id] = {"priority": priority, "cache_salt": cache_salt, "arrival_s": arrival_s}
        return request_id

    def step(self) -> list[Output]:
        if self._on_step is not None:
            self._on_step(self)
        time.sleep(self._step_s)
        self.num_steps += 1
        ended = []
        for name, (prompt, params, stream, tokens) in list(self.live.items()):
            token = (sum(prompt) + len(tokens)) % 100
            tokens.append(token)
            over = len(tokens) >= (params.max_tokens or MAX_LEN)
            if stream == "deltas":
                if len(tokens) == 1:
                    self._news.starts.append(StreamStart(name, len(prompt) // 2, None))
                self._news.deltas.append((name, Delta(0, f"<{token}>", (token,), None, "length" if over else None)))
            if over:
                ended.append(self._end(name, "length"))
        return ended

    def abort(self, request_id: str) -> Output | None:
        if request_id not in self.live:
            return None
        if self.live[request_id][2] == "deltas":
            self._news.deltas.append((request_id, Delta(0, "", (), None, "abort")))
        return self._end(request_id, "abort")

    def _end(self, name: str, reason: Literal["length", "abort"]) -> Output:
        prompt, params, _, tokens = self.live.pop(name)
        completion = Completion(
            index=0, text="".join(f"<{t}>" for t in tokens), token_ids=tuple(tokens), finish_reason=reason
        )
        now = time.monotonic()
        output = Output(
            request_id=name,
            prompt=None,
            prompt_token_ids=tuple(prompt),
            completions=(completion,),
            finished=True,
            num_cached_tokens=len(prompt) // 2,
            timing=RequestTiming(arrival_s=self.about[name]["arrival_s"] or now, finished_s=now),
        )
        self.metrics.ended(output, params)
        return output

    def take_news(self) -> StreamNews:
        news, self._news = self._news, StreamNews([], [])
        return news

    def restart(self) -> None:
        self.live.clear()
        self._news = StreamNews([], [])
        self.num_restarts += 1

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    def stats(self) -> EngineStats:
        names = EngineStats.__dataclass_fields__.keys() - StatsCounter.__dataclass_fields__.keys()
        values: dict[str, Any] = dict.fromkeys(names - {"mean_wasted_fraction"}, 0)
        values |= {"now": PoolUse(running=len(self.live)), "num_running": len(self.live), "num_pages": 64}
        return StatsCounter(peak=PoolUse(), num_steps=self.num_steps).snapshot(**values)

    def picture(self) -> PoolPicture:
        requests = tuple(
            LiveRequest(
                request_id=name,
                status="decode" if tokens else "queued",
                num_prompt_tokens=len(prompt),
                num_computed_tokens=len(prompt) + len(tokens),
                num_output_tokens=len(tokens),
                num_preemptions=0,
                age_s=0.0,
                num_pages=2,
                pages=((1, 2),),
            )
            for name, (prompt, _, _, tokens) in self.live.items()
        )
        return PoolPicture(states=bytes([4, 1, 1, *[0] * 61]), requests=requests)


def make(*, step_s: float = 0.0, fails: str = "") -> FakeEngine:
    """For processes: an engine that fails in some way.

    Args:
      step_s: seconds a step takes.
      fails: "start": it cannot be made; "load": that does not end; "step": a step raises while a request has the prompt
        [66]; "restart": likewise, and the restart does not end; "crash": the process dies then; "hang": the second step
        of such a request does not end; "" else.
    """
    if fails == "start":
        raise RequestError("no such model")
    if fails == "load":
        hang()

    def on_step(engine: FakeEngine) -> None:
        bad = [tokens for prompt, _, _, tokens in engine.live.values() if prompt == [66]]
        if not bad:
            return
        if fails in ("step", "restart"):
            raise OSError("device lost")
        if fails == "crash":
            os._exit(9)
        if fails == "hang" and bad[0]:
            hang()

    engine = FakeEngine(step_s=step_s, on_step=on_step)
    if fails == "restart":
        engine.restart = hang
    return engine


def hang(engine: FakeEngine | None = None) -> None:
    """Does not come back."""
    time.sleep(600)


def warn(engine: FakeEngine) -> None:
    """Writes into the log of its process."""
    logging.getLogger("jpaged.test").info("not shown at this level")
    logging.getLogger("jpaged.test").warning("shown")
    warnings.warn("from a library", stacklevel=1)


def process_id(engine: FakeEngine) -> int:
    """To be called in the engine's process."""
    return os.getpid()


def unpicklable(engine: FakeEngine) -> Callable[[], None]:
    """Likewise."""
    return lambda: None


def modules(engine: FakeEngine) -> list[str]:
    """Likewise."""
    import sys

    return sorted(name for name in ("jax", "flax", "numpy") if name in sys.modules)


def count_frozen_and_arenas(engine: FakeEngine) -> tuple[int, int]:
    """Objects that no garbage collection looks at, and malloc's arenas once eight threads have used it."""
    together = threading.Barrier(8)

    def use() -> None:
        together.wait(60)
        kept = [bytes(4096) for _ in range(100)]
        together.wait(60)
        del kept

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    with tempfile.NamedTemporaryFile() as file:
        stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
        libc.malloc_info(0, stream)
        libc.fclose(stream)
        return gc.get_freeze_count(), file.read().count(b"<heap nr=")
