"""`EngineClient`: an engine as asyncio code sees it, be it in a thread of this process or in a process of its own.

Nothing here needs jax: this is all that the HTTP server knows of the engine.
"""

from collections.abc import AsyncIterator, Iterable, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from jpaged.delta import Delta
from jpaged.metrics import HistogramSnapshot
from jpaged.request import FinishReason, Output, SamplingParams, TokenLogprobs
from jpaged.stats import EngineStats
from jpaged.timing import RequestTiming

EngineState = Literal["starting", "ready", "restarting", "dead", "closed"]
PauseMode = Literal["keep", "wait", "abort"]


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What does not change while an engine serves.

    Attributes:
      version: of jpaged.
      max_model_len: tokens of a sequence at the most, prompt and output together.
      vocab_size: token ids are in [0, vocab_size).
      eos_token_ids: the model's end-of-sequence ids.
      page_size: token slots a page.
      num_pages: pages in the pool, the null page included.
      max_num_seqs: sequences that run at once, so n and best_of at the most too.
      max_num_batched_tokens: tokens of a step at the most.
      max_num_prefill_tokens: of a step in which nobody waits for a next token, if they may be more.
      max_logprobs: entries of top-logprobs that a request may ask for.
      prefix_cache: pages are found again by their contents.
      policy: "fcfs" or "priority"; `priority` must be 0 with the former.
      has_tokenizer: whether the engine makes text, and takes stop strings.
      implementation, implementation_reason: of attention, and why this one.
      dtype: of the pages.
      device: the device's kind, such as "NVIDIA H200" or "cpu".
      process_id: of the process that runs the engine.
    """

    version: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_prefill_tokens: int | None
    max_logprobs: int
    prefix_cache: bool
    policy: Literal["fcfs", "priority"]
    has_tokenizer: bool
    implementation: str
    implementation_reason: str
    dtype: str
    device: str
    process_id: int


MAX_PAGE_IDS: Final = 32_768


@dataclass(frozen=True, kw_only=True)
class LiveRequest:
    """A request that has not ended, for people who look.

    Attributes:
      request_id: as given.
      status: "queued" (new, or preempted), "prefill" or "decode".
      num_prompt_tokens, num_computed_tokens: the prompt, and tokens whose KV is there (of the first sequence).
      num_output_tokens: sampled so far, of all its sequences.
      num_preemptions: how often it lost its pages.
      age_s: since its arrival.
      num_pages: that it holds; shared ones once.
      pages: of each of its sequences, in order; shared pages occur more than once. Empty where they would be too many
        (`PoolPicture`).
    """

    request_id: str
    status: Literal["queued", "prefill", "decode"]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_preemptions: int
    age_s: float
    num_pages: int
    pages: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class PoolPicture:
    """The page pool at one moment, page by page.

    Attributes:
      states: one byte a page: 0 free, 1 used by one, 2 used by several, 3 cached, 4 the null page.
      requests: that are live, in the order of arrival; those whose page ids would be beyond the first
        `MAX_PAGE_IDS` have none.
    """

    states: bytes
    requests: tuple[LiveRequest, ...]


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """All that `/metrics` needs, at one moment. Counters begin at 0 again when the engine's process is a new one.

    Attributes:
      stats: counters and the pool.
      histograms: by name: time_to_first_token_seconds, inter_token_latency_seconds,
        request_time_per_output_token_seconds, e2e_request_latency_seconds, request_queue_time_seconds,
        request_inference_time_seconds, request_prefill_time_seconds, request_decode_time_seconds,
        request_prompt_tokens, request_generation_tokens, request_max_num_generation_tokens, request_params_n,
        request_params_max_tokens, request_num_preemptions, iteration_tokens_total, kv_block_lifetime_seconds,
        kv_block_idle_before_evict_seconds, kv_block_reuse_gap_seconds.
      finished: requests that ended, by finish reason ("stop", "length", "abort", "error").
      num_prompt_tokens: of requests that ended.
      num_cached_prompt_tokens: those of them that were found in the prefix cache.
      num_refused: requests that were taken, and refused when the form of their output was compiled or followed.
      num_restarts: of the engine, since the client was made.
      is_paused: see `EngineClient.pause`.
    """

    stats: EngineStats
    histograms: Mapping[str, HistogramSnapshot]
    finished: Mapping[FinishReason, int]
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_refused: int
    num_restarts: int
    is_paused: bool


class RequestStream(Protocol):
    """The answers to a request as they grow; an asynchronous iterator over lists of `Delta`.

    Each list holds all that came since the one before, so all of a step and, for a slow reader, of several steps; an
    answer may then have several deltas in it, in order. After the last list the iteration ends. Leaving the iteration
    early does not end the request; `aclose` does.

    Attributes:
      request_id: as given, or as made up.
      num_cached_tokens: prompt tokens found in the prefix cache; right from the first list on.
      prompt_logprobs: one entry a token of the prompt, `None` for its first token, if asked for; from the first list
        on.
      num_preemptions: how often it lost its pages; right at the end.
      error: what went wrong, with finish_reason "error"; at the end.
      timing: of the request; `None` until it ended.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def error(self) -> str | None: ...
    @property
    def timing(self) -> RequestTiming | None: ...

    def __aiter__(self) -> AsyncIterator[list[Delta]]: ...
    async def __anext__(self) -> list[Delta]:
        """What came since the last call, at least one delta; waits for it.

        Raises:
          EngineFailedError: the engine failed, or was closed, before the request ended.
        """
        ...

    async def aclose(self) -> None:
        """Ends the request, if it has not ended; its pages are free within a step or two. Idempotent."""
        ...


