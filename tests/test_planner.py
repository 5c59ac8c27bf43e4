"""What the planner does for many rows at once is what it would do row by row; its rules are in `test_scheduler`."""

from collections import Counter

import pytest

from jpaged.structured import StructuredOutput
from tests.scheduler_driver import Driver, make_group, make_scheduler


@pytest.mark.parametrize("num_pages", [9, 33])
def test_pages_for_all_at_once_are_those_that_each_would_get(num_pages):
    """In a large pool nobody can be in want of a page, and they are given together; in a small one by the order."""
    driver = Driver(make_scheduler(num_pages, budget=32))
    groups = [make_group(str(index), 4, seed=index, max_tokens=9) for index in range(4)]
    driver.add(*groups)
    with_pages = Counter()
    while driver.scheduler.has_work:
        plan = driver.step(1)
        sizes = {len(row.seq.pages) for row in plan.rows} if plan is not None else set()
        with_pages[tuple(sorted(sizes))] += 1
    assert (driver.scheduler.num_preemptions > 0) == (num_pages == 9)
    assert num_pages == 9 or set(with_pages) == {(), (1,), (2,), (3,)}
    for group in groups:
        driver.check_answers(group)


BUCKETS = (2, 8, 16, 32)


@pytest.mark.parametrize(
    ("prompts", "num_tokens"),
    [
        ((10, 9, 3), 16),  # the third waits for a row, so the second is cut
        ((10, 9), 19),  # nobody waits: everybody is served at once, whatever the padding
        ((10, 6, 3), 16),
        ((4, 3, 3), 7),  # 2 would be less than half of 7
        ((1, 1, 3), 2),
        ((40, 20, 3), 32),
    ],
)
def test_where_somebody_waits_prompts_are_cut_to_fill_a_step(prompts: tuple[int, ...], num_tokens: int) -> None:
    options = {"num_pages": 65, "max_num_seqs": 2, "budget": 32, "max_model_len": 48}
    driver = Driver(make_scheduler(**options, token_buckets=BUCKETS))
    groups = [make_group(str(index), prompt, seed=index) for index, prompt in enumerate(prompts)]
    driver.add(*groups)
    plan = driver.step(0)
    assert plan is not None
    assert plan.num_tokens == num_tokens
    driver.drain(0)
    for group in groups:
        driver.check_answers(group)


def test_decoding_rows_count_and_a_group_that_lacks_pages_waits_too() -> None:
    driver = Driver(make_scheduler(11, max_num_seqs=4, budget=32, token_buckets=BUCKETS, max_chunk_tokens=8))
    first, second, third = (make_group(str(index), prompt, seed=index) for index, prompt in enumerate((6, 20, 20)))
    driver.add(first)
    driver.step(0)
    driver.add(second, third)
    plans = [driver.step(0) for _ in range(3)]
    # One decodes beside a chunk of 8; that the third waits is known once it was tried.
    assert [plan and plan.num_tokens for plan in plans] == [9, 8, 6]
    driver.drain(1)
    for group in (first, second, third):
        driver.check_answers(group)


# ------------------------------------------------------------------------------------------------ the larger budget
#
# 16 tokens a step, 32 where nobody waits for a next one.


def driver_of(*, prefill: int | None = 32, **options) -> Driver:
    sizes = {"num_pages": 65, "max_num_seqs": 4, "budget": 16, "max_model_len": 80, "max_num_prefill_tokens": prefill}
    return Driver(make_scheduler(**sizes | options))


def num_tokens(driver: Driver) -> int:
    """Of the next step, of which nothing is read."""
    plan = driver.dispatch()
    assert plan is not None
    return plan.num_tokens


@pytest.mark.parametrize(
    ("prompts", "buckets", "sizes"),
    [
        ((70,), (), [32, 32, 6]),
        ((20, 50), (), [32, 32, 6]),
        ((20,), (), [20]),
        ((70,), (16, 32), [32, 32, 6]),
        ((31,), (16, 32), [16, 15]),  # a size that it does not fill costs more than it gains
        ((20, 12), (16, 32), [32]),
        ((60,), (16, 24, 32), [32, 24, 4]),
        ((20, 20), (8, 24), [24, 16]),
        ((31,), (8, 32), [8, 8, 15]),  # a part of the ordinary budget may fill one
        ((70,), (8, 16), [16, 16, 16, 16, 6]),  # there is none that is larger
        ((9, 3), (16, 32), [12]),
    ],
)
def test_prompts_alone_may_take_the_larger_budget_and_fill_what_they_take(prompts, buckets, sizes) -> None:
    driver = driver_of(token_buckets=buckets)
    groups = [make_group(str(index), prompt, seed=index, max_tokens=1) for index, prompt in enumerate(prompts)]
    driver.add(*groups)
    assert [plan.num_tokens for plan in driver.drain(0)] == sizes
    for group in groups:
        driver.check_answers(group)


def test_where_somebody_waits_for_a_row_a_large_step_is_cut_too() -> None:
    driver = driver_of(token_buckets=(16, 32, 64), prefill=64, max_num_seqs=2)
    groups = [make_group(str(index), 25, seed=index, max_tokens=1) for index in range(3)]
    driver.add(*groups)
    assert [plan.num_tokens for plan in driver.drain(0)] == [32, 32, 11]
    for group in groups:
        driver.check_answers(group)


