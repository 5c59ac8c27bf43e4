"""The scheduler under random traffic: every answer must be that of the request alone, whatever happens around it."""

from typing import Any

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jpaged.errors import RequestError
from jpaged.request import Sequence
from jpaged.step_plan import StepPlan
from tests.scheduler_driver import EOS, Driver, make_scheduler, make_seq, undisturbed

REQUESTS = st.fixed_dictionaries(
    {
        "prompt_fraction": st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.5, 1.0]),  # of the longest prompt that fits
        "seed": st.integers(0, 30),
        "max_tokens": st.one_of(st.none(), st.integers(0, 6), st.integers(4, 20)),
        "min_tokens": st.integers(0, 3),
        "ignore_eos": st.sampled_from([True, True, False]),
        "stop_token_ids": st.sampled_from([[], [], [3], [5, EOS]]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """Random traffic: plans run up to two steps ahead, requests are aborted and stopped from outside in between."""

    @initialize(
        num_pages=st.integers(3, 9),
        page_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(2, 5),
        more_budget=st.integers(0, 12),
        max_model_len=st.integers(6, 24),
        depth=st.sampled_from([1, 0, 2]),
        requests=st.lists(REQUESTS, min_size=3, max_size=6),
    )
    def make(self, num_pages, page_size, max_num_seqs, more_budget, max_model_len, depth, requests) -> None:
        self.depth, self.max_num_seqs, self.budget = depth, max_num_seqs, max_num_seqs + more_budget
        self.scheduler = make_scheduler(num_pages, page_size, max_num_seqs, self.budget, max_model_len)
        self.driver = Driver(self.scheduler)
        self.allocator = self.scheduler._allocator
        self.limit = min(max_model_len, (num_pages - 1) * page_size)
        self.live: list[Sequence] = []  # in the order of arrival
        self.ended: list[Sequence] = []
        self.stopped_outside: set[Sequence] = set()
        self.num_tried = 0
        note(f"limit {self.limit}, {num_pages} pages of {page_size}, {max_num_seqs} rows, budget {self.budget}")
        for request in requests:
            self.add(request)

    # ------------------------------------------------------------------------------------------ what happens

    @rule(request=REQUESTS)
    def add(self, request: dict[str, Any]) -> None:
        request = dict(request)
        prompt_len = 1 + int(request.pop("prompt_fraction") * (self.limit - 2))
        room = self.limit - prompt_len
        if request["max_tokens"] is not None:
            request["max_tokens"] = min(request["max_tokens"], room)
        most = room if request["max_tokens"] is None else request["max_tokens"]
        request["min_tokens"] = min(request["min_tokens"], most)
        seq = self.make_seq(prompt_len, **request)
        note(f"add {seq.request}")
        self.scheduler.add(seq)
        self.live.append(seq)

    @rule(prompt_len=st.integers(0, 30), max_tokens=st.integers(0, 30))
    def add_what_does_not_fit(self, prompt_len: int, max_tokens: int) -> None:
        if prompt_len == 0 or prompt_len + max_tokens > self.limit:
            with pytest.raises(RequestError):
                self.scheduler.add(self.make_seq(prompt_len, max_tokens=max_tokens))

    @rule(num_steps=st.integers(1, 8))
    def run(self, num_steps: int) -> None:
        """As the engine does: results are read once more than `depth` steps are in flight."""
        for _ in range(num_steps):
            if len(self.driver.in_flight) <= self.depth:
                self.dispatch()
                self.state_is_sound()
            if len(self.driver.in_flight) > self.depth:
                self.collect()
                self.state_is_sound()

    @precondition(lambda self: len(self.driver.in_flight) <= self.depth)
    @rule()
    def dispatch(self) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        computed = {seq: seq.num_computed_tokens for seq in self.live}
        known = {seq: seq.num_tokens for seq in self.live}
        plan = self.driver.dispatch()
        note(f"plan {plan and [(r.seq.request.request_id, r.start, r.num_tokens, r.samples) for r in plan.rows]}")
        if plan is None:
            # Nothing in flight, so something could have been computed.
            assert self.driver.in_flight or not self.live
            return
        self.check_rows(plan, computed, known)
        self.check_preempted(plan, running)
        self.check_admitted(plan, waiting, known)
        # Whoever runs and has a known token to compute takes part, as far as the budget goes.
        idle = set(self.scheduler.running) - {row.seq for row in plan.rows}
        for seq in idle:
            at_limit = seq.num_pending and self.total(seq) == seq.num_tokens
            assert at_limit or seq.num_computed_tokens == seq.num_tokens or plan.num_tokens == self.budget

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def collect(self) -> None:
        plan, tokens = self.driver.in_flight[0]
        open_rows = [(row.seq, i) for i, row in enumerate(plan.rows) if not row.seq.is_finished]
        updates = self.driver.collect()
        assert [(update.seq, update.row) for update in updates] == open_rows
        for update in updates:
            sampled = plan.rows[update.row].samples and tokens[update.row] >= 0
            assert update.new_token == (tokens[update.row] if sampled else None)
            assert not sampled or update.seq.tokens[-1] == update.new_token
        self.note_ended()

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 20), by_abort=st.booleans())
    def stop_from_outside(self, which: int, by_abort: bool) -> None:
        seq = self.live[which % len(self.live)]
        note(f"{'abort' if by_abort else 'finish'} {seq.request.request_id}")
        if by_abort:
            assert self.scheduler.abort(seq.request.request_id)
            assert not self.scheduler.abort(seq.request.request_id)
        else:
            self.scheduler.finish(seq, "stop", "###")
        assert (seq.finish_reason, seq.stop_reason) == (("abort", None) if by_abort else ("stop", "###"))
        self.stopped_outside.add(seq)
        self.note_ended()

    # ------------------------------------------------------------------------------------------ what must hold

    def make_seq(self, prompt_len: int, **params) -> Sequence:
        self.num_tried += 1
        scores = 0 if params["max_tokens"] == 0 else None
        return make_seq(f"r{self.num_tried}", prompt_len, prompt_logprobs=scores, **params)

    def total(self, seq: Sequence) -> int:
        max_tokens = seq.request.params.max_tokens
        return self.limit if max_tokens is None else seq.num_prompt_tokens + max_tokens

    def check_rows(self, plan: StepPlan, computed: dict[Sequence, int], known: dict[Sequence, int]) -> None:
        assert plan.rows
        assert plan.num_seqs == len({row.seq for row in plan.rows}) <= self.max_num_seqs
        assert plan.num_tokens == sum(row.num_tokens for row in plan.rows) <= self.budget
        assert [row.num_tokens == 1 for row in plan.rows] == [i < plan.num_decode for i in range(plan.num_seqs)]
        for part in (plan.rows[: plan.num_decode], plan.rows[plan.num_decode :]):
            arrival = [self.live.index(row.seq) for row in part]
            assert arrival == sorted(arrival)
        for row in plan.rows:
            seq = row.seq
            assert row.start == computed[seq]
            assert row.kv_len == seq.num_computed_tokens <= known[seq]
            assert row.num_tokens > 0
            assert row.samples == (row.kv_len == known[seq] and seq.request.params.max_tokens != 0)
            assert seq.num_tokens == known[seq] + row.samples <= self.total(seq)

    def check_preempted(self, plan: StepPlan, running: tuple[Sequence, ...]) -> None:
        kept = [seq for seq in running if seq not in plan.preempted]
        assert [*kept, *reversed(plan.preempted)] == list(running)  # the newest ones, newest first
        assert not (plan.preempted and plan.admitted)
        if plan.preempted:
            assert kept
            assert self.scheduler.running == tuple(kept)
            assert self.scheduler.waiting[: len(plan.preempted)] == plan.preempted[::-1]

    def check_admitted(self, plan: StepPlan, waiting: tuple[Sequence, ...], known: dict[Sequence, int]) -> None:
        assert plan.admitted == waiting[: len(plan.admitted)]
        for seq in plan.admitted:
            assert known[seq] == len(seq.tokens)  # no token of it was in flight
            # Even if the budget covers a chunk only, there is room for the rest.
            assert self.allocator.pages_for(known[seq]) - len(seq.pages) <= self.allocator.num_free
        if self.scheduler.waiting and not plan.preempted and plan.num_tokens < self.budget:
            head = self.scheduler.waiting[0]
            assert (
                self.scheduler.num_running == self.max_num_seqs
                or head.num_pending
                or self.allocator.pages_for(head.num_tokens) > self.allocator.num_free
            )

    def note_ended(self) -> None:
        self.ended += [seq for seq in self.live if seq.is_finished]
        self.live = [seq for seq in self.live if not seq.is_finished]

    @invariant()
    def state_is_sound(self) -> None:
        self.scheduler.check_invariants()
        assert [*self.scheduler.running, *self.scheduler.waiting] == self.live
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert self.scheduler.has_work == bool(self.live)
        assert self.allocator.num_used == sum(len(seq.pages) for seq in self.live)
        assert self.scheduler.num_tokens_held == sum(seq.num_computed_tokens for seq in self.live)
        rows = [row for plan, _ in self.driver.in_flight for row in plan.rows if row.samples]
        for seq in self.live:
            assert seq.num_pending == sum(row.seq is seq for row in rows)
        for seq in self.ended:
            assert (seq.pages, seq.state_index, seq.num_pending) == ([], None, 0)
        assert self.scheduler.num_preemptions == sum(seq.num_preemptions for seq in [*self.live, *self.ended])

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.drain(self.depth)
        self.note_ended()
        self.state_is_sound()
        assert not self.live
        assert self.allocator.num_free == self.allocator.num_pages - 1
        for seq in self.ended:
            tokens, *reasons = undisturbed(seq, self.limit)
            if seq in self.stopped_outside:
                assert seq.output_token_ids == tokens[: len(seq.output_token_ids)]
            else:
                assert [seq.output_token_ids, seq.finish_reason, seq.stop_reason] == [tokens, *reasons]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=80,
    stateful_step_count=25,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_pages", [7, 12, 65])
def test_answers_do_not_depend_on_pool_size_and_run_ahead(num_pages, depth):
    scheduler = make_scheduler(num_pages, page_size=4, max_num_seqs=5, budget=9, max_model_len=24)
    seqs = [make_seq(f"r{i}", 1 + i % 7, seed=i, max_tokens=1 + i % 17, ignore_eos=i % 2 == 0) for i in range(25)]
    for seq in seqs:
        scheduler.add(seq)
    Driver(scheduler).drain(depth)
    assert (scheduler.num_preemptions > 0) == (num_pages < 65)
    for seq in seqs:
        assert [seq.output_token_ids, seq.finish_reason, seq.stop_reason] == list(undisturbed(seq, 24))
    assert scheduler._allocator.num_free == num_pages - 1