class EngineClient(Protocol):
    """An engine. All methods are called from one event loop.

    Attributes:
      info: what does not change; known once the engine is ready for the first time.
      state: "starting" (loading or compiling), "ready", "restarting" (a failed step or process is being replaced),
        "dead" (it failed too often; it stays so), "closed". New requests are taken in "ready" alone.
      alive: `state` is "ready": what `/health` says.
      failure: why it is restarting or dead, in words that hold no prompt; `None` else.
      is_paused: see `pause`.
      num_live: requests of this client that have not ended.
    """

    @property
    def info(self) -> EngineInfo: ...
    @property
    def state(self) -> EngineState: ...
    @property
    def alive(self) -> bool: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def is_paused(self) -> bool: ...
    @property
    def num_live(self) -> int: ...

    async def generate(
        self,
        prompt: AbstractSequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_s: float | None = None,
    ) -> Output:
        """Serves a request to its end. A task that is cancelled while it waits here ends its request.

        Args:
          prompt: token ids.
          params: how to sample; `SamplingParams()` if left out. Beam search and `best_of` work here alone.
          request_id: unique among live requests; made up if left out.
          priority: lower is served first, if the policy is "priority"; must be 0 else.
          cache_salt: KV is shared with requests of the same salt only.
          arrival_s: when the request arrived (`time.monotonic()`); now, if left out.

        Raises:
          RequestError: it is refused; other requests go on.
          EngineFailedError: the engine is not ready, or failed before the request ended.
        """
        ...

    async def stream(
        self,
        prompt: AbstractSequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_s: float | None = None,
    ) -> RequestStream:
        """Begins a request; returns once the engine has taken it, so that what it refuses is refused here.

        Arguments and errors as in `generate`.
        """
        ...

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """Ends requests at once, all if none are named; those who wait for them get what was produced, and "abort".

        Returns:
          How many of them were live.
        """
        ...

    async def report(self) -> EngineReport:
        """Counters, histograms and the pool in sum. Raises EngineFailedError unless the engine is ready."""
        ...

    async def picture(self) -> PoolPicture:
        """The pool page by page, and who holds them. Raises EngineFailedError unless the engine is ready."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; what runs keeps its pages."""
        ...

    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Stops stepping, until `resume`; requests that come meanwhile wait in the queue. The modes are vLLM's.

        Args:
          mode: what becomes of live requests: "abort" ends them; "wait" serves them to their end first (requests that
            come in that time wait for `resume`); "keep" freezes them with their pages, and `resume` goes on with them.
          clear_cache: forget cached prefixes once paused, as for new weights.
        """
        ...

    async def resume(self) -> None:
        """Goes on after `pause`; nothing happens if the engine is not paused."""
        ...

    async def close(self) -> None:
        """Ends all requests and the engine; its memory is given back. Idempotent."""
        ...
