"""`Collector`: the results of steps -> the outputs of requests."""

import logging
import math
import time
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jpaged.delta import StreamNews, StreamStart
from jpaged.output_builder import OutputBuilder
from jpaged.request import Output
from jpaged.request_metrics import RequestMetrics
from jpaged.scheduler import Scheduler
from jpaged.sequence import Sequence, SequenceGroup, SequenceStatus
from jpaged.step import DispatchedStep, read_logprobs, read_prompt_logprobs
from jpaged.step_plan import StepPlan
from jpaged.timing import RequestTiming
from jpaged.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

FINISHED = SequenceStatus.FINISHED
Streaming = bool | Literal["deltas"]


@dataclass(eq=False)
class _Live:
    """What is kept of a request while it lives; `_s`: as in `RequestTiming`."""

    group: SequenceGroup
    builder: OutputBuilder
    stream: Streaming
    told: bool = False
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    def timing(self) -> RequestTiming:
        """Of a request that ends now."""
        return RequestTiming(
            arrival_s=self.group.request.arrival_time_s,
            scheduled_s=self.scheduled_s,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            finished_s=time.monotonic(),
        )


class Collector:
    """Holds the unfinished requests, and gives their outputs as steps advance them.

    Args:
      scheduler: told what a step sampled, and of stop strings.
      tokenizer: `None`: token ids only.

    Attributes:
      num_generated_tokens: tokens that were sampled for requests so far.
      num_finished: requests that have ended.
      metrics: how long they took.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None):
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._live: dict[str, _Live] = {}
        self._num_with_prompt_logprobs = 0
        self._news = StreamNews([], [])
        self.metrics = RequestMetrics()
        self.num_generated_tokens = 0
        self.num_finished = 0

    @property
    def request_ids(self) -> list[str]:
        """Of the unfinished requests, in the order of arrival."""
        return list(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __len__(self) -> int:
        return len(self._live)

    def open(self, group: SequenceGroup, prompt: str | None, *, stream: Streaming) -> None:
        """A new request, which the scheduler has taken. `stream`: as in `Engine.add`."""
        builder = OutputBuilder(group, prompt, self._tokenizer)
        self._live[group.request.request_id] = _Live(group, builder, stream)
        self._num_with_prompt_logprobs += group.request.params.prompt_logprobs is not None

    def begin(self, plan: StepPlan) -> None:
        """The step of this plan is dispatched."""
        now = time.monotonic() if plan.admitted else 0.0
        for seq in plan.admitted:
            live = self._live.get(seq.request.request_id)
            if live is not None and live.scheduled_s is None:
                live.scheduled_s = now
        self.metrics.step(plan.num_tokens)

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
        self._num_with_prompt_logprobs = 0
        self._news = StreamNews([], [])

    def collect(self, done: DispatchedStep, token_ids: np.ndarray) -> list[Output]:
        """Takes the results of a step.

        Args:
          done: the step; all steps before it have been taken.
          token_ids: what it sampled, on the host.

        Returns:
          Outputs of requests that ended, and of streaming requests that advanced.
        """
        plan, now = done.plan, time.monotonic()
        gaps: dict[float, int] = {}  # requests that got a token, by when they got the one before
        logprobs = read_logprobs(plan, done.outputs)
        if self._num_with_prompt_logprobs:
            self._set_prompt_logprobs(done)

        def candidates(row: int) -> tuple[tuple[int, float], ...]:
            found = logprobs(row)
            return found.top if found is not None else ()

        ended_before = [seq.status is FINISHED for seq in plan.seqs]
        new_tokens = self._scheduler.update(plan, token_ids[: plan.num_seqs].tolist(), candidates)
        ended: dict[str, _Live] = {}
        advanced: dict[str, _Live] = {}
        for row, (seq, token) in enumerate(zip(plan.seqs, new_tokens, strict=True)):
            group = seq.group
            request_id = group.request.request_id
            live = self._live.get(request_id)
            if live is None or live.group is not group:
                continue
            if token is not None:
                if (last := live.last_token_s) is None:
                    live.first_token_s = now
                elif last != now:  # it is, where another answer got a token in this step
                    gaps[last] = gaps.get(last, 0) + 1
                live.last_token_s = now
                self.num_generated_tokens += 1
            try:  # the fault of one request ends that request alone
                if token is not None:
                    stop = live.builder.add_token(seq, token, logprobs(row), ends=seq.finish_reason == "stop")
                    if stop is not None:
                        self._scheduler.finish(seq, "stop", stop)
                ended_now = seq.status is FINISHED and not ended_before[row]
                if ended_now and live.builder.error is None:
                    live.builder.finish(seq)
            except Exception as error:
                self._fail(live, error)
                ended_now = True
            if group.status is FINISHED:
                ended[request_id] = live  # other answers of it may have rows further down
            elif live.stream and (token is not None or ended_now):
                advanced[request_id] = live
        for last, times in gaps.items():
            self.metrics.gap(now - last, times)
        outputs = [self._close(live) for live in ended.values()]
        for request_id, live in advanced.items():
            if live.stream == "deltas":
                self._tell(live)
            elif request_id not in ended:
                outputs.append(live.builder.output())
        return outputs

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
