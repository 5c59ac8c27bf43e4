"""Who is served first, who may pass whom, who gives pages back, and when they return."""

import random

import pytest

from jpaged.preemption import PreemptionCosts
from jpaged.sequence import SequenceGroup, SequenceStatus
from jpaged.step_plan import StepPlan
from tests.scheduler_driver import Driver, make_group, make_scheduler


def names(groups) -> str:
    """Of groups or sequences, in one word."""
    return "".join(item.request.request_id for item in groups)


def run_ids(plan: StepPlan | None) -> str:
    assert plan is not None
    return names(plan.seqs)


# ------------------------------------------------------------------------------------------------ passing


def test_with_no_passes_the_head_of_the_queue_blocks_those_behind_it():
    driver = Driver(make_scheduler(num_pages=5, max_passes=0))  # 16 tokens
    driver.add(make_group("a", 7, max_tokens=2), make_group("b", 12, max_tokens=2, seed=1), make_group("c", 1, seed=2))
    assert run_ids(driver.step()) == "a"  # c would fit, but b is first
    assert run_ids(driver.step()) == "a"
    assert run_ids(driver.step()) == "b"


def test_so_many_younger_ones_pass_the_head_and_then_all_wait():
    driver = Driver(make_scheduler(num_pages=7, max_num_seqs=8, max_passes=3, prefix_cache=False))
    long, big = make_group("L", 9, max_tokens=12), make_group("B", 15, seed=1, max_tokens=1)
    driver.add(long, big, *(make_group(str(i), 1, max_tokens=1) for i in range(6)))
    assert run_ids(driver.step()) == "012L"  # tokens of one first
    assert big.num_passed == 3
    for _ in range(3):
        assert run_ids(driver.step()) == "L"  # 3, 4 and 5 would fit
    driver.scheduler.abort("L")
    assert run_ids(driver.step()) == "3B"  # the budget ends
    assert run_ids(driver.step()) == "45"


def test_a_group_waits_for_the_state_indices_of_all_its_answers():
    driver = Driver(make_scheduler(max_num_seqs=4, max_passes=1))
    a, b = make_group("a", 3, max_tokens=6, n=2), make_group("b", 3, seed=1, n=3)
    driver.add(a, b, make_group("c", 1, max_tokens=8), make_group("d", 1, seed=3))
    assert run_ids(driver.step()) == "caa"
    assert names(driver.scheduler.waiting) == "bd"  # c passed b, d may not
    driver.drain()
    driver.check_answers(b)


# ------------------------------------------------------------------------------------------------ priorities


def test_priorities_come_first_and_ties_in_the_order_of_arrival():
    driver = Driver(make_scheduler(policy="priority", priority_aging_s=10.0, max_num_seqs=1))
    for name, priority, arrival in (("a", 1, 0.0), ("b", 0, 1.0), ("c", 2, 2.0), ("d", 0, 2.0), ("e", 0, 2.0)):
        driver.add(make_group(name, 2, max_tokens=1, priority=priority, arrival_time_s=arrival))
    assert [run_ids(driver.step()) for _ in range(5)] == ["b", "d", "e", "a", "c"]


def test_nobody_starves_since_priorities_age():
    driver = Driver(make_scheduler(policy="priority", priority_aging_s=10.0, max_num_seqs=1))
    driver.add(make_group("old", 2, max_tokens=1, priority=3, arrival_time_s=0.0))
    served = []
    for second in range(60):  # one step a second, and in each a more urgent request arrives
        driver.add(make_group(f"r{second}", 2, max_tokens=1, priority=0, arrival_time_s=float(second)))
        served.append(run_ids(driver.step()))
    assert served.index("old") == 30  # it is ahead of those that came 30 seconds after it, or later
    assert [name for name in served if name != "old"] == [f"r{second}" for second in range(59)]


def test_fcfs_reads_no_priority():
    driver = Driver(make_scheduler(max_num_seqs=1))
    driver.add(make_group("a", 2, max_tokens=1, priority=5), make_group("b", 2, max_tokens=1))
    assert [run_ids(driver.step()) for _ in range(2)] == ["a", "b"]


def test_the_least_urgent_one_gives_way():
    driver = Driver(make_scheduler(num_pages=4, policy="priority", prefix_cache=False))
    options = {"max_tokens": 6, "arrival_time_s": 0.0}
    a, b, c = (make_group(name, 3, priority=p, **options) for name, p in (("a", 1), ("b", 2), ("c", 0)))
    driver.add(a, b, c)
    driver.step()
    assert names(driver.scheduler.running) == "cab"
    driver.step()
    plan = driver.step()
    assert plan is not None
    assert names(plan.preempted) == "ba"
    driver.drain()
    for group in (a, b, c):
        driver.check_answers(group)


# ------------------------------------------------------------------------------------------------ preemption


def full_pool(*, num_pages: int = 4, **options) -> tuple[Driver, list[SequenceGroup]]:
    """Three sequences of one page each; two steps later the first one needs a second page."""
    driver = Driver(make_scheduler(num_pages, **options))
    groups = [make_group(name, 3, seed=i, max_tokens=6) for i, name in enumerate("abc")]
    driver.add(*groups)
    driver.step()
    driver.step()
    return driver, groups


