"""`Collector`: the results of steps -> the outputs of requests."""

import math
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

import numpy as np

from jpaged.output_builder import OutputBuilder
from jpaged.request import Output, TokenLogprobs
from jpaged.scheduler import Scheduler
from jpaged.sequence import Sequence, SequenceGroup
from jpaged.step import DispatchedStep, read_logprobs, read_prompt_logprobs
from jpaged.tokenizer import Tokenizer


@dataclass(eq=False)
class _Live:
    """What is kept of a request while it lives."""

    group: SequenceGroup
    builder: OutputBuilder
    stream: bool


class Collector:
    """Holds the unfinished requests, and gives their outputs as steps advance them.

    Args:
      scheduler: told what a step sampled, and of stop strings.
      tokenizer: `None`: token ids only.

    Attributes:
      num_generated_tokens: tokens that were sampled for requests so far.
      num_finished: requests that have ended.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None):
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._live: dict[str, _Live] = {}
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

    def open(self, group: SequenceGroup, prompt: str | None, *, stream: bool) -> None:
        """A new request, which the scheduler has taken."""
        builder = OutputBuilder(group, prompt, self._tokenizer)
        self._live[group.request.request_id] = _Live(group, builder, stream)

    def abort(self, request_id: str) -> Output | None:
        """Ends a request at once; what it had produced, or `None` if no such request lives."""
        live = self._live.get(request_id)
        if live is None:
            return None
        ending = live.group.live
        self._scheduler.abort(request_id)
        return self._close(live, ending)

    def drop_all(self) -> None:
        """Ends all requests without an output."""
        for request_id in list(self._live):
            self._scheduler.abort(request_id)
        self._live.clear()

    def collect(self, done: DispatchedStep, token_ids: np.ndarray) -> list[Output]:
        """Takes the results of a step.

        Args:
          done: the step; all steps before it have been taken.
          token_ids: what it sampled, on the host.

        Returns:
          Outputs of requests that ended, and of streaming requests that advanced.
        """
        plan = done.plan
        logprobs = read_logprobs(plan, done.outputs)
        self._set_prompt_logprobs(done)

        def candidates(row: int) -> tuple[tuple[int, float], ...]:
            found = logprobs(row)
            return found.top if found is not None else ()

        ended_before = [seq.is_finished for seq in plan.seqs]
        new_tokens = self._scheduler.update(plan, token_ids[: plan.num_seqs].tolist(), candidates)
        ended: dict[str, _Live] = {}
        advanced: dict[str, _Live] = {}
        for row, (seq, token) in enumerate(zip(plan.seqs, new_tokens, strict=True)):
            request_id = seq.group.request.request_id
            live = self._live.get(request_id)
            if live is None or live.group is not seq.group:
                continue
            if token is not None:
                try:
                    self._take_token(live, seq, token, logprobs(row))
                except Exception as error:  # the fault of one request ends that request alone
                    self._fail(live, f"{type(error).__name__}: {error}")
            if seq.is_finished and not ended_before[row] and live.builder.error is None:
                live.builder.finish(seq)
            if live.group.is_finished:
                ended[request_id] = live  # other answers of it may have rows further down
            elif live.stream and token is not None:
                advanced[request_id] = live
        outputs = [self._close(live) for live in ended.values()]
        return outputs + [live.builder.output() for request_id, live in advanced.items() if request_id not in ended]

    def _take_token(self, live: _Live, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        self.num_generated_tokens += 1
        stop = live.builder.add_token(seq, token, logprobs, ends=seq.finish_reason == "stop")
        if stop is not None:
            self._scheduler.finish(seq, "stop", stop)

    def _fail(self, live: _Live, error: str) -> None:
        live.builder.error = error
        for seq in live.group.seqs:
            self._scheduler.finish(seq, "error")

    def _close(self, live: _Live, ending: AbstractSequence[Sequence] = ()) -> Output:
        del self._live[live.group.request.request_id]
        self.num_finished += 1
        for seq in ending:
            live.builder.finish(seq)
        if live.builder.error is None and any(seq.finish_reason == "error" for seq in live.group.seqs):
            live.builder.error = (
                "the model produced NaN, or no token was left to sample: check the weights, the dtype and logit_bias"
            )
        output = live.builder.output()
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
