"""`Collector`: the results of steps -> the outputs of requests."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jpaged.delta import StreamNews, StreamStart
from jpaged.metrics import PageLives
from jpaged.output_builder import OutputBuilder
from jpaged.request import Output, TokenLogprobs
from jpaged.request_metrics import RequestMetrics
from jpaged.scheduler import Scheduler
from jpaged.sequence import HANDLE, LAST_TOKEN_NS, STREAM, WATCH, Sequence, SequenceGroup, SequenceStatus
from jpaged.step_outputs import DispatchedStep, read_logprobs, read_prompt_logprobs
from jpaged.step_plan import StepPlan
from jpaged.timing import RequestTiming
from jpaged.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

FINISHED = SequenceStatus.FINISHED
Streaming = bool | Literal["deltas"]
Gaps = Counter[tuple[int, int]]  # requests that got tokens, by when they got those before, and how many


@dataclass(eq=False)
class _Live:
    """What is kept of a request while it lives; `_s`: as in `RequestTiming`."""

    group: SequenceGroup
    builder: OutputBuilder
    stream: Streaming
    told: bool = False
    scheduled_s: float | None = None
    first_token_s: float | None = None

    @property
    def last_token_ns(self) -> int:
        """When the last token of any answer was read; 0: none was."""
        return max(seq.last_token_ns for seq in self.group.seqs)

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of its tokens are read."""
        return self.group.seqs[0].num_logprobs >= 0

    def timing(self) -> RequestTiming:
        """Of a request that ends now."""
        return RequestTiming(
            arrival_s=self.group.request.arrival_time_s,
            scheduled_s=self.scheduled_s,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_ns / 1e9 or None,
            finished_s=time.monotonic(),
        )


