"""`Planner`: which sequences take part in the next step, with how many tokens, and on which pages.

Continuous batching without phases: the KV of each sequence (`num_computed_tokens`) chases its tokens (`num_tokens`),
and each plan spends one budget of tokens, in three passes, each in the order of service:

    1. sequences that lack one token: a token each, so that a long prompt never makes them wait
    2. sequences that lack more: a chunk each
    3. what is left admits groups: first those that were preempted, then waiting ones

The budget is `max_num_batched_tokens`, as whoever decodes waits for the whole step. Where nobody waits for a next token
it is `max_num_prefill_tokens`, if there are prompts to fill so many.

The order of service is the order of arrival, or that of aged priorities. If pages run out, the last group in that order
is preempted, as a whole, and comes back before anybody new: then nobody is admitted who would take its pages. A group
that does not fit may be passed by a bounded number of younger ones. A group that was computed twice is not made to do
it again while others can go on: who lacks its pages waits. The first group is never preempted, and alone it always
fits; so every plan without results in flight makes progress.
"""

import itertools
from collections.abc import Sequence as AbstractSequence

import numpy as np

from jpaged.beam_steps import BeamSteps
from jpaged.config import MAX_DECODE_STEP_ROWS, SchedulerConfig
from jpaged.group_queues import GroupQueues
from jpaged.memory_manager import MemoryManager
from jpaged.plan_rows import PlanRows
from jpaged.running_table import RunningRows
from jpaged.sequence import LIMIT, NUM_COMPUTED, NUM_TOKENS, WRITABLE_END, Sequence, SequenceGroup, SequenceStatus
from jpaged.speculation import Speculation
from jpaged.step_plan import StepPlan

RUNNING = SequenceStatus.RUNNING


