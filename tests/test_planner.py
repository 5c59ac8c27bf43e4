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