@pytest.mark.parametrize(("num_pages", "sizes"), [(11, [16, 8, 16, 8]), (65, [32, 16])])
def test_prompts_whose_pages_are_not_there_fill_no_large_step(num_pages: int, sizes: list[int]) -> None:
    driver = driver_of(num_pages=num_pages, max_model_len=28, token_buckets=(8, 16, 32), prefix_cache=False)
    groups = [make_group(str(index), 24, seed=index, max_tokens=1) for index in range(2)]
    driver.add(*groups)
    assert [plan.num_tokens for plan in driver.drain(0)] == sizes
    for group in groups:
        driver.check_answers(group)


def test_what_is_in_the_cache_fills_no_large_step() -> None:
    driver, shared = driver_of(token_buckets=(8, 16, 32)), [(5 * i) % 11 for i in range(24)]
    driver.add(make_group("first", shared, max_tokens=1))
    driver.drain(0)
    groups = [make_group(str(index), [*shared, *[index] * 7], seed=index, max_tokens=1) for index in range(1, 4)]
    driver.add(*groups)
    assert [plan.num_tokens for plan in driver.drain(0)] == [16, 5]  # of 93 that they have; not 21 of 32
    for group in groups:
        driver.check_answers(group)


def test_without_a_budget_of_its_own_a_prompt_takes_that_of_any_step() -> None:
    for prefill in (None, 16):
        driver = driver_of(prefill=prefill)
        driver.add(make_group("a", 70))
        assert num_tokens(driver) == 16


def test_chunks_stay_as_short_as_they_are_asked_to_be() -> None:
    driver = driver_of(max_chunk_tokens=12)
    driver.add(*(make_group(str(index), 40, seed=index) for index in range(3)))
    plan = driver.dispatch()
    assert plan is not None
    assert sorted(plan.q_lens.tolist()) == [8, 12, 12]
    driver = driver_of(max_chunk_tokens=24)  # more than the ordinary budget
    driver.add(*(make_group(str(index), 40, seed=index) for index in range(2)))
    plan = driver.dispatch()
    assert plan is not None
    assert sorted(plan.q_lens.tolist()) == [8, 24]


@pytest.mark.parametrize("place", [0, 1])
def test_one_row_that_decodes_keeps_the_step_small(place: int) -> None:
    driver = driver_of()
    groups = [make_group("a", 3, max_tokens=3), make_group("b", 60, seed=1, max_tokens=1)]
    driver.add(groups[place])
    driver.add(groups[1 - place])
    sizes = [driver.step(1).num_tokens for _ in range(4)]  # type: ignore[union-attr]
    # It decodes twice beside the prompt, whose last token is left then; or it comes when that is computed.
    assert sizes == ([32, 16, 16, 1] if place == 0 else [32, 31, 1, 1])
    driver.drain(1)
    for group in groups:
        driver.check_answers(group)


@pytest.mark.parametrize(("max_tokens", "size"), [(1, 32), (2, 16)])
def test_whose_last_token_is_merely_not_read_yet_holds_nobody_back(max_tokens: int, size: int) -> None:
    driver = driver_of()
    driver.add(make_group("a", 3, max_tokens=max_tokens))
    driver.dispatch()
    driver.add(make_group("b", 60, seed=1))
    assert num_tokens(driver) == size
    driver.drain(1)


def test_a_prompt_that_is_scored_and_not_read_yet_holds_nobody_back() -> None:
    driver = driver_of()
    driver.add(make_group("a", 3, max_tokens=0, prompt_logprobs=0))
    driver.dispatch()
    driver.add(make_group("b", 60, seed=1))
    assert num_tokens(driver) == 32


def test_a_prompt_whose_grammar_is_not_there_yet_fills_no_step() -> None:
    driver = driver_of(token_buckets=(16, 32))
    bound = make_group("a", 20, ignore_eos=False, structured=StructuredOutput(regex="a+"))
    driver.add(bound, make_group("b", 20, seed=1))
    assert num_tokens(driver) == 16  # 20 of 40 will not come


@pytest.mark.parametrize(("max_tokens", "size"), [(1, 32), (8, 16)])
def test_who_awaits_a_mask_keeps_the_step_small_unless_it_has_all_its_tokens(max_tokens: int, size: int) -> None:
    driver = driver_of()
    bound = make_group("a", 3, max_tokens=max_tokens, ignore_eos=False, structured=StructuredOutput(regex="a+"))
    driver.add(bound)
    bound.seqs[0].mask_position = 3  # the mask of its first token is there, and no other
    driver.dispatch()
    driver.add(make_group("b", 60, seed=1))
    assert num_tokens(driver) == size


def test_beams_whose_choice_the_host_has_yet_to_make_keep_the_step_small() -> None:
    driver = driver_of()
    driver.add(make_group("a", 3, max_tokens=5, use_beam_search=True, temperature=0.0, best_of=2))
    driver.dispatch()
    driver.add(make_group("b", 60, seed=1))
    assert num_tokens(driver) == 16
    driver.drain(1)


@pytest.mark.parametrize("host_pages", [0, 16])
def test_who_was_preempted_keeps_the_step_small(host_pages: int) -> None:
    driver = driver_of(host_pages=host_pages, preemption="swap" if host_pages else "auto")
    first, second = make_group("a", 3, max_tokens=5), make_group("b", 60, seed=1, max_tokens=1)
    driver.add(first)
    driver.step(0)
    driver.step(0)
    driver.scheduler._queues.preempt(first)
    driver.add(second)
    assert num_tokens(driver) == 16
    driver.drain(0)
    for group in (first, second):
        driver.check_answers(group)
