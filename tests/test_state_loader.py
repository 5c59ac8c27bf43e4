"""Entries and masks reach the sampler state before the step that needs them, and no others do.

What is loaded, and what the steps count, is together all that a sequence holds, however it came to run.
"""

from collections import Counter, deque
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import SchedulerConfig
from jpaged.constraints import Constraints
from jpaged.memory_manager import MemoryManager
from jpaged.request import Request, SamplingParams
from jpaged.sampler_state import entry_for, make_sampler_state
from jpaged.scheduler import Scheduler
from jpaged.sequence import Sequence, SequenceGroup
from jpaged.state_loader import StateLoader, StateLoads
from jpaged.step_plan import StepPlan
from jpaged.structured import StructuredOutput
from jpaged.token_mask import unpack_mask
from tests.constraints_driver import END, SIZE, Run, byte
from tests.plans import plan_of_rows

PAGE, VOCAB, EOS = 4, 40, 2
PENALTY = {"presence_penalty": 0.5}
PROMPT = (5, 6, 7, 8, 9, 5, 6, 7, 30, 30)


class Counting:
    """The device's counts of each entry, kept as a step keeps them; checked whenever a row samples."""

    def __init__(self, *, num_pages: int = 33, num_host_pages: int = 0, budget: int = 16, **options) -> None:
        memory = MemoryManager.for_pool(num_pages, PAGE, num_host_pages=num_host_pages)
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget, headroom_pages=0, **options)
        self.scheduler = Scheduler(config, memory, max_model_len=32)
        self.loader = StateLoader((EOS,), VOCAB, Constraints(None, VOCAB, (EOS,)))
        self.counts = {index: (Counter(), set()) for index in range(4)}
        self.loaded: list[Sequence] = []
        self.in_flight: deque[StepPlan] = deque()
        self.num_checked = 0

    def add(self, name: str, prompt=PROMPT, **params) -> SequenceGroup:
        params = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **params})
        group = SequenceGroup(Request(request_id=name, prompt_token_ids=tuple(prompt), params=params))
        self.scheduler.add(group)
        return group

    def step(self, depth: int) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            owners = {seq.state_index: seq for seq in self.scheduler.running_seqs}
            for index, entry in self.due(plan):
                output = {token: int(count) for token, count in enumerate(entry.output_counts) if count}
                self.counts[index] = (Counter(output), set(entry.prompt_mask.nonzero()[0].tolist()))
                self.loaded.append(owners[index])
            for row in plan.rows:
                self.run(row)
            self.in_flight.append(plan)
        while len(self.in_flight) > (depth if plan is not None else 0):
            done = self.in_flight.popleft()
            self.scheduler.update(done, [token_at(row.seq, row.kv_len) for row in done.rows])
        return plan

    def due(self, plan: StepPlan) -> list:
        loads = self.loader.due(plan)
        return [] if loads is None else loads.entries

    def run(self, row) -> None:
        seq = row.seq
        if not seq.request.params.uses_penalties or not row.samples:
            return
        output, prompt = self.counts[seq.state_index]
        assert prompt == set(seq.request.prompt_token_ids)
        assert output == Counter(token_at(seq, at) for at in range(seq.num_prompt_tokens, row.kv_len))
        output[token_at(seq, row.kv_len)] += 1  # what it samples, a step counts
        self.num_checked += 1

    def drain(self, depth: int) -> None:
        while self.scheduler.has_work:
            self.step(depth)


def token_at(seq: Sequence, position: int) -> int:
    """What each answer is made to say: few tokens, so that they repeat, others for each answer."""
    return (position * position + 3 * seq.index) % 7


@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_that_were_found_in_the_cache_count(depth):
    counting = Counting()
    counting.add("first")
    counting.drain(depth)
    cached = counting.add("again", **PENALTY)
    longer = counting.add("longer", [*PROMPT, 11, 12, 13], **PENALTY)
    counting.drain(depth)
    assert [group.seqs[0].num_cached_tokens for group in (cached, longer)] == [9, 10]
    assert counting.loaded == [cached.seqs[0], longer.seqs[0]]
    assert counting.num_checked == 12


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [16, 4])
def test_forks_count_the_prompt_that_their_parent_computed(depth, budget):
    counting = Counting(budget=budget)
    group = counting.add("n", n=3, **PENALTY)
    counting.drain(depth)
    assert sorted(seq.index for seq in counting.loaded) == [0, 1, 2]
    assert set(counting.loaded) == set(group.seqs)
    assert counting.num_checked == 18


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_resumed_sequences_count_all_that_they_had(depth, preemption):
    counting = Counting(num_pages=10, num_host_pages=16, preemption=preemption)
    groups = [counting.add(f"{i}", PROMPT[i:], max_tokens=12, **PENALTY) for i in range(2)]
    groups.append(counting.add("n", PROMPT[:3], max_tokens=12, n=2, **PENALTY))
    counting.drain(depth)
    assert sum(group.num_preemptions for group in groups) > 0
    assert (counting.scheduler.num_swaps > 0) == (preemption == "swap")
    assert len(counting.loaded) > 4
    # Each sequence has 12 tokens, and none of them was sampled twice.
    assert counting.num_checked == 48
    for group in groups:
        for seq in group.seqs:
            assert seq.output_token_ids == [token_at(seq, seq.num_prompt_tokens + i) for i in range(12)]


