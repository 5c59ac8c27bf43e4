"""Allocator, prefix cache, memory manager and scheduler together under random traffic, on a fake device.

Whatever happens around a request, it must answer what it would have answered alone (`tests.scheduler_driver`): what the
fake model samples depends on what is really in the pages, down to the weights that computed it.

The environment variable JPAGED_MACHINE_STEPS makes the machine run for about so many steps of the scheduler, instead of
the few thousand of an ordinary run, and print what happened in them:

    JPAGED_MACHINE_STEPS=50000 python -m pytest tests/test_memory_machine.py -q
"""

import itertools
import os
from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jpaged.errors import PromptTooLongError, RequestError
from jpaged.preemption import PreemptionCosts
from jpaged.sequence import Sequence, SequenceGroup, SequenceStatus
from jpaged.step_plan import StepPlan
from tests.scheduler_driver import EOS, VOCAB, Driver, guesses_of, make_group, make_scheduler, undisturbed

LONG = int(os.environ.get("JPAGED_MACHINE_STEPS", "0"))
STEPS_AN_EXAMPLE = 60  # measured, about

PREFIXES = tuple(tuple((3 * i * i + 5 * i + which) % VOCAB for i in range(24)) for which in (1, 2))

CONFIGS = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([4, 2, 1]),
        "pool": st.sampled_from([1.2, 1.0, 1.5, 0.8]),  # of max_model_len
        "host_pages": st.sampled_from([30, 0, 4, 30]),
        "sliding_window": st.sampled_from([None, None, 3, 9]),
        "prefix_cache": st.sampled_from([True, True, True, False]),
        "max_num_seqs": st.integers(4, 8),
        "budget": st.integers(8, 20),
        "larger": st.sampled_from(
            [4, None, 16, 8, 0]
        ),  # than it is the budget of steps in which nobody waits for a token
        "max_model_len": st.integers(20, 40),
        "max_chunk_tokens": st.sampled_from([None, 3, 1]),
        "max_passes": st.sampled_from([32, 2, 0]),
        "headroom_pages": st.sampled_from([0, 0, 0, 1]),
        "token_buckets": st.sampled_from([(), (4, 8, 20), (2, 5, 11, 20)]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "preemption": st.sampled_from(["auto", "swap", "recompute"]),
        "guesses": st.sampled_from([0, 4, 0, 2]),
    }
)

REQUESTS = st.fixed_dictionaries(
    {
        "prefix": st.integers(0, len(PREFIXES) - 1),
        "shared": st.sampled_from([4, 0, 8, 5, 9, 12, 16]),
        "tail": st.sampled_from([(1,), (), (2, 3), (5, 4, 1)]),
        "kind": st.sampled_from(["sample", "sample", "n", "n", "best_of", "beam", "beam", "score", "pin"]),
        "width": st.integers(2, 4),
        "max_tokens": st.sampled_from([16, 12, 20, 9, 1, 4, None]),
        "min_tokens": st.sampled_from([0, 3]),
        "ignore_eos": st.sampled_from([True, True, True, False]),
        "stop_token_ids": st.sampled_from([[], [], [], [3], [5, EOS]]),
        "early_stopping": st.sampled_from([False, True, "never"]),
        "cache_salt": st.sampled_from([None, None, None, "a"]),
        "priority": st.integers(0, 2),
        "seed": st.integers(0, 11),
    }
)