def test_the_last_one_is_preempted_and_resumed_before_anybody_new():
    driver, (a, b, c) = full_pool(prefix_cache=False)
    plan = driver.step()  # a and b need a second page: that of c, then that of b itself
    assert plan is not None
    assert run_ids(plan) == "a"
    assert names(plan.preempted) == "cb"
    for group in (b, c):
        (seq,) = group.seqs
        assert (seq.status, seq.pages, seq.num_computed_tokens) == (SequenceStatus.WAITING, [], 0)
        assert (seq.state_index, group.num_preemptions, len(seq.output_token_ids)) == (None, 1, 2)
    new = make_group("new", 1, max_tokens=1)
    driver.add(new)
    assert names(driver.scheduler.waiting) == "bcnew"
    assert driver.scheduler.num_preemptions == 2
    assert run_ids(driver.step()) == "a"  # b needs 2 pages with its 5 tokens; nobody may pass it
    admitted = "".join(names(plan.admitted) for plan in driver.drain())
    assert admitted == "bcnew"
    for group in (a, b, c, new):
        driver.check_answers(group)


def test_nobody_is_computed_a_third_time_while_others_can_go_on():
    driver, groups = full_pool(prefix_cache=False)
    driver.add(*(make_group(name, 3, seed=i, max_tokens=6) for i, name in enumerate("defgh")))
    driver.drain()
    assert driver.scheduler.num_preemptions > 2
    for group in groups:
        assert group.num_recomputed <= 1


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_group_goes_and_comes_as_a_whole(prefix_cache):
    driver = Driver(make_scheduler(num_pages=9, max_num_seqs=6, prefix_cache=prefix_cache))
    first, group = make_group("a", 6, max_tokens=12), make_group("b", 5, seed=1, n=3, max_tokens=7)
    driver.add(first, group)
    for _ in range(50):
        plan = driver.step()
        if plan is None:
            break
        rows = sum(seq.group is group for seq in plan.seqs)
        running = {seq.status for seq in group.live}
        assert len(running) <= 1
        if group in plan.preempted:
            assert rows == 0
            assert not any(seq.pages or seq.state_index is not None for seq in group.seqs)
        if group.num_preemptions and any(seq.group is group for seq in plan.admitted):
            assert {seq for seq in plan.admitted if seq.group is group} == set(group.live)
    assert group.num_preemptions > 0
    driver.check_answers(first)
    driver.check_answers(group)


def test_the_first_one_is_never_preempted():
    driver = Driver(make_scheduler(num_pages=9, max_num_seqs=6, budget=12))
    rng = random.Random(1)
    driver.add(*(make_group(f"r{i}", rng.randrange(1, 12), seed=i, max_tokens=9, n=1 + i % 2) for i in range(20)))
    while driver.scheduler.has_work:
        running = driver.scheduler.running
        plan = driver.step()
        assert plan is not None
        assert plan.seqs
        assert not running or running[0] not in plan.preempted
    assert driver.scheduler.num_preemptions > 0


# ------------------------------------------------------------------------------------------------ swapping


def test_swapping_moves_pages_out_and_back_and_computes_nothing_again():
    driver, groups = full_pool(num_pages=4, prefix_cache=False, host_pages=2, preemption="swap")
    plan = driver.step()
    assert plan is not None
    assert names(plan.preempted) == "cb"
    assert len(plan.transfers.swapped_out) == 2
    driver.drain()
    assert (driver.scheduler.num_swaps, driver.scheduler.num_preemptions) == (2, 2)
    assert [group.num_recomputed for group in groups] == [0, 0, 0]
    assert driver.device.num_computed == 3 * (3 + 6 - 1)
    for group in groups:
        driver.check_answers(group)


def test_when_the_host_is_full_tokens_are_computed_again():
    driver, groups = full_pool(prefix_cache=False, host_pages=1, preemption="swap")
    driver.drain()
    assert (driver.scheduler.num_swaps, driver.scheduler.num_preemptions) == (1, 2)
    assert [group.num_recomputed for group in groups] == [0, 1, 0]
    for group in groups:
        driver.check_answers(group)


@pytest.mark.parametrize(("prefill_s", "swaps"), [(1.0, 2), (0.1, 0)])
def test_auto_takes_what_is_cheaper(prefill_s, swaps):
    costs = PreemptionCosts(prefill_s_per_token=prefill_s, swap_s=1.0, swap_s_per_page=1.0)
    options = {"host_pages": 4, "preemption": "auto", "costs": costs}
    driver, groups = full_pool(prefix_cache=False, **options)
    driver.step()
    assert (driver.scheduler.num_swaps, driver.scheduler.num_preemptions) == (swaps, 2)
    driver.drain()
    for group in groups:
        driver.check_answers(group)


@pytest.mark.parametrize("preemption", ["auto", "recompute"])
def test_without_costs_auto_means_recompute(preemption):
    driver, _ = full_pool(prefix_cache=False, host_pages=4, preemption=preemption)
    driver.drain()
    assert driver.scheduler.num_swaps == 0
    assert driver.scheduler.num_preemptions > 0


def test_answers_that_share_pages_share_them_on_the_host_too():
    options = {"host_pages": 20, "preemption": "swap", "prefix_cache": False}
    driver = Driver(make_scheduler(num_pages=9, max_num_seqs=6, **options))
    first, group = make_group("a", 10, max_tokens=14), make_group("b", 9, seed=1, n=3, max_tokens=6)
    driver.add(first, group)
    out, back = [], []
    for plan in driver.drain():
        out += plan.transfers.swapped_out
        back += plan.transfers.swapped_in
    assert len(out) == len({page for page, _ in out}) == len(back) > 0
    assert len(out) < 3 * 3  # not three times the prompt's
    for each in (first, group):
        driver.check_answers(each)
