"""`Scheduler`: which sequences take part in the next step, with how many tokens, and on which pages.

Continuous batching without phases: the KV of each sequence (`num_computed_tokens`) chases its tokens (`num_tokens`),
and each plan spends one budget of tokens. Running sequences come first, the oldest before the newer: one token each,
or, while a prompt is not computed yet, a chunk of it. What is left admits waiting sequences.

Running sequences followed by waiting ones are always in the order of arrival. That is kept by three rules: only the
head of the queue is admitted, only the newest running sequence is preempted, and it returns to the head of the queue.
So a long prompt at the head holds up shorter ones behind it (head-of-line blocking). This is on purpose: letting them
pass would starve it.

Plans may run ahead of results: `plan` counts the tokens of a step as computed, and its samples as pending, when the
step is planned; `update` fills in the sampled tokens whenever they have been read.

Pages and state indices are given back at once, even if steps in flight still write to them. That is safe because the
device runs steps in order: whoever is given the page next writes to it in a later step, before anything reads it.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable

from jpaged.config import SchedulerConfig
from jpaged.errors import ConfigError, PageStateError, PromptTooLongError, RequestError
from jpaged.page_allocator import PageAllocator
from jpaged.request import FinishReason, Sequence, SequenceStatus
from jpaged.step_plan import PlannedRow, SequenceUpdate, StepPlan


class Scheduler:
    """Owns the sequences between their arrival and their end, and their pages.

    Args:
      config: rows and tokens of a step at the most. Its `max_model_len` is not read: it may be unresolved.
      allocator: where pages come from.
      max_model_len: tokens of a sequence at the most, prompt and output together.
      eos_token_ids: token ids that end every output, unless its request ignores them.

    Raises:
      ConfigError: `max_model_len` leaves no room for a prompt and an output token.

    Example:
      >>> from jpaged.request import Request, SamplingParams
      >>> scheduler = Scheduler(SchedulerConfig(), PageAllocator(9, 16), max_model_len=128)
      >>> seq = Sequence(Request(request_id="a", prompt_token_ids=(5, 6, 7), params=SamplingParams(max_tokens=2)))
      >>> scheduler.add(seq)
      >>> while (plan := scheduler.plan()) is not None:
      ...     tokens = [8 for _ in plan.rows]  # what the model would sample
      ...     _ = scheduler.update(plan, tokens)
      >>> seq.output_token_ids, seq.finish_reason
      ([8, 8], 'length')

    Reference:
      Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models", OSDI 2022 (batches
      change with every step); Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with
      Sarathi-Serve", OSDI 2024 (chunked prefill); Kwon et al., "Efficient Memory Management for Large Language Model
      Serving with PagedAttention", SOSP 2023 (preemption by recomputation).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: PageAllocator,
        *,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        if max_model_len < 2:
            raise ConfigError(f"max_model_len is {max_model_len}, expected at least 2 (a prompt and an output token)")
        self._config = config
        self._allocator = allocator
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        # Keyed by request id, in the order of arrival (waiting) and of admission (running): first, last and any given
        # entry are removed in O(1).
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._running: dict[str, Sequence] = {}
        self._free_state_indices = list(range(config.max_num_seqs))  # a heap
        self._num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no pages yet, or none any more."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return len(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Waiting sequences, the next to be admitted first."""
        return tuple(self._waiting.values())

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Running sequences, the oldest first."""
        return tuple(self._running.values())

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._waiting or self._running)

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the scheduler was made."""
        return self._num_preemptions

    @property
    def num_tokens_held(self) -> int:
        """Tokens whose KV is in the pages of running sequences; the other slots of their pages are wasted."""
        return sum(seq.num_computed_tokens for seq in self._running.values())

    def add(self, seq: Sequence) -> None:
        """Puts a new sequence at the end of the queue.

        Raises:
          PromptTooLongError: it can never fit into the context window or into the page pool.
          RequestError: its prompt is empty, its id is in use, or it has already ended.
        """
        request_id = seq.request.request_id
        if request_id in self._waiting or request_id in self._running:
            raise RequestError(f"request {request_id!r} is still being served: use another request_id")
        if seq.is_finished:
            raise RequestError(f"request {request_id!r} has already ended: make a new Sequence of it")
        self._require_fits(seq)
        self._waiting[request_id] = seq

    def plan(self) -> StepPlan | None:
        """Decides the next step and takes the pages that it needs, no more.

        The plan's tokens count as computed from here on, and its samples as pending. The oldest running sequence is
        never preempted, since alone it always fits; so every plan without results in flight makes progress.

        Returns:
          The plan; `None` if there is nothing to compute before results in flight are read, or nothing at all.
        """
        rows: list[PlannedRow] = []
        preempted: list[Sequence] = []
        admitted: list[Sequence] = []
        budget = self._config.max_num_batched_tokens
        for seq in self.running:
            if seq.status is not SequenceStatus.RUNNING:
                break  # preempted for an older one just now, as were all behind it: none of them has a row yet
            num_tokens = min(self._num_tokens_to_compute(seq), budget)
            if num_tokens and self._make_room(seq, num_tokens, preempted):
                rows.append(self._plan_row(seq, num_tokens))
                budget -= num_tokens
        # Budget left means that no running prompt is unfinished, so nobody else has a claim on the free pages. After
        # a preemption nobody is admitted: the head of the queue has just lost its pages because they were needed. For
        # the same reason it comes back only when somebody else has given pages back, which bounds the recomputation.
        while budget and not preempted and (seq := self._next_admissible()) is not None:
            self._admit(seq)
            admitted.append(seq)
            num_tokens = min(seq.num_tokens, budget)
            seq.pages.extend(self._allocator.allocate(self._allocator.pages_for(num_tokens)))
            rows.append(self._plan_row(seq, num_tokens))
            budget -= num_tokens
        if not rows:
            return None
        rows.sort(key=lambda row: row.num_tokens > 1)  # stable: the order of admission within both kinds
        return StepPlan(tuple(rows), tuple(preempted), tuple(admitted))

    def update(self, plan: StepPlan, token_ids: list[int]) -> list[SequenceUpdate]:
        """Takes the results of a step; steps come in the order in which they were planned.

        An output ends, in this order: at an end-of-sequence id (unless ignored), at one of its stop token ids (neither
        before `min_tokens`), at its length limit. A sequence that ended before, in `abort` for instance, is skipped:
        the token that was in flight then is dropped.

        Args:
          plan: the step's plan.
          token_ids: one entry a row: the sampled token; negative if the logits were NaN, which ends the sequence with
            finish_reason "error". Not read for rows that do not sample.

        Returns:
          One update for each row whose sequence had not ended before, in the order of the rows.
        """
        if len(token_ids) != len(plan.rows):
            raise ValueError(f"got {len(token_ids)} token ids, expected {len(plan.rows)}, one for each row of the plan")
        updates: list[SequenceUpdate] = []
        for index, row in enumerate(plan.rows):
            seq, new_token = row.seq, None
            if seq.is_finished:
                continue
            if row.samples:
                seq.num_pending -= 1
                if token_ids[index] < 0:
                    self.finish(seq, "error")
                else:
                    new_token = token_ids[index]
                    seq.tokens.append(new_token)
                    self._stop_if_due(seq, new_token)
            elif seq.request.params.max_tokens == 0 and row.kv_len == seq.num_prompt_tokens:
                self.finish(seq, "length")
            updates.append(SequenceUpdate(seq, index, new_token))
        return updates

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a sequence and gives back all that it holds.

        A sequence that has already ended only gets the new reason: its last token may have reached the length limit
        and completed a stop string too.
        """
        if not seq.is_finished:
            if seq.status is SequenceStatus.RUNNING:
                del self._running[seq.request.request_id]
                self._release(seq)
            else:
                del self._waiting[seq.request.request_id]
            seq.status = SequenceStatus.FINISHED
            seq.num_pending = 0  # what is still in flight will be dropped
        seq.finish_reason = reason
        seq.stop_reason = stop_reason

    def abort(self, request_id: str) -> bool:
        """Ends a waiting or running sequence by its request id; False if there is none."""
        seq = self._running.get(request_id) or self._waiting.get(request_id)
        if seq is None:
            return False
        self.finish(seq, "abort")
        return True

    def check_invariants(self) -> None:
        """Checks that pages and state indices are held by running sequences only, exactly as many as they need.

        Raises:
          PageStateError: they are not.
        """
        running, waiting = self.running, self.waiting
        self._allocator.check_invariants([seq.pages for seq in running])
        for seq in running:
            name, needed = seq.request.request_id, self._allocator.pages_for(seq.num_computed_tokens)
            if seq.status is not SequenceStatus.RUNNING or len(seq.pages) != needed:
                raise PageStateError(f"{name!r} is {seq.status.value} with {len(seq.pages)} pages, needs {needed}")
        for seq in waiting:
            name = seq.request.request_id
            if seq.status is not SequenceStatus.WAITING or seq.pages or seq.num_computed_tokens:
                raise PageStateError(f"{name!r} waits and still has pages or computed tokens")
            if seq.state_index is not None:
                raise PageStateError(f"{name!r} waits and has state index {seq.state_index}")
        indices = [seq.state_index for seq in running] + self._free_state_indices
        if set(indices) != set(range(self._config.max_num_seqs)) or len(indices) != self._config.max_num_seqs:
            raise PageStateError(f"state indices in use and free are {indices}, expected each one once")

    def _limit(self, seq: Sequence) -> int:
        """Tokens at which the sequence ends, prompt included."""
        max_tokens = seq.request.params.max_tokens
        if max_tokens is not None:
            return seq.num_prompt_tokens + max_tokens
        return min(self._max_model_len, (self._allocator.num_pages - 1) * self._allocator.page_size)

    def _require_fits(self, seq: Sequence) -> None:
        params, num_prompt = seq.request.params, seq.num_prompt_tokens
        name = f"request {seq.request.request_id!r}"
        if num_prompt == 0:
            raise RequestError(f"{name} has an empty prompt, expected at least one token")
        pool = (self._allocator.num_pages - 1) * self._allocator.page_size
        limit = min(self._max_model_len, pool)
        what = (
            f"the context limit, max_model_len, of {self._max_model_len} tokens"
            if self._max_model_len <= pool
            else f"the page pool of {pool} tokens ({self._allocator.num_pages - 1} pages)"
        )
        most = limit if params.max_tokens == 0 else limit - 1
        if num_prompt > most:
            raise PromptTooLongError(
                f"{name} has a prompt of {num_prompt} tokens, expected at most {most}: "
                f"prompt and output share {what}; shorten the prompt"
            )
        if params.max_tokens is not None and num_prompt + params.max_tokens > limit:
            raise PromptTooLongError(
                f"{name} asks for {num_prompt} prompt and {params.max_tokens} output tokens, which exceeds {what}; "
                f"lower max_tokens to {limit - num_prompt} or pass None, which means whatever fits"
            )
        if num_prompt + params.min_tokens > limit:
            raise PromptTooLongError(
                f"{name} has {num_prompt} prompt tokens and min_tokens {params.min_tokens}, which exceeds {what}; "
                f"lower min_tokens to {limit - num_prompt}"
            )

    def _num_tokens_to_compute(self, seq: Sequence) -> int:
        num_tokens = seq.num_tokens
        if seq.num_pending and num_tokens >= self._limit(seq):
            return 0  # all of its output is sampled; it waits for the results
        return num_tokens - seq.num_computed_tokens

    def _make_room(self, seq: Sequence, num_tokens: int, preempted: list[Sequence]) -> bool:
        """Gets the pages for the sequence's next tokens, by preemption if need be; False if that hit the sequence."""
        needed = self._allocator.pages_for(seq.num_computed_tokens + num_tokens) - len(seq.pages)
        if needed == 0:
            return True
        while not self._allocator.can_allocate(needed):
            victim = next(reversed(self._running.values()))
            self._preempt(victim)
            preempted.append(victim)
            if victim is seq:
                return False
        seq.pages.extend(self._allocator.allocate(needed))
        return True

    def _plan_row(self, seq: Sequence, num_tokens: int) -> PlannedRow:
        start = seq.num_computed_tokens
        seq.num_computed_tokens = end = start + num_tokens
        samples = end == seq.num_tokens and seq.request.params.max_tokens != 0
        seq.num_pending += samples
        return PlannedRow(seq, start, num_tokens, samples)

    def _next_admissible(self) -> Sequence | None:
        """The head of the queue, if it can run now: a row is free, its tokens are known and all of them fit."""
        if not self._waiting or not self._free_state_indices:
            return None
        seq = next(iter(self._waiting.values()))
        # The host does not know a pending token of a preempted sequence yet, and the device's copy of it is given up.
        if seq.num_pending or not self._allocator.can_allocate(self._allocator.pages_for(seq.num_tokens)):
            return None
        return seq

    def _admit(self, seq: Sequence) -> None:
        del self._waiting[seq.request.request_id]
        self._running[seq.request.request_id] = seq
        seq.status = SequenceStatus.RUNNING
        seq.state_index = heapq.heappop(self._free_state_indices)

    def _preempt(self, seq: Sequence) -> None:
        del self._running[seq.request.request_id]
        self._release(seq)
        self._waiting[seq.request.request_id] = seq
        self._waiting.move_to_end(seq.request.request_id, last=False)
        seq.status = SequenceStatus.WAITING
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self._num_preemptions += 1

    def _release(self, seq: Sequence) -> None:
        self._allocator.free(seq.pages)
        seq.pages.clear()
        if seq.state_index is not None:
            heapq.heappush(self._free_state_indices, seq.state_index)
            seq.state_index = None

    def _stop_if_due(self, seq: Sequence, token: int) -> None:
        params = seq.request.params
        may_stop = len(seq.tokens) - 1 - seq.num_prompt_tokens >= params.min_tokens
        if may_stop and token in self._eos_token_ids and not params.ignore_eos:
            self.finish(seq, "stop")
        elif may_stop and token in params.stop_token_ids:
            self.finish(seq, "stop", token)
        elif len(seq.tokens) >= self._limit(seq):
            self.finish(seq, "length")