@pytest.mark.parametrize(
    ("params", "loads"),
    [({}, False), ({"logit_bias": {3: 1.0}}, True), ({"min_tokens": 2, "ignore_eos": False}, True), (PENALTY, True)],
    ids=str,
)
def test_only_what_needs_an_entry_is_loaded_and_once(params, loads):
    counting = Counting(budget=4)  # the prompt comes in three chunks
    seq = counting.add("a", **params).seqs[0]
    counting.drain(depth=1)
    assert counting.loaded == [seq] * loads


def test_the_entry_is_the_one_of_the_parameters():
    counting = Counting()
    group = counting.add("a", min_tokens=2, logit_bias={3: 1.5}, stop_token_ids=[9])
    plan = counting.scheduler.plan()
    ((index, entry),) = counting.due(plan)
    assert index == group.seqs[0].state_index
    for got, expected in zip(entry, entry_for(group.request.params, (EOS,), VOCAB, prompt=PROMPT), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert counting.due(replace(plan, admitted=())) == []


@pytest.mark.parametrize(("ending", "expected"), [("nothing", 1), ("clear", 0), ("abort", 0)])
def test_who_has_no_row_yet_waits_for_it_and_is_forgotten_at_its_end(ending, expected):
    counting = Counting()
    seq = counting.add("a", **PENALTY).seqs[0]
    with_row = replace(counting.scheduler.plan(), admitted=())
    without_row = plan_of_rows([], admitted=(seq,))
    assert counting.due(without_row) == []
    if ending == "clear":
        counting.loader.clear()
    elif ending == "abort":
        counting.scheduler.abort("a")
    assert len(counting.due(with_row)) == expected
    assert counting.due(with_row) == []


def made(run: Run) -> StateLoader:
    return StateLoader([END], SIZE, run.constraints)


def test_loads_what_a_plan_needs():
    run = Run()
    loader = made(run)
    form = run.add("form", structured=StructuredOutput(choice=["ab"]))
    listed = run.add("listed", allowed_token_ids=[7, 9])
    free = run.add("free")
    run.settle()
    plan = run.scheduler.plan()
    state = loader.load(make_sampler_state(4, SIZE), loader.due(plan))
    masks = np.asarray(state.token_mask)
    assert unpack_mask(masks[form.seqs[0].state_index]) == [byte("a")]
    assert unpack_mask(masks[listed.seqs[0].state_index]) == [7, 9]
    assert len(unpack_mask(masks[free.seqs[0].state_index])) >= SIZE


def test_nothing_is_due_for_most_plans():
    run = Run()
    loader = made(run)
    run.add("free")
    assert loader.due(run.scheduler.plan()) is None


def test_warming_up_changes_nobodys_entry():
    loader = made(Run())
    state = make_sampler_state(4, SIZE)
    before = jax.tree.map(lambda leaf: np.full_like(leaf, 1), state)
    state = loader.warm_up(jax.tree.map(jnp.asarray, before), masks=True)
    for leaf, old in zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(leaf[:4], old[:4])


def test_after_a_warm_up_no_load_compiles(monkeypatch):
    size = SIZE + 1  # of which no other test compiled anything
    loader = StateLoader([END], size, Run().constraints)
    state = loader.warm_up(
        jax.device_put(make_sampler_state(4, size), jax.devices()[0]), masks=True
    )  # as engines bind it
    assert all(leaf.committed for leaf in jax.tree.leaves(state))
    entry, mask = entry_for(SamplingParams(), (), size), np.zeros(state.token_mask.shape[1], np.uint32)
    with monkeypatch.context() as patch:
        patch.setattr("jax._src.compiler.compile_or_get_cached", lambda *args, **kwargs: pytest.fail("compiles"))
        for count in (0, 1, 4):
            state = loader.load(state, StateLoads([(0, entry)], [(index, mask) for index in range(count)]))


def test_clear_forgets_who_had_no_row_yet():
    run = Run()
    loader = made(run)
    run.add("a", structured=StructuredOutput(choice=["ab"]), min_tokens=1)
    run.settle()
    run.scheduler.plan()
    loader.clear()
    assert not run.constraints._states
    assert not loader._awaiting
    assert loader.due(plan_of_rows([])) is None
