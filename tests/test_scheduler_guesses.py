"""Rows that guess: every answer is that of single steps, and what was guessed in vain counts as never done."""

import numpy as np
import pytest

from jpaged.drafts import FAILED, NO_TOKEN
from jpaged.sequence import SequenceGroup
from jpaged.step_plan import StepPlan
from tests.scheduler_driver import (
    EOS,
    Driver,
    FakeDevice,
    Results,
    guesses_of,
    make_group,
    make_scheduler,
    undisturbed,
)

BEAMS = {"use_beam_search": True, "temperature": 0.0, "n": 2, "best_of": 2}


def decoding(*groups: SequenceGroup, most: int = 4, **options) -> Driver:
    """The prompts are computed."""
    driver = Driver(make_scheduler(guesses=most, **options))
    driver.add(*groups)
    driver.step()
    return driver


def guessing(driver: Driver) -> StepPlan:
    """The next plan in which somebody guesses."""
    for _ in range(20):
        plan = driver.dispatch()
        assert plan is not None
        if plan.drafts is not None:
            return plan
        driver.collect()
    raise AssertionError("nobody guesses")


def long_answer(seed: int) -> list[int]:
    """Ten tokens."""
    return undisturbed(make_group("a", 5, seed=seed, max_tokens=10).request, 0, 15).output


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_cache": False, "max_chunk_tokens": 3},
        {"host_pages": 40, "preemption": "swap", "num_pages": 17},
        {"sliding_window": 6, "max_chunk_tokens": 4, "num_pages": 14},
        {"page_size": 1, "num_pages": 61},
    ],
    ids=lambda options: " ".join(options),
)
def test_answers_do_not_depend_on_guesses(options, depth):
    kinds = [{}, {"n": 2}, {"ignore_eos": False, "min_tokens": 3}, {"stop_token_ids": [3]}, {"best_of": 2}, BEAMS]
    options = {"num_pages": 20, "page_size": 4, "max_num_seqs": 6, "budget": 40, "max_model_len": 40, **options}
    driver = Driver(make_scheduler(guesses=4, **options))
    scheduler = driver.scheduler
    for first in range(0, 24, 3):
        groups = [
            make_group(f"r{i}", [*range(9 * (i % 2)), i % 12], seed=i, max_tokens=12 + i % 5, **kinds[i % len(kinds)])
            for i in range(first, first + 3)
        ]
        driver.add(*groups)
        driver.drain(depth)
        for group in groups:
            driver.check_answers(group)
    assert scheduler.num_hits > 40
    assert scheduler.num_guesses > scheduler.num_hits
    assert driver.memory.allocator.num_used == 0
    assert (driver.memory.num_hit_tokens > 0) == options.get("prefix_cache", True)


def test_nothing_is_planned_before_guesses_were_judged():
    driver = decoding(make_group("a", 5, max_tokens=12), make_group("b", 6, seed=3, max_tokens=12))
    plan = guessing(driver)
    assert driver.dispatch() is None
    driver.collect()
    following = driver.dispatch()
    assert following is not None
    assert following.starts.tolist() == [len(seq.tokens) - 1 for seq in following.seqs]
    assert not following.from_device[[seq in plan.seqs for seq in following.seqs]].any()


def test_a_row_that_could_guess_is_not_planned_ahead():
    driver = decoding(make_group("a", 5, max_tokens=16), num_pages=30)
    waited = 0
    while driver.scheduler.has_work:
        plan = driver.dispatch()
        assert plan is not None
        if plan.drafts is None and driver.scheduler.running:
            waited += driver.dispatch() is None
        while driver.in_flight:
            driver.collect()
    assert waited > 0


def test_pages_of_guesses_in_vain_are_given_back():
    driver = decoding(make_group("a", 4, max_tokens=20), page_size=1, num_pages=40, max_model_len=30)
    (seq,) = driver.scheduler.running_seqs
    plan = guessing(driver)
    (guesses,) = guesses_of(plan)
    before, version = len(seq.tokens), seq.pages_version
    assert len(seq.pages) == before + len(guesses)
    driver.scheduler.update(plan, [[guesses[0], 11] + [NO_TOKEN] * (len(guesses) - 1)])
    assert len(seq.tokens) == before + 2
    assert len(seq.pages) == seq.num_computed_tokens == before + 1
    assert (seq.num_pending, seq.writable_end) == (0, before + 1)
    assert (seq.pages_version == version) == (len(guesses) == 1)
    driver.scheduler.check_invariants()


