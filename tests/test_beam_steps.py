"""Beam searches on pages: whatever becomes of their pages, they are those of `BeamSearch` alone."""

import pytest

from tests.scheduler_driver import Driver, likeliest, make_group, make_scheduler

BEAMS = {"use_beam_search": True, "temperature": 0.0}


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("num_pages", [40, 14])
@pytest.mark.parametrize("host_pages", [0, 20])
def test_beams_on_pages_are_those_of_the_search_alone(early_stopping, num_pages, host_pages):
    options = {"host_pages": host_pages, "preemption": "swap", "max_chunk_tokens": 5}
    driver = Driver(make_scheduler(num_pages, max_num_seqs=9, budget=12, **options))
    wide = {"n": 2, "best_of": 3, "early_stopping": early_stopping, "ignore_eos": False, **BEAMS}
    groups = [make_group(f"r{i}", 2 + 2 * i, seed=i, max_tokens=9, length_penalty=i - 1.0, **wide) for i in range(4)]
    driver.add(make_group("a", 3, max_tokens=20), *groups)
    driver.drain(depth=1)
    for each in groups:
        driver.check_answers(each)
    assert (driver.scheduler.num_preemptions > 0) == (num_pages == 14)
    assert driver.memory.num_copied_pages > 0
    assert driver.memory.allocator.num_used == 0


def test_a_beam_is_not_taken_twice_after_a_preemption():
    """One beam has been computed, the other has not, when the search loses its pages and computes both again."""
    driver = Driver(make_scheduler(num_pages=9, max_num_seqs=4, prefix_cache=False))
    group = make_group("b", 3, n=2, max_tokens=8, **BEAMS)
    driver.add(group)
    for _ in range(4):
        driver.step()
    queues, beams = driver.scheduler._queues, driver.scheduler._beams
    # As by a step that did not reach the first beam.
    assert not beams.take(group.seqs[1], [(1, -1.0), (2, -2.0), (3, -3.0), (4, -4.0)])
    queues.preempt(group)
    driver.drain()
    driver.check_answers(group)


@pytest.mark.parametrize("seed", [4, 9])
def test_a_search_fails_as_a_whole(seed):
    driver, group = Driver(make_scheduler()), make_group("a", 9, seed=seed, n=3, max_tokens=10, **BEAMS)
    driver.add(group)
    driver.drain(depth=1)
    assert [seq.finish_reason for seq in group.seqs] == ["error"] * 3
    driver.check_answers(group)


def test_beams_share_pages_until_they_differ():
    driver, group = Driver(make_scheduler()), make_group("a", 8, n=3, max_tokens=9, **BEAMS)
    driver.add(group)
    driver.step()
    assert len(group.seqs) == 3
    assert driver.memory.allocator.num_used == 2
    driver.step()
    assert 3 <= driver.memory.allocator.num_used <= 2 + 3
    assert len({seq.state_index for seq in group.seqs}) == 3
    driver.drain()
    driver.check_answers(group)


def test_a_step_of_beams_needs_their_candidates():
    scheduler = make_scheduler()
    scheduler.add(make_group("a", 3, n=2, **BEAMS))
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(ValueError, match="'a' searches with beams: give the candidates of its rows"):
        scheduler.update(plan, [1])
    scheduler = make_scheduler()
    scheduler.add(make_group("a", 3, n=2, **BEAMS))
    plan = scheduler.plan()
    assert plan is not None
    assert scheduler.update(plan, [1], lambda row: likeliest(row, 8)) == ([[]], [0], set())