class Planner:
    """Makes the plans of a `Scheduler`.

    Args:
      config: the budgets of a step.
      memory: where pages come from.
      queues: all groups.
      beams: told of beams that are computed again.
      chunk: tokens of a sequence in one step at the most.
      token_buckets: sizes that steps are padded to, ascending; where there are none, steps are not cut to fit.
      speculation: lets rows guess; `None`: none does.
      decode_steps: that are planned at once, if nobody waits for anything else.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        memory: MemoryManager,
        queues: GroupQueues,
        beams: BeamSteps,
        *,
        chunk: int,
        token_buckets: AbstractSequence[int],
        speculation: Speculation | None,
        decode_steps: int,
    ) -> None:
        self._token_buckets = token_buckets
        self._max_num_tokens, self._max_step_tokens = config.max_num_batched_tokens, config.max_step_tokens
        self._memory = memory
        self._queues = queues
        self._beams = beams
        self._chunk = chunk
        self._speculation = speculation
        self._awaits_guesses = False
        self._decode_steps = decode_steps
        few = min(config.max_num_seqs, MAX_DECODE_STEP_ROWS)
        self._few_rows = max((size for size in token_buckets if size <= few), default=few)  # as `step_shapes` has them
        self._page_size = memory.allocator.page_size

    def plan(self) -> StepPlan | None:
        """The next step; as `Scheduler.plan`."""
        queues = self._queues
        if self._speculation is not None and self._waits(self._speculation):
            return None
        rows = PlanRows(queues.table)
        self._memory.start_plan()
        self._fill(rows)
        while not rows and len(queues.running) > 1 and not any(map(_awaits, queues.running_rows.seqs)):
            self._preempt(queues.victim_of_all(), rows)  # they all waited for each other's pages
            self._fill(rows)
        decodes_only = bool(rows) and rows.decodes_only
        if self._speculation is not None and decodes_only:
            self._guess(self._speculation, rows)
        if self._decode_steps > 1 and decodes_only and not self._awaits_guesses:
            self._go_on(rows)
        if self._speculation is not None:
            num_tokens = rows.num_tokens if decodes_only else None
            self._speculation.begin(num_tokens, waits=self._awaits_guesses, num_steps=rows.num_steps)
        transfers = self._memory.take_transfers()
        return rows.build(transfers) if rows or any(transfers) else None

    def take_guesses(self, plan: StepPlan | None = None, num_new: np.ndarray | None = None) -> None:
        """The step whose rows guessed was read, and gave them so many tokens; or it will not be."""
        self._awaits_guesses = False
        if self._speculation is not None and plan is not None and plan.drafts is not None and num_new is not None:
            self._speculation.settle(plan.seqs, plan.drafts.counts.tolist(), num_new.tolist())

    def _fill(self, rows: PlanRows) -> None:
        """Plans rows, in the three passes described at the top."""
        running, lacking = self._queues.running_rows, list[Sequence]()
        decodes = self._decode_at_once(running)
        rows.decode(running, decodes)
        if np.count_nonzero(decodes) < len(decodes):
            for place in np.flatnonzero(~decodes).tolist():
                decodes[place] = self._may_decode(running.seqs[place], lacking, rows)
        rows.count_decoding()
        waits = rows.num_tokens > 0 or self._somebody_waits(running, lacking)
        rows.leave(self._num_prompt_tokens(rows.num_tokens, lacking, may_be_large=not waits))
        for seq in lacking:
            if seq.status is RUNNING and rows.budget:
                self._plan_chunk(seq, rows)
        while rows.budget and not rows.preempted and (group := self._queues.next_to_run(lacking)) is not None:
            self._queues.run(group)
            admitted = group.live
            rows.admitted += admitted
            for seq in admitted:
                if seq.num_computed_tokens < seq.num_tokens:
                    self._beams.forget(seq)  # it says once more what comes next
                if seq.status is RUNNING and rows.budget:
                    self._plan_chunk(seq, rows)
            lacking += [seq for seq in admitted if self._queues.num_pages_due(seq)]

    def _somebody_waits(self, running: RunningRows, lacking: list[Sequence]) -> bool:
        """Whether some sequence, of which none decodes in this step, has begun to answer and waits for its next token.

        It may wait for a mask, for a page, or for the host to choose its beams, and would come with the next step. Who
        was preempted may come back with this one. But those that lack more than a token wait for nothing but the
        device, and who is at its limit waits for nothing.

        Args:
          running: those that run, as the plan found them.
          lacking: those of them that lack more than a token.
        """
        if self._max_step_tokens == self._max_num_tokens:
            return True  # it is all the same, and this is done for each step
        chunks = {*lacking}
        ended = (0 < seq.limit <= seq.num_tokens for seq in running.seqs if seq not in chunks)
        return bool(self._queues.preempted) or not all(ended)

    def _num_prompt_tokens(self, num_taken: int, lacking: list[Sequence], *, may_be_large: bool) -> int:
        """How many tokens of prompts a step takes, at the most.

        A step is padded to a compiled size. Where somebody has to wait for a turn anyway, prompts are cut so that the
        step fills such a size, unless that would leave out more than half of what could be computed: what is left out
        comes with the next step, and costs nobody but the one who is cut. A step that is larger than the ordinary
        budget always fills one: it computes hardly more tokens a second than two smaller ones, so what it gains would
        be lost by little padding. So there what is found in the cache does not count, nor whoever might lack pages.
        What prompts of this very step have in common is not known yet; it may leave the step smaller, and so padded.

        Args:
          num_taken: tokens of decoding rows.
          lacking: sequences that run and lack more than a token.
          may_be_large: whether the step may have `max_num_prefill_tokens`.
        """
        queues, budget = self._queues, self._max_num_tokens - num_taken
        most = self._max_step_tokens if may_be_large else budget
        wanted = sum(min(seq.num_tokens - seq.num_computed_tokens, self._chunk) for seq in lacking)
        free, all_come = queues.num_free_rows, True
        pages = queues.num_pages_to_give(lacking) if may_be_large else 0
        for group in itertools.chain(queues.preempted, queues.waiting):
            if group.awaits_mask:
                continue  # it comes with none of these tokens, and takes nobody's turn
            free -= group.request.params.num_sequences
            if free < 0 or group.num_pages_lacking or wanted >= most:
                all_come = False  # this one waits
                break
            seq, num_cached = group.live[0], 0
            if may_be_large:  # what it would gain is too little to be lost by a guess
                hit = self._memory.find(seq)
                num_cached = 0 if hit is None else hit.num_tokens
                pages -= self._memory.num_pages_taken(hit, seq.num_tokens, self._chunk)
                if pages < 0:
                    most = max(wanted, budget)  # it may not come, nor may those behind it
            wanted += min(seq.num_tokens - seq.num_computed_tokens - num_cached, self._chunk)
        wanted = min(wanted, most)
        fitting = [size - num_taken for size in self._token_buckets if size <= num_taken + wanted]
        if wanted > budget:
            if not self._token_buckets:
                return most
            if fitting and fitting[-1] > budget:
                return fitting[-1]
            wanted, all_come = budget, False  # what is left out waits, be there others or not
        if all_come:
            return budget
        return fitting[-1] if fitting and 0 < wanted <= 2 * fitting[-1] else budget

    def _waits(self, speculation: Speculation) -> bool:
        """Whether nothing is planned before what is in flight was read: because of guesses that it checks, or by which
        rows could then guess.
        """
        seqs = self._queues.running_rows.seqs
        if self._awaits_guesses or len(seqs) > speculation.max_rows or not any(seq.num_pending for seq in seqs):
            return self._awaits_guesses
        if speculation.rests():
            return False
        places = speculation.follow(seqs)
        # Chunks of prompts fill a step anyway, and are planned ahead.
        if not places or any(seq.num_tokens - seq.num_computed_tokens > 1 for seq in seqs):
            return False
        if not speculation.counts(seqs, places, ahead=True):
            return False
        speculation.wait(seqs)
        return True

    def _guess(self, speculation: Speculation, rows: PlanRows) -> None:
        """Lets decoding rows guess, as far as there is room without preemption; all of a step's rows are known then."""
        decoding = rows.decoding
        seqs = [seq for _, seq in decoding]
        if len(seqs) > speculation.max_rows or any(seq.num_pending > 1 for seq in seqs):
            return  # the step before was not read
        counts = speculation.counts(seqs, speculation.follow(seqs))
        for (place, seq), count in zip(decoding, counts, strict=False):
            most = min(count, rows.budget, self._chunk - 1)
            if most > 0 and self._has_room(seq, most) and seq.guesser is not None:
                rows.guess(place, seq.guesser.guess(seq.tokens, most))
                self._awaits_guesses = True

    def _has_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Gets the pages for guesses of a sequence that decodes in this plan, if they are there to be had."""
        if seq.num_computed_tokens + num_tokens <= seq.writable_end:
            return True
        seq.num_computed_tokens -= 1  # the token that it decodes sees as far back as ever
        self._memory.commit(seq)
        fits = self._memory.append(seq, 1 + num_tokens)
        seq.num_computed_tokens += 1
        return fits

    def _go_on(self, rows: PlanRows) -> None:
        """Plans several decode steps, as far as there is room without preemption, if nobody waits for a turn."""
        queues, num_steps = self._queues, self._decode_steps
        running, decoding = queues.running_rows, rows.decoding
        if queues.waiting or queues.preempted or len(decoding) > self._few_rows or not running.are_plain:
            return
        entries = running.entries[[place for place, _ in decoding]]
        counters = queues.table.counters.take(entries, axis=0)
        num_more = np.clip(counters[:, LIMIT] - counters[:, NUM_TOKENS], 0, num_steps - 1)
        if num_more.max() < num_steps - 1:
            return  # what is left is sooner done by single steps
        room = counters[:, WRITABLE_END] - counters[:, NUM_COMPUTED]
        for row in np.flatnonzero(num_more > room).tolist():
            if not self._has_room(decoding[row][1], int(num_more[row])):
                num_more[row] = room[row]
        rows.go_on(num_steps, num_more)

    def _decode_at_once(self, running: RunningRows) -> np.ndarray:
        """Which of those that run decode, as far as that can be said of all of them at once; bool[n]."""
        memory = self._memory
        counters = self._queues.table.counters.take(running.entries, axis=0)
        computed, ends = counters[:, NUM_COMPUTED], counters[:, WRITABLE_END]
        # Those that lack one token, which is not their last: a sequence says that itself.
        decodes = counters[:, NUM_TOKENS] - computed == 1
        decodes &= computed < counters[:, LIMIT] - 1
        if len(running.masked):
            decodes[running.masked] = False
        with_room = decodes & (computed < ends)
        num_others = len(with_room) - int(np.count_nonzero(with_room))
        # If nobody can be in want of a page, the order in which they are given is of no matter.
        if num_others and memory.sliding_window is None and 2 * num_others <= memory.allocator.num_available:
            full = decodes & (computed == ends) & (computed % self._page_size == 0)
            memory.grow([running.seqs[place] for place in np.flatnonzero(full).tolist()])
            with_room |= full
        return with_room

    def _may_decode(self, seq: Sequence, lacking: list[Sequence], rows: PlanRows) -> bool:
        """Whether a sequence computes one token and samples; puts it among those that lack more, if it does."""
        if seq.mask_position is not None and seq.awaits_mask:
            return False  # the device knows its last token, but only the host can say what may follow
        start = seq.num_computed_tokens
        lacks = seq.num_tokens - start
        if lacks != 1 or start + 1 >= seq.limit:
            if not lacks or (seq.num_pending and start + lacks >= seq.limit):
                return False  # at its limit with samples pending, a sequence waits for their results
            if lacks > 1 or seq.group.beam is None:
                lacking.append(seq)
                return False
        if seq.status is not RUNNING:
            return False  # preempted just now
        if start >= seq.writable_end:
            self._memory.commit(seq)
            return self._make_room(seq, 1, rows)
        return True

    def _make_room(self, seq: Sequence, num_tokens: int, rows: PlanRows) -> bool:
        """Gets the pages for the sequence's next tokens, by preemption if need be; False if there are none for it."""
        while not self._memory.append(seq, num_tokens):
            victim = self._queues.victim_for(seq.group)
            # A chunk of this plan stays, and so does what others may share of it.
            if victim is None or rows.holds_chunk_of(victim):
                return False
            self._preempt(victim, rows)
            if victim is seq.group:
                return False
        return True

    def _preempt(self, group: SequenceGroup, rows: PlanRows) -> None:
        rows.drop_decoding(group)
        self._queues.preempt(group)
        rows.preempted.append(group)
        rows.admitted = [seq for seq in rows.admitted if seq.group is not group]

    def _plan_chunk(self, seq: Sequence, rows: PlanRows) -> None:
        if not (seq.pages or self._begin(seq)):
            return
        lacks = seq.num_tokens - seq.num_computed_tokens
        num_tokens = min(lacks, rows.budget, self._chunk)
        if not num_tokens or not self._make_room(seq, num_tokens, rows):
            return
        group, params = seq.group, seq.request.params
        samples = num_tokens == lacks and params.max_tokens != 0
        rows.add(seq, num_tokens, samples)
        self._memory.commit(seq)
        if group.request.pin and num_tokens == lacks:
            self._memory.pin(group.request.request_id, seq)
        if samples and group.beam is None and len(group.seqs) < params.num_sequences:
            seq.limit = group.limit
            for index in range(1, params.num_sequences):
                child = self._queues.fork(seq, index)
                child.mask_position = seq.mask_position  # all answers begin alike
                group.seqs.append(child)
                child.num_tokens += 1
                rows.admitted.append(child)
                rows.add_fork(child, seq)

    def _begin(self, seq: Sequence) -> bool:
        """Gives a sequence without pages what others have of its prompt; False if it must wait until they have it."""
        leader, memory = seq.group.live[0], self._memory
        size = memory.allocator.page_size
        shared = 0 if memory.sliding_window is not None else seq.num_prompt_tokens // size * size
        if seq is not leader and leader.num_computed_tokens < shared:
            return False
        hit, full = memory.find(seq), shared // size
        if seq is leader or (hit is not None and hit.pages[:full] == leader.pages[:full]) or not shared:
            memory.start(seq, hit)
        else:  # nothing, or pages of others, beside which those of the leader would be needed too
            memory.fork(leader, seq, num_tokens=shared)
        return True


def _awaits(seq: Sequence) -> bool:
    """Whether the sequence goes on by itself, as soon as a result or a mask is there."""
    return seq.num_pending > 0 or seq.awaits_mask
