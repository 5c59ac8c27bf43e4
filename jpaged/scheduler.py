"""`Scheduler`: which sequences take part in the next step (`Planner`), and what becomes of them when it was taken.

Plans may run ahead of results: `plan` counts the tokens of a step as computed, and its samples as pending, when the
step is planned; `update` fills in the sampled tokens whenever they have been read. Pages and state indices are given
back at once, even if steps in flight still write to them. That is safe because the device runs steps in order: whoever
is given the page next writes to it in a later step, before anything reads it. For the same reason pages can be found in
the prefix cache as soon as the step that fills them is planned, by rows of that very step too.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

import numpy as np

from jpaged.beam_steps import BeamSteps, Candidates
from jpaged.config import SchedulerConfig
from jpaged.drafts import FAILED, NO_TOKEN
from jpaged.errors import RequestError
from jpaged.group_queues import GroupQueues
from jpaged.limits import Limits
from jpaged.memory_manager import MemoryManager
from jpaged.planner import Planner
from jpaged.preemption import PreemptionCosts
from jpaged.request import FinishReason
from jpaged.running_table import RunningTable
from jpaged.sequence import LIMIT, NUM_COMPUTED, RUN, Sequence, SequenceGroup, SequenceStatus
from jpaged.speculation import Speculation
from jpaged.step_plan import StepPlan

FINISHED = SequenceStatus.FINISHED
_FEW_ROWS = 2  # so many are sooner dealt with one by one than all at once


class RowResults(NamedTuple):
    """What a step brought, row by row.

    Attributes:
      tokens: those that were appended to the row's sequence, in order; none if the row did not sample, failed at once,
        belongs to a beam search, or if its sequence had ended before.
      rare: rows of which there may be more, or less, to say than that their sequence got tokens and goes on.
      ended: those of them whose sequence ended with this step.
    """

    tokens: list[list[int]]
    rare: list[int]
    ended: set[int]


class Scheduler:
    """Owns sequences between their arrival and their end.

    Args:
      config: rows and tokens of a step at the most, and the policies. Its `max_model_len`, which may be unresolved, and
        its `preemption_costs`, which may no longer be there, are not read.
      memory: where pages come from.
      max_model_len: tokens of a sequence at the most, prompt and output together.
      eos_token_ids: token ids that end every output, unless its request ignores them.
      token_buckets: sizes that steps are padded to, ascending; where there are none, steps are not cut to fit.
      speculation: lets rows guess; `None`: none does.
      decode_steps: as in `EngineConfig`.
      costs: what "auto" preempts by; `None`: by computing again.

    Attributes:
      num_guessing_rows: rows that guessed.
      num_guesses: tokens that they guessed.
      num_hits: those of them that came true.

    Raises:
      ConfigError: `max_model_len` leaves no room for a prompt and an output token.

    Example:
      >>> from jpaged.page_allocator import PageAllocator
      >>> from jpaged.request import Request, SamplingParams
      >>> memory = MemoryManager(PageAllocator(num_pages=9, page_size=4))
      >>> scheduler = Scheduler(SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8), memory, max_model_len=32)
      >>> request = Request(request_id="a", prompt_token_ids=(5, 6, 7), params=SamplingParams(max_tokens=2))
      >>> group = SequenceGroup(request)
      >>> scheduler.add(group)
      >>> while (plan := scheduler.plan()) is not None:
      ...     tokens = [8] * plan.num_seqs  # what the model would sample
      ...     _ = scheduler.update(plan, tokens)
      >>> group.seqs[0].output_token_ids, group.seqs[0].finish_reason
      ([8, 8], 'length')

    Reference:
      Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models", OSDI 2022 (batches
      change with every step); Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with
      Sarathi-Serve", OSDI 2024 (chunked prefill); Kwon et al., "Efficient Memory Management for Large Language Model
      Serving with PagedAttention", SOSP 2023 (sequence groups, preemption by recomputation and by swapping).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        memory: MemoryManager,
        *,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        token_buckets: AbstractSequence[int] = (),
        speculation: Speculation | None = None,
        decode_steps: int = 1,
        costs: PreemptionCosts | None = None,
    ) -> None:
        self._config, self._memory = config, memory
        self._eos_token_ids = frozenset(eos_token_ids)
        self._stop_ids = Counter(dict.fromkeys(self._eos_token_ids, 1))  # of any request that is served
        self._chunk = min(config.max_chunk_tokens or config.max_step_tokens, config.max_step_tokens)
        self._limits = Limits(memory, max_model_len=max_model_len, max_num_seqs=config.max_num_seqs, chunk=self._chunk)
        self._queues = queues = GroupQueues(config, memory, chunk=self._chunk, costs=costs)
        self._beams = BeamSteps(queues)
        options = {"token_buckets": token_buckets, "speculation": speculation, "decode_steps": decode_steps}
        self._planner = Planner(config, memory, queues, self._beams, chunk=self._chunk, **options)
        self._num_arrived = 0
        self.num_guessing_rows = self.num_guesses = self.num_hits = 0

    @property
    def waiting(self) -> tuple[SequenceGroup, ...]:
        """Groups that hold no pages of the device, the next to be served first."""
        return (*self._queues.preempted, *self._queues.waiting)

    @property
    def running(self) -> tuple[SequenceGroup, ...]:
        """Groups that hold pages, in the order of service."""
        return tuple(self._queues.running)

    @property
    def running_seqs(self) -> list[Sequence]:
        """The unfinished sequences of running groups, in the order of service."""
        return self._queues.running_rows.seqs

    @property
    def table(self) -> RunningTable:
        """The counters of running sequences."""
        return self._queues.table

    @property
    def has_work(self) -> bool:
        """Whether any group is unfinished."""
        return bool(self._queues.groups)

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the scheduler was made."""
        return self._queues.num_preemptions

    @property
    def num_swaps(self) -> int:
        """Those of them that moved the pages to the host."""
        return self._queues.num_swaps

    @property
    def num_tokens_held(self) -> int:
        """Token slots of used pages that hold a token; the other slots are wasted. A shared page counts once, one that
        is pinned as a whole."""
        size, running = self._memory.allocator.page_size, self._queues.running_rows
        num_empty = int((-self.table.counters[running.entries, NUM_COMPUTED] % size).sum())
        if running.siblings:  # only they can share a page that is not full
            last = [(seq.pages[-1], -seq.num_computed_tokens % size) for seq in running.siblings if seq.pages]
            num_empty -= sum(empty for _, empty in last) - sum(dict(last).values())
        return self._memory.allocator.num_used * size - num_empty

    def add(self, group: SequenceGroup) -> None:
        """Takes a new group.

        Raises:
          PromptTooLongError: it can never fit into the context window or into the page pool.
          RequestError: its prompt is empty, its id is in use, it has already ended, it asks for too many sequences, or
            to be pinned where others that are being served need the room.
        """
        request = group.request
        if request.request_id in self._queues.groups:
            raise RequestError(f"request {request.request_id!r} is still being served: use another request_id")
        if group.is_finished:
            raise RequestError(f"request {request.request_id!r} has already ended: make a new SequenceGroup of it")
        self._limits.require_fits(request)
        if request.pin:
            self._limits.require_pin(request, self._queues.groups.values())
        seq, params = group.seqs[0], request.params
        seq.limit = group.limit = self._limits.num_tokens(request)
        seq.mask_position = None if params.structured is None else -1
        ends = seq.mask_position is not None or not params.ignore_eos
        seq.stop_ids = (self._eos_token_ids if ends else frozenset()) | set(params.stop_token_ids)
        if params.use_beam_search:
            self._beams.begin(group)
        if params.num_sequences > 1:
            seq.limit = 0  # so that `plan` treats it apart: it forks, or the search must first decide on its token
        aged = request.priority * self._config.priority_aging_s + request.arrival_time_s
        group.rank = (aged if self._config.policy == "priority" else 0.0, self._num_arrived)
        self._num_arrived += 1
        if request.pin:
            self._memory.promise_pin(request.request_id, seq.num_prompt_tokens)
        self._stop_ids.update(seq.stop_ids)
        self._queues.add(group)

    def plan(self) -> StepPlan | None:
        """Decides the next step and takes the pages that it needs, no more.

        The plan's tokens count as computed from here on, and its samples as pending.

        Returns:
          The plan; `None` if there is nothing to compute before results in flight are read, or nothing at all. A plan
          without rows moves pages.
        """
        return self._planner.plan()

    def update(
        self,
        plan: StepPlan,
        token_ids: AbstractSequence[int] | np.ndarray,
        candidates: Callable[[int], Candidates] | None = None,
    ) -> RowResults:
        """Takes the results of a step; steps come in the order in which they were planned.

        An output ends, in this order: at an end-of-sequence id (unless ignored), at one of its stop token ids (neither
        before `min_tokens`), at its length limit; tokens after that one are dropped. Where a form is asked for, its
        masks decide when it may end. A sequence that ended before, in `abort` for instance, is skipped: the tokens that
        were in flight then are dropped.

        Args:
          plan: the step's plan.
          token_ids: one entry a row: the sampled token; or a line of them a row, in order, as many as the plan counts
            on, but for rows that guess, which have `NO_TOKEN` after their last one. `FAILED` if the logits were NaN,
            which ends the sequence with finish_reason "error". Not read for rows that do not sample.
          candidates: gives the likeliest tokens of a row, with their log-probabilities, best first; for beam searches.
        """
        sampled = np.asarray(token_ids)
        if len(sampled) != len(plan.seqs):
            raise ValueError(f"got {len(sampled)} token ids, expected {len(plan.seqs)}, one for each row of the plan")
        if sampled.ndim == 1:
            sampled = sampled[:, None]
        tokens: list[list[int]] = sampled.tolist()
        if plan.drafts is not None or not plan.is_even:
            num_new = np.count_nonzero(sampled != NO_TOKEN, axis=1)
            tokens = [row[:count] for row, count in zip(tokens, num_new.tolist(), strict=True)]
            if plan.drafts is not None:
                self._take_back(plan, num_new)
        rare = self._update_plain(plan, sampled, tokens) if len(tokens) > _FEW_ROWS else [*range(len(tokens))]
        live = [row for row in rare if plan.seqs[row].status is not FINISHED]
        for row in rare:
            seq = plan.seqs[row]
            if seq.status is FINISHED or not plan.samples[row] or not seq.limit:
                new, tokens[row] = tokens[row], []
                if seq.status is not FINISHED:
                    self._update_rarely(plan, row, new[0], candidates)
            else:
                tokens[row] = self._take(seq, tokens[row])
        return RowResults(tokens, rare, {row for row in live if plan.seqs[row].status is FINISHED})

    def _update_plain(self, plan: StepPlan, sampled: np.ndarray, tokens: list[list[int]]) -> list[int]:
        """Appends the tokens of rows that live, sampled and go on, all at once; gives the other rows."""
        counters = self.table.counters.take(plan.entries, axis=0)
        plain = plan.samples & (counters[:, RUN] == plan.versions[:, 1])
        plain &= plan.positions + sampled.shape[1] < counters[:, LIMIT]
        plain &= (sampled != FAILED).all(axis=1) if sampled.shape[1] > 1 else sampled[:, 0] != FAILED
        if not self._stop_ids.keys().isdisjoint(sampled.ravel().tolist()):
            plain &= [self._stop_ids.keys().isdisjoint(row) for row in tokens]
        if np.count_nonzero(plain) == len(tokens):
            for seq, new in zip(plan.seqs, tokens, strict=True):
                seq.tokens += new
            return []
        for row in np.flatnonzero(plain).tolist():
            plan.seqs[row].tokens += tokens[row]
        return np.flatnonzero(~plain).tolist()

    def _take(self, seq: Sequence, new: list[int]) -> list[int]:
        """Appends tokens of a sequence one by one, to the one that ends it; those that were appended."""
        for index, token in enumerate(new):
            if token == FAILED:
                self.finish(seq, "error")
                return new[:index]
            seq.tokens.append(token)
            if token in seq.stop_ids or len(seq.tokens) >= seq.limit:
                self._stop_if_due(seq, token)
                if seq.status is FINISHED:
                    return new[: index + 1]
        return new

    def _take_back(self, plan: StepPlan, num_new: np.ndarray) -> None:
        """What a step did for guesses that it did not bear out counts as never done."""
        assert plan.drafts is not None
        self._planner.take_guesses(plan, num_new)
        for row in np.flatnonzero(plan.drafts.counts).tolist():
            seq = plan.seqs[row]
            if seq.run != plan.versions[row, 1]:
                continue  # it has ended, and gave back all that it had
            num_guesses, num_hits = int(plan.drafts.counts[row]), int(num_new[row]) - 1
            self.num_guessing_rows += 1
            self.num_guesses += num_guesses
            self.num_hits += num_hits
            surplus = num_guesses - num_hits
            seq.num_tokens -= surplus
            seq.num_computed_tokens -= surplus
            seq.num_given_tokens = seq.num_tokens  # the device does not know which of its samples was the last
            self._memory.shrink(seq)

    def finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None, *, num_dropped: int = 0
    ) -> None:
        """Ends a sequence and gives back all that it holds; the group ends with its last sequence.

        A sequence that has already ended only gets the new reason: its last token may have reached the length limit
        and completed a stop string too.

        Args:
          seq: the sequence.
          reason, stop_reason: why.
          num_dropped: its last tokens that are not of the output, since it ended before them.
        """
        if num_dropped:
            del seq.tokens[-num_dropped:]
        if seq.status is not FINISHED:
            self._beams.forget(seq)
            self._queues.finish(seq)
            if seq.group.status is FINISHED:
                self._stop_ids.subtract(seq.stop_ids)
                for token in seq.stop_ids:
                    if not self._stop_ids[token]:
                        del self._stop_ids[token]
        seq.finish_reason, seq.stop_reason = reason, stop_reason

    def abort(self, request_id: str) -> bool:
        """Ends all sequences of a request; False if there is none of that id."""
        group = self._queues.groups.get(request_id)
        if group is None:
            return False
        for seq in group.live:
            self.finish(seq, "abort")
        if group.request.pin:
            self._memory.pins.unpin(request_id)
        return True

    def weights_changed(self) -> None:
        """The model's weights are others from the next plan on: what is cached must not be found any more."""
        self._memory.weights_changed(seq for group in self._queues.groups.values() for seq in group.seqs)

    def reset_prefix_cache(self) -> None:
        """Nothing that was computed before is found any more, and pins are dropped; what runs keeps its pages."""
        self._memory.reset_prefix_cache(seq for group in self._queues.groups.values() for seq in group.seqs)

    def abandon_plan(self) -> None:
        """The last plan may not have been carried out: what it was to fill is forgotten. All requests have ended."""
        self._planner.take_guesses()
        self._memory.take_transfers()
        self.reset_prefix_cache()

    def unpin(self, request_id: str) -> bool:
        """Lets the pages of a pinned prompt go, or does not pin them once computed; False if there are none."""
        return self._memory.pins.unpin(request_id)

    def check_invariants(self) -> None:
        """Checks, between two plans, that pages and state indices are held exactly by those who need them.

        Raises:
          PageStateError: they are not.
        """
        self._queues.check_invariants()

    # ------------------------------------------------------------------------------------------ results

    def _stop_if_due(self, seq: Sequence, token: int) -> None:
        params = seq.request.params
        structured = seq.mask_position is not None  # its mask allows no end too early, unless the form leaves no other
        may_stop = structured or params.may_stop(len(seq.tokens) - seq.num_prompt_tokens)
        reason: FinishReason = "stop"
        stop_reason = None
        if may_stop and token in self._eos_token_ids and (structured or not params.ignore_eos):
            pass
        elif may_stop and token in params.stop_token_ids:
            stop_reason = token
        elif len(seq.tokens) >= seq.limit:
            reason = "length"
        else:
            return
        # It may have ended on the device too, between steps of one program, which then left its last token uncomputed.
        seq.num_computed_tokens = min(seq.num_computed_tokens, len(seq.tokens) - 1)
        self.finish(seq, reason, stop_reason)

    def _update_rarely(
        self, plan: StepPlan, row: int, token: int, candidates: Callable[[int], Candidates] | None
    ) -> None:
        """Takes what a row gave that is no plain token: a part of the prompt, NaN, or a step of a beam search."""
        seq = plan.seqs[row]
        group, request = seq.group, seq.request
        if not plan.samples[row]:
            if request.params.max_tokens == 0 and plan.starts[row] + plan.q_lens[row] == seq.num_prompt_tokens:
                kept = not request.pin or self._memory.pins.is_pinned(request.request_id)
                self.finish(seq, "length" if kept else "abort")
            return
        seq.num_tokens -= 1
        if token == FAILED:
            for other in group.live:
                self.finish(other, "error")
            return
        if group.beam is None or candidates is None:
            raise ValueError(f"{request.request_id!r} searches with beams: give the candidates of its rows")
        if self._beams.take(seq, candidates(row)):
            for other in group.seqs:  # without a result no token was left that a beam could go on with
                self.finish(other, "stop" if group.beam.results() else "error")
