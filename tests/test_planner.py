"""What the planner does for many rows at once is what it would do row by row; its rules are in `test_scheduler`."""

from collections import Counter

import pytest

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
