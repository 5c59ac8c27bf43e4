"""Sequences whose next token needs a mask: left out of plans until it is there, while the others run ahead."""

import pytest

from jpaged.structured import StructuredOutput
from tests.scheduler_driver import EOS, Driver, make_group, make_scheduler

FORM = StructuredOutput(regex="a+")


def bound(name: str, prompt=3, **options):
    return make_group(name, prompt, structured=FORM, **{"ignore_eos": False, **options})


def give_masks(*groups) -> None:
    """What `Constraints` does once it has the masks of their next tokens, of which they have read all before."""
    for group in groups:
        for seq in group.live:
            if not seq.num_pending:
                seq.mask_position = len(seq.tokens)


def drain(driver: Driver, *groups, depth: int = 1) -> None:
    """To the end; masks are there as soon as the tokens before them are."""
    for _ in range(500):
        if not driver.scheduler.has_work:
            return
        give_masks(*groups)
        driver.step(depth)
        assert all(seq.num_pending <= 1 for group in groups for seq in group.seqs)
    raise AssertionError("it does not end")


def test_a_group_without_its_grammar_waits_and_takes_nobodys_turn():
    driver = Driver(make_scheduler(max_num_seqs=2, max_passes=0))
    first, second, third = bound("first"), make_group("second", 3), make_group("third", 3)
    driver.add(first, second, third)
    assert [seq.group for seq in driver.step().seqs] == [second, third]
    assert first.num_passed == second.num_passed == 0
    assert driver.scheduler.waiting == (first,)
    give_masks(first)
    drain(driver, first)
    driver.check_answers(first)


def test_alone_it_is_no_plan_and_nobody_is_preempted():
    driver = Driver(make_scheduler())
    group = bound("a")
    driver.add(group)
    assert driver.scheduler.plan() is None
    give_masks(group)
    assert driver.step().seqs == group.seqs


def test_others_run_ahead_while_it_sits_out():
    driver = Driver(make_scheduler())
    one, other = bound("one", [3, 4, 5], max_tokens=8), make_group("other", 3, max_tokens=8)
    driver.add(one, other)
    give_masks(one)
    seqs = []
    for step in range(6):
        plan = driver.step(depth=1)
        seqs.append([seq.request.request_id for seq in plan.seqs])
        if step % 2 == 1:
            give_masks(one)
    assert seqs == [["one", "other"], ["other"], ["one", "other"], ["other"], ["one", "other"], ["other"]]


@pytest.mark.parametrize("budget", [4, 16])
@pytest.mark.parametrize("host_pages", [0, 16])
def test_answers_are_those_of_undisturbed_sequences(budget, host_pages):
    """Chunks, forks, preemption by both means, beside others."""
    preemption = {"preemption": "swap"} if host_pages else {}
    driver = Driver(make_scheduler(num_pages=9, budget=budget, host_pages=host_pages, **preemption))
    options = {"max_tokens": 12, "stop_token_ids": [], "min_tokens": 0}
    groups = [bound(name, 5 + seed, seed=seed, **options) for seed, name in enumerate("abc", 1)]
    groups += [bound("d", 5, n=2, temperature=1.0, seed=5), make_group("e", 7, max_tokens=12, seed=1)]
    driver.add(*groups)
    drain(driver, *groups[:4])
    assert driver.scheduler.num_preemptions > 0
    for group in groups:
        driver.check_answers(group)


def test_running_groups_that_all_await_masks_are_not_preempted():
    driver = Driver(make_scheduler())
    groups = [bound("a"), bound("b")]
    driver.add(*groups)
    give_masks(*groups)
    driver.step()
    assert driver.scheduler.plan() is None
    assert driver.scheduler.num_preemptions == 0
    drain(driver, *groups)


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"ignore_eos": False, "min_tokens": 4}, {}])
def test_the_end_that_a_mask_allowed_ends_the_output(options):
    driver = Driver(make_scheduler())
    group = bound("a", **options)
    driver.add(group)
    give_masks(group)
    plan = driver.scheduler.plan()
    driver.scheduler.update(plan, [EOS])
    assert (group.seqs[0].finish_reason, group.seqs[0].output_token_ids) == ("stop", [EOS])