class MemoryMachine(RuleBasedStateMachine):
    """Plans run up to two steps ahead of results; requests are aborted and stopped from outside in between."""

    totals: ClassVar[Counter[str]] = Counter()

    @initialize(config=CONFIGS, depth=st.sampled_from([1, 0, 2]), requests=st.lists(REQUESTS, min_size=4, max_size=9))
    def make(self, config: dict[str, Any], depth: int, requests: list[dict[str, Any]]) -> None:
        config = dict(config)
        config["num_pages"] = 2 + int(config.pop("pool") * config["max_model_len"]) // config["page_size"]
        larger, self.largest = config.pop("larger"), config["budget"]
        if larger is not None:
            self.largest += larger
            config["max_num_prefill_tokens"] = self.largest
        note(f"{config}, {depth=}")
        self.config, self.depth, self.counts = config, depth, Counter()
        # For "auto": swaps what has three tokens more than pages.
        costs = PreemptionCosts(prefill_s_per_token=1.0, swap_s=3.0, swap_s_per_page=1.0)
        self.scheduler = make_scheduler(**config, costs=costs)
        self.driver = Driver(self.scheduler)
        self.memory, self.allocator = self.driver.memory, self.driver.memory.allocator
        self.chunk = min(config["max_chunk_tokens"] or self.largest, self.largest)
        self.ids = itertools.count()
        self.live: list[SequenceGroup] = []  # in the order of arrival
        self.pinned: list[str] = []  # names that were not unpinned
        self.versions: dict[SequenceGroup, int] = {}  # weights that those were begun with which have been
        self.mixed: set[SequenceGroup] = set()  # lived through a change of weights
        self.stopped: set[Sequence] = set()  # from outside
        self.expected: dict[Sequence, list[int]] = {}
        self.add(requests)

    # ------------------------------------------------------------------------------------------ what happens

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def add(self, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            self.add_one(request)

    def add_one(self, request: dict[str, Any]) -> None:
        group = self.make_group(dict(request))
        fits = self.fits(group)
        note(f"add {group.request.request_id} {group.request.prompt_token_ids} {request}, {fits=}")
        before = self.allocator.num_available
        try:
            self.scheduler.add(group)
        except PromptTooLongError:
            assert not fits
        except RequestError:
            sequences, pin = group.request.params.num_sequences, group.request.pin
            assert sequences > self.config["max_num_seqs"] or (pin and self.is_in_the_way(group))
        else:
            assert fits
            self.live.append(group)
            if group.request.pin:
                self.pinned.append(group.request.request_id)
        assert self.allocator.num_available == before  # nothing is taken ahead

    @rule(num_steps=st.integers(1, 12))
    def run(self, num_steps: int) -> None:
        """As the engine does: results are read once more than `depth` steps are in flight, or nothing is planned."""
        for _ in range(num_steps):
            plan = self.plan()
            while len(self.driver.in_flight) > (self.depth if plan is not None and plan.seqs else 0):
                self.collect()

    @precondition(lambda self: len(self.driver.in_flight) <= self.depth)
    @rule()
    def dispatch(self) -> None:
        self.plan()

    def plan(self) -> StepPlan | None:
        running = self.scheduler.running
        computed = {seq: seq.num_computed_tokens for group in self.live for seq in group.seqs}
        fresh = {group for group in self.live if not group.num_preemptions and group not in self.versions}
        budget = self.budget(running)
        plan = self.driver.dispatch()
        self.counts["steps"] += 1
        if plan is None:
            # Nothing in flight, so something could have been computed.
            assert self.driver.in_flight or not self.live
        else:
            preempted = [group.request.request_id for group in plan.preempted]
            note(f"plan {[(*name(row.seq), *row[1:]) for row in plan.rows]} {tuple(plan.transfers)} {preempted=}")
            self.check_plan(plan, running, computed, fresh, budget)
        self.state_is_sound()
        return plan

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def collect(self) -> None:
        plan, results = self.driver.in_flight[0]
        ended = {seq for seq in plan.seqs if seq.is_finished}
        rows = zip(plan.seqs, self.driver.collect(), results.tokens, plan.samples, guesses_of(plan), strict=False)
        for seq, new, sampled, samples, guessed in rows:
            plain = samples and seq not in ended and seq.group.beam is None and sampled >= 0
            assert new[:1] == ([sampled] if plain else [])
            assert new[:-1] == guessed[: len(new[:-1])]
            if plain:
                assert seq.tokens[-len(new) :] == new
                self.check_output_so_far(seq)
        self.note_ended()
        self.state_is_sound()

    @precondition(lambda self: len(self.live) > 3)
    @rule(which=st.integers(0, 20), how=st.sampled_from(["abort", "stop"]))
    def end_from_outside(self, which: int, how: str) -> None:
        group = self.live[which % len(self.live)]
        note(f"{how} {group.request.request_id}")
        if how == "abort":
            self.stopped.update(group.live)
            assert self.scheduler.abort(group.request.request_id)
            assert not self.scheduler.abort(group.request.request_id)
            assert all(seq.is_finished for seq in group.seqs)
            self.pinned = [name for name in self.pinned if name != group.request.request_id]
        elif group.beam is None and not group.request.pin:
            seq = group.live[which % len(group.live)]
            self.stopped.add(seq)
            self.scheduler.finish(seq, "stop", "###")
            assert (seq.finish_reason, seq.stop_reason) == ("stop", "###")
        self.note_ended()

    @precondition(lambda self: self.pinned)
    @rule(which=st.integers(0, 20))
    def unpin(self, which: int) -> None:
        name = self.pinned.pop(which % len(self.pinned))
        assert self.scheduler.unpin(name)
        assert not self.scheduler.unpin(name)

    @precondition(lambda self: self.counts["steps"] % 4 == 3)  # seldom: nobody else then finds anything
    @rule(weights=st.sampled_from([True, True, False]))
    def forget(self, weights: bool) -> None:
        """New weights, or merely nothing in the prefix cache."""
        note(f"forget, {weights=}")
        if weights:
            self.mixed |= self.versions.keys()
            self.driver.change_weights()
        else:
            self.scheduler.reset_prefix_cache()
        begun = {group.request.request_id for group in self.live if group.seqs[0].num_computed_tokens}
        waiting = {group.request.request_id for group in self.live} - begun
        self.pinned = [name for name in self.pinned if name in waiting]
        assert self.allocator.num_cached == self.memory.pins.num_pages == 0

    @precondition(lambda self: len(self.live) > 6)
    @rule()
    def drain(self) -> None:
        for _ in range(600):
            if self.live or self.driver.in_flight:
                self.run(1)
        assert not self.live, "some request never ends"

    # ------------------------------------------------------------------------------------------ requests

    def make_group(self, request: dict[str, Any]) -> SequenceGroup:
        prefix = PREFIXES[request.pop("prefix")][: request.pop("shared")]
        prompt = (*prefix, *request.pop("tail")) or (1,)
        kind, width, early_stopping = request.pop("kind"), request.pop("width"), request.pop("early_stopping")
        if kind == "n":
            request["n"] = width
        elif kind == "best_of":
            request["best_of"] = width
        elif kind == "beam":
            request |= {"use_beam_search": True, "temperature": 0.0, "best_of": width, "n": width // 2}
            request["early_stopping"] = early_stopping
        elif kind in ("score", "pin"):
            request |= {"max_tokens": 0, "min_tokens": 0, "pin": kind == "pin" and self.config["prefix_cache"]}
            request["prompt_logprobs"] = 0 if kind == "score" else None
        if request["max_tokens"] is not None:
            request["min_tokens"] = min(request["min_tokens"], request["max_tokens"])
        number = next(self.ids)
        return make_group(f"r{number}", prompt, arrival_time_s=4.0 * number, **request)

    def pages_at_most(self, group: SequenceGroup, num_tokens: int) -> int:
        """Pages of a whole group that has grown to so many tokens a sequence."""
        size, window = self.config["page_size"], self.config["sliding_window"]
        count = group.request.params.num_sequences
        pages = -(-num_tokens // size)
        if window is not None:
            return count * min(pages, -(-(window + self.chunk) // size) + 1)
        shared = len(group.request.prompt_token_ids) // size
        return shared + count * (pages - shared)

    def fits(self, group: SequenceGroup) -> bool:
        params, num_prompt = group.request.params, len(group.request.prompt_token_ids)
        most = max(params.min_tokens, 1) if params.max_tokens is None else params.max_tokens
        total = num_prompt + most
        if params.num_sequences > self.config["max_num_seqs"] or total > self.config["max_model_len"]:
            return False
        if self.pages_at_most(group, total) > self.memory.capacity_for(group.request):
            return False
        return not (group.request.pin and self.is_in_the_way(group))

    def is_in_the_way(self, pin: SequenceGroup) -> bool:
        """Whether somebody could not grow to the end beside these pins."""
        left = self.memory.capacity - self.allocator.pages_for(len(pin.request.prompt_token_ids))
        return any(self.pages_at_most(group, group.limit) > left for group in self.live)

    # ------------------------------------------------------------------------------------------ what must hold

    def budget(self, running: tuple[SequenceGroup, ...]) -> int:
        """Of the next step: the larger one only if nobody who has begun to answer waits for a token."""
        for seq in (seq for group in running for seq in group.live):
            is_done = seq.group.beam is None and seq.num_tokens >= seq.group.limit
            if seq.num_output_tokens and seq.num_tokens - seq.num_computed_tokens <= 1 and not is_done:
                return self.config["budget"]
        preempted = any(group.num_preemptions for group in self.scheduler.waiting)
        return self.config["budget"] if preempted else self.largest

    def check_plan(
        self, plan: StepPlan, running: tuple[SequenceGroup, ...], computed: dict, fresh: set, budget: int
    ) -> None:
        rows = list(plan.rows)
        assert rows or any(plan.transfers)
        assert rows or not plan.admitted
        assert len({row.seq for row in rows}) == len(rows) <= self.config["max_num_seqs"]
        assert plan.num_tokens == sum(row.num_tokens for row in rows) <= budget
        shape = [0 if row.num_tokens == 1 else 1 if row.num_tokens else 2 for row in rows]
        assert shape == sorted(shape)
        assert shape.count(0) == plan.num_decode
        assert plan.drafts is None or plan.drafts.counts.any()
        for index, row in enumerate(rows):
            seq, group = row.seq, row.seq.group
            assert row.num_tokens <= self.chunk
            assert (row.source == index) == (row.num_tokens > 0)
            assert row.kv_len == seq.num_computed_tokens
            assert row.samples == (seq.num_pending > 0)
            assert seq.status is group.status is SequenceStatus.RUNNING
            if group in fresh and row.num_tokens:  # it begins with what the cache had
                assert row.start == seq.num_cached_tokens < seq.num_prompt_tokens
                assert row.start == 0 or group.request.params.prompt_logprobs is None
            elif seq in computed and row.num_tokens and not group.num_preemptions:
                assert row.start == computed[seq]
            self.versions.setdefault(group, self.driver.device.version)
        # Who could go on does, as far as the budget goes, unless pages came free behind it or the step is cut to fit.
        idle = {*self.scheduler.running_seqs} - {*plan.seqs}
        came_free = plan.preempted or self.config["sliding_window"]
        is_full = plan.num_tokens in (self.config["budget"], self.largest, *self.config["token_buckets"])
        for seq in idle if not is_full and not came_free else ():
            lacks, group = seq.num_tokens - seq.num_computed_tokens, seq.group
            waits = seq.num_pending and (group.beam is not None or seq.num_tokens >= group.limit)
            most = self.allocator.pages_for(min(lacks, self.chunk)) + 2
            assert not lacks or waits or self.allocator.num_available < most or group.live[0] is not seq
        for group in plan.preempted:
            assert group in running
            assert not any(row.seq.group is group for row in rows)
        assert not plan.preempted or all(seq.group in running for seq in plan.admitted)  # forks at the most
        assert all(seq.state_index is not None for seq in plan.admitted)
        assert not (running and rows) or running[0] not in plan.preempted  # the first one never is
        self.counts.update(
            rows=len(rows),
            transfers=sum(map(len, plan.transfers)),
            forks=shape.count(2),
            large_steps=plan.num_tokens > self.config["budget"],
            resumed=len({seq.group for seq in plan.admitted if seq.group.num_preemptions}),
        )

    def check_output_so_far(self, seq: Sequence) -> None:
        if seq.group in self.mixed:
            return
        if seq not in self.expected:
            version, window = self.versions[seq.group], self.config["sliding_window"]
            self.expected[seq] = undisturbed(seq.request, seq.index, seq.group.limit, window, version).output
        output = seq.output_token_ids
        assert output == self.expected[seq][: len(output)], f"{name(seq)} answers {output}, not {self.expected[seq]}"

    def note_ended(self) -> None:
        for group in self.live:
            if not group.is_finished:
                continue
            self.counts["ended"] += 1
            for seq in group.seqs:
                assert (seq.pages, seq.host_pages, seq.state_index, seq.num_pending) == ([], [], None, 0)
            if group in self.mixed or any(seq in self.stopped for seq in group.seqs):
                self.counts["mixed"] += group in self.mixed
                for seq in group.seqs if group.beam is None and group in self.versions else ():
                    self.check_output_so_far(seq)
            elif group.request.pin and group.request.request_id not in self.pinned:  # unpinned while it was computed
                assert [seq.finish_reason for seq in group.seqs] == ["abort"]
            else:
                self.driver.check_answers(group, self.versions[group])
        self.live = [group for group in self.live if not group.is_finished]

    @invariant()
    def state_is_sound(self) -> None:
        scheduler, allocator, memory = self.scheduler, self.allocator, self.memory
        scheduler.check_invariants()
        assert allocator.num_free + allocator.num_cached + allocator.num_used + 1 == allocator.num_pages
        held = {page for group in self.live for seq in group.seqs for page in seq.pages if page}
        assert 0 <= allocator.num_used - len(held) <= memory.pins.num_pages
        assert set(scheduler.running) | set(scheduler.waiting) == set(self.live)
        assert scheduler.has_work == bool(self.live)
        in_flight = self.driver.pending()
        for group in self.live:
            assert all(seq.num_pending == in_flight[seq] for seq in group.live)
            assert all(seq.num_tokens <= group.limit for seq in group.live)
            pages = {page for seq in group.seqs for page in seq.pages if page}
            assert len(pages) <= self.pages_at_most(group, group.limit)
        assert [*scheduler.running] == sorted(scheduler.running, key=lambda group: group.rank)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.drain()
        self.state_is_sound()
        for name in self.pinned:
            assert self.scheduler.unpin(name)
        assert self.allocator.num_used == 0
        cache = self.memory.prefix_cache
        self.counts.update(
            examples=1,
            requests=next(self.ids),
            tokens_computed=self.driver.device.num_computed,
            preemptions=self.scheduler.num_preemptions,
            swaps=self.scheduler.num_swaps,
            hit_tokens=self.memory.num_hit_tokens,
            copies=self.memory.num_copied_pages,
            evictions=cache.num_evictions if cache is not None else 0,
            weight_changes=self.memory.weight_version,
            hits=self.scheduler.num_hits,
        )
        self.totals.update(self.counts)


def name(seq: Sequence) -> tuple[str, int]:
    return seq.request.request_id, seq.index


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(
    max_examples=LONG // STEPS_AN_EXAMPLE or 120,
    stateful_step_count=20,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_the_machine_met_what_it_is_for(capsys):
    """Runs after the machine, and prints what it did in a long run."""
    totals = MemoryMachine.totals
    if not totals:
        pytest.skip("the machine itself was not run")
    if LONG:
        with capsys.disabled():
            print("\n" + ", ".join(f"{count:,} {what}" for what, count in sorted(totals.items())))
    wanted = {"preemptions", "swaps", "resumed", "hit_tokens", "copies", "evictions", "forks", "weight_changes", "hits"}
    wanted.add("large_steps")
    assert not {what for what in wanted if not totals[what]}, f"{totals['steps']} steps lack these"