class Collector:
    """Holds the unfinished requests, and gives their outputs as steps advance them.

    Most tokens are only counted, all rows of a step at once. The text of a request is made when it is shown: at its
    end, or, if it streams, with each step. Only where there are stop strings, log-probabilities or several answers is
    each token handled by itself (`Sequence.watch`).

    Args:
      scheduler: told what a step sampled, and of stop strings.
      tokenizer: `None`: token ids only.
      pages: of the pool.

    Attributes:
      num_generated_tokens: tokens that were sampled for requests so far.
      num_finished: requests that have ended.
      metrics: how long they took.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None, pages: PageLives | None = None):
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._live: dict[str, _Live] = {}
        self._num_with_logprobs = 0
        self._num_with_prompt_logprobs = 0
        self._news = StreamNews([], [])
        self.metrics = RequestMetrics(pages)
        self.num_generated_tokens = 0
        self.num_finished = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __len__(self) -> int:
        return len(self._live)

    def open(self, group: SequenceGroup, prompt: str | None, *, stream: Streaming) -> None:
        """A new request, which the scheduler has taken. `stream`: as in `Engine.add`."""
        builder = OutputBuilder(group, prompt, self._tokenizer)
        live = self._live[group.request.request_id] = _Live(group, builder, stream)
        params = group.request.params
        self._num_with_logprobs += live.wants_logprobs
        self._num_with_prompt_logprobs += params.prompt_logprobs is not None
        handles = params.stop or live.wants_logprobs or params.num_sequences > 1
        group.seqs[0].watch = HANDLE if handles else STREAM if stream else 0

    def begin(self, plan: StepPlan) -> None:
        """The step of this plan is dispatched."""
        now = time.monotonic() if plan.admitted else 0.0
        for seq in plan.admitted:
            live = self._live.get(seq.request.request_id)
            if live is not None and live.scheduled_s is None:
                live.scheduled_s = now
        self.metrics.step(plan.num_tokens, plan.num_steps)

    def take_news(self) -> StreamNews:
        """What came for the requests that stream deltas since the last call."""
        news, self._news = self._news, StreamNews([], [])
        return news

    def abort(self, request_id: str) -> Output | None:
        """Ends a request at once; what it had produced, or `None` if no such request lives."""
        live = self._live.get(request_id)
        if live is None:
            return None
        ending = live.group.live
        self._scheduler.abort(request_id)
        return self._close(live, ending)

    def refuse(self, group: SequenceGroup, error: str) -> Output:
        """Ends a request that turned out to be none that can be served; `error` says why."""
        live, ending = self._live[group.request.request_id], group.live
        live.builder.error = error
        for seq in ending:
            self._scheduler.finish(seq, "error")
        return self._close(live, ending)

    def drop_all(self) -> None:
        """Ends all requests without an output."""
        for request_id in list(self._live):
            self._scheduler.abort(request_id)
        self._live.clear()
        self._num_with_logprobs = self._num_with_prompt_logprobs = 0
        self._news = StreamNews([], [])

    def collect(self, done: DispatchedStep, token_ids: np.ndarray) -> list[Output]:
        """Takes the results of a step.

        Args:
          done: the step; all steps before it have been taken.
          token_ids: what it sampled, on the host.

        Returns:
          Outputs of requests that ended, and of streaming requests that advanced.
        """
        plan, now_ns = done.plan, time.monotonic_ns()
        logprobs = read_logprobs(plan, done.outputs) if self._num_with_logprobs else _no_logprobs
        if self._num_with_prompt_logprobs:
            self._set_prompt_logprobs(done)

        def candidates(row: int) -> tuple[tuple[int, float], ...]:
            found = logprobs(row, 0)
            return found.top if found is not None else ()

        tokens, rare, ended_rows = self._scheduler.update(plan, plan.new_tokens(token_ids), candidates)
        gaps: Gaps = Counter()
        ended: dict[str, _Live] = {}
        advanced: dict[str, _Live] = {}
        others, streams = self._count(plan, tokens, rare, now_ns, gaps)
        for row in streams:
            request_id = plan.seqs[row].group.request.request_id
            advanced[request_id] = self._live[request_id]
        for row in others:
            seq, new = plan.seqs[row], tokens[row]
            group = seq.group
            request_id = group.request.request_id
            live = self._live.get(request_id)
            if live is None or live.group is not group:
                continue
            if new:
                last_ns = live.last_token_ns
                if not last_ns:
                    live.first_token_s = now_ns / 1e9
                elif last_ns != now_ns:  # it is, where another answer got a token in this step
                    gaps[last_ns, len(new)] += 1
                seq.last_token_ns = now_ns
                self.num_generated_tokens += len(new)
            elif group.beam is not None and live.first_token_s is None and plan.samples[row]:
                live.first_token_s = now_ns / 1e9
            ended_now = row in ended_rows
            try:  # the fault of one request ends that request alone
                if new and seq.watch == HANDLE and self._handle(live, seq, row, new, logprobs):
                    ended_now = True
                if ended_now and live.builder.error is None:
                    live.builder.finish(seq)
            except Exception as error:
                self._fail(live, error)
                ended_now = True
            if group.status is FINISHED:
                ended[request_id] = live  # other answers of it may have rows further down
            elif live.stream and (new or ended_now):
                advanced[request_id] = live
        for (last_ns, num_new), times in gaps.items():
            self.metrics.gap((now_ns - last_ns) / 1e9, times, num_new)
        outputs = [self._close(live) for live in ended.values()]
        for request_id, live in advanced.items():
            if request_id in ended:
                continue
            try:  # text is made here
                if live.stream == "deltas":
                    self._tell(live)
                else:
                    outputs.append(live.builder.output())
            except Exception as error:
                self._fail(live, error)
                outputs.append(self._close(live))
        return outputs

    def _handle(
        self, live: _Live, seq: Sequence, row: int, new: list[int], logprobs: Callable[[int, int], TokenLogprobs | None]
    ) -> bool:
        """Gives the builder a sequence's new tokens; whether a stop string ended it, before the last of them maybe."""
        for place, token in enumerate(new):
            rest = len(new) - place - 1
            ends = not rest and seq.finish_reason == "stop"
            stop = live.builder.add_token(seq, token, logprobs(row, place), ends=ends)
            if stop is not None:
                self._scheduler.finish(seq, "stop", stop, num_dropped=rest)
                self.num_generated_tokens -= rest
                return True
        return False

    def _count(
        self, plan: StepPlan, tokens: list[list[int]], rare: list[int], now_ns: int, gaps: Gaps
    ) -> tuple[list[int], list[int]]:
        """Counts the rows whose sequence merely got more tokens.

        Returns:
          The other rows; and the rows that were counted and stream.
        """
        if len(rare) == plan.num_seqs:
            return rare, []
        table, entries, others = self._scheduler.table.counters, plan.entries, []
        counters = table.take(entries, axis=0)
        lasts, watch = counters[:, LAST_TOKEN_NS], counters[:, WATCH]
        quiet = (lasts > 0) & (watch != HANDLE)
        if rare:
            quiet[rare] = False
        num_quiet = int(np.count_nonzero(quiet))
        if num_quiet != len(quiet):
            others = np.flatnonzero(~quiet).tolist()
            entries, lasts = entries[quiet], lasts[quiet]
        if num_quiet:
            table[entries, LAST_TOKEN_NS] = now_ns
            last, num_new = int(lasts[0]), len(tokens[int(quiet.argmax())])
            if plan.is_even and np.count_nonzero(lasts == last) == num_quiet:
                gaps[last, num_new] = num_quiet
                self.num_generated_tokens += num_quiet * num_new
            else:
                lens = [len(tokens[row]) for row in np.flatnonzero(quiet).tolist()]
                gaps.update(zip(lasts.tolist(), lens, strict=True))
                self.num_generated_tokens += sum(lens)
        streams = quiet & (watch == STREAM)
        return others, np.flatnonzero(streams).tolist() if np.count_nonzero(streams) else []

    def _tell(self, live: _Live) -> None:
        """Adds what is new of a request to the news."""
        name = live.group.request.request_id
        if not live.told:
            live.told = True
            start = StreamStart(name, live.group.seqs[0].num_cached_tokens, live.builder.prompt_logprobs())
            self._news.starts.append(start)
        for delta in live.builder.deltas():
            self._news.deltas.append((name, delta))

    def _fail(self, live: _Live, error: Exception) -> None:
        # Its message may quote the prompt or the answer, which neither clients of others nor the log may see.
        frames, kind = error.__traceback__, type(error).__name__
        while frames is not None and frames.tb_next is not None:
            frames = frames.tb_next
        where = f"{frames.tb_frame.f_code.co_filename}:{frames.tb_lineno}" if frames is not None else "?"
        name = live.group.request.request_id
        logger.error("an internal error (%s at %s) ended request %r; others go on", kind, where, name)
        live.builder.error = f"an internal error ({kind}) ended this request; the engine's log says where"
        for seq in live.group.seqs:
            self._scheduler.finish(seq, "error")

    def _close(self, live: _Live, ending: AbstractSequence[Sequence] = ()) -> Output:
        del self._live[live.group.request.request_id]
        self._num_with_logprobs -= live.wants_logprobs
        self._num_with_prompt_logprobs -= live.group.request.params.prompt_logprobs is not None
        self.num_finished += 1
        for seq in ending:
            live.builder.finish(seq)
        if live.builder.error is None and any(seq.finish_reason == "error" for seq in live.group.seqs):
            live.builder.error = live.group.error or (
                "the model produced NaN, or no token was left to sample: check the weights, the dtype, logit_bias and "
                "allowed_token_ids"
            )
        if live.stream == "deltas":
            self._tell(live)
        output = live.builder.output(live.timing())
        self.metrics.ended(output, live.group.request.params)
        if live.group.beam is not None:
            self.num_generated_tokens += sum(len(completion.token_ids) for completion in output.completions)
        return output

    def _set_prompt_logprobs(self, done: DispatchedStep) -> None:
        """Gives the requests that ask what they asked for; those whose model produced NaN end."""
        for seq, position, logprobs in read_prompt_logprobs(done.plan, done.outputs):
            live = self._live.get(seq.request.request_id)
            if live is None or live.group is not seq.group:
                continue
            live.builder.set_prompt_logprobs(position, logprobs)
            if math.isnan(logprobs.logprob):
                for other in live.group.live:
                    self._scheduler.finish(other, "error")


def _no_logprobs(row: int, place: int) -> None:
    return None