@pytest.mark.parametrize(
    ("end", "reason", "stop_reason"), [(EOS, "stop", None), (3, "stop", 3), (FAILED, "error", None)]
)
def test_what_comes_after_the_end_is_dropped(end, reason, stop_reason):
    seed = next(i for i in range(99) if {EOS, 3}.isdisjoint(long_answer(i)))
    group = make_group("a", 5, seed=seed, max_tokens=10, ignore_eos=False, stop_token_ids=[3])
    driver = decoding(group, num_pages=30)
    (seq,) = group.seqs
    plan = guessing(driver)
    while len(guesses_of(plan)[0]) < 3:
        driver.collect()
        plan = guessing(driver)
    width = len(guesses_of(plan)[0]) + 1
    before = list(seq.tokens)
    line = np.full(width, 7)
    line[1] = end
    results = driver.scheduler.update(plan, line[None])
    kept = [7] if end == FAILED else [7, end]
    assert results == ([kept], [0], {0})
    assert (seq.tokens, seq.finish_reason, seq.stop_reason) == (before + kept, reason, stop_reason)
    assert driver.memory.allocator.num_used == 0
    driver.scheduler.check_invariants()


def test_what_a_row_guessed_in_vain_is_not_found_by_others():
    """The pages of an ended sequence hold its tokens, up to those that were guessed in their place."""
    first = make_group("a", 6, max_tokens=15)
    driver = decoding(first, num_pages=30, max_model_len=40)
    driver.drain()
    assert driver.scheduler.num_guesses > driver.scheduler.num_hits
    answer = tuple(first.seqs[0].tokens)
    for end in range(7, 21):
        again = make_group(f"b{end}", answer[:end], seed=0, max_tokens=3)
        driver.add(again)
        driver.drain()
        driver.check_answers(again)
        assert again.seqs[0].num_cached_tokens == end - 1


def test_guesses_preempt_nobody_and_end_with_the_length():
    groups = [make_group(f"r{i}", 4, seed=i, max_tokens=12) for i in range(2)]
    driver = decoding(*groups, num_pages=9, page_size=4, max_model_len=16)
    plans = driver.drain()
    assert driver.scheduler.num_preemptions == 0
    assert any(plan.drafts is not None for plan in plans)
    for group in groups:
        driver.check_answers(group)


@pytest.mark.parametrize("how", ["abort", "finish"])
def test_a_sequence_may_end_while_its_guesses_are_in_flight(how):
    stays, goes = make_group("a", 5, max_tokens=12), make_group("b", 5, seed=3, max_tokens=12)
    driver = decoding(stays, goes, num_pages=30)
    plan = guessing(driver)
    while goes.seqs[0] not in plan.seqs or not guesses_of(plan)[plan.seqs.index(goes.seqs[0])]:
        driver.collect()
        plan = guessing(driver)
    tokens = list(goes.seqs[0].tokens)
    if how == "abort":
        driver.scheduler.abort("b")
    else:
        driver.scheduler.finish(goes.seqs[0], "stop", "###")
    driver.scheduler.check_invariants()
    assert driver.collect()[plan.seqs.index(goes.seqs[0])] == []
    assert goes.seqs[0].tokens == tokens
    driver.drain()
    driver.check_answers(stays)


def test_a_stop_string_takes_back_the_tokens_after_it():
    driver, group = decoding(make_group("a", 5, max_tokens=14)), None
    (seq,) = driver.scheduler.running_seqs
    group = seq.group
    plan = guessing(driver)
    before = list(seq.tokens)
    line = undisturbed(group.request, 0, group.limit).output
    del plan
    (new,) = driver.collect()
    assert new
    driver.scheduler.finish(seq, "stop", "###", num_dropped=len(new) - 1)
    assert seq.tokens == before + new[:1]
    assert seq.output_token_ids == line[: len(seq.output_token_ids)]
    assert (seq.finish_reason, seq.stop_reason) == ("stop", "###")


def test_the_plan_that_will_not_be_read_holds_nobody_up():
    driver = decoding(make_group("a", 5, max_tokens=12))
    guessing(driver)
    driver.scheduler.abort("a")
    driver.in_flight.clear()
    driver.scheduler.abandon_plan()
    driver.device = FakeDevice(driver.memory.allocator.page_size)
    other = make_group("b", 5, max_tokens=12)
    driver.add(other)
    driver.drain()
    driver.check_answers(other)


def test_candidates_are_those_of_the_row_whatever_others_guess():
    beams, other = make_group("a", 5, max_tokens=8, **BEAMS), make_group("b", 5, seed=3, max_tokens=12)
    driver = decoding(beams, other, num_pages=30)
    plan = guessing(driver)
    assert isinstance(driver.in_flight[0][1], Results)
    assert all(not guessed for seq, guessed in zip(plan.seqs, guesses_of(plan), strict=True) if seq.group is beams)
    driver.drain()
    driver.check_answers(beams)
    driver.check_answers(other)
