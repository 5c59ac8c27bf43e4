"""Counters are sums over the steps; the pool's use is exact, and its peak is the fullest moment."""

import dataclasses

import pytest

from jpaged.stats import EngineStats, PoolUse, StatsCounter


def use(pages: int, tokens: int, running: int = 1) -> PoolUse:
    return PoolUse(pages_used=pages, tokens_held=tokens, running=running, page_size=8)


def snapshot(counter: StatsCounter, **changes) -> EngineStats:
    values = {
        "now": use(1, 3),
        "num_pages": 10,
        "pages_free": 4,
        "pages_cached": 3,
        "pages_pinned": 1,
        "num_running": 1,
        "num_waiting": 2,
        "num_finished": 12,
        "num_generated_tokens": 13,
        "num_guessing_rows": 5,
        "num_guesses": 20,
        "num_hits": 9,
        "num_preemptions": 3,
        "num_swaps": 2,
        "num_copied_pages": 5,
        "num_evicted_pages": 6,
        "num_queried_tokens": 70,
        "num_cached_tokens": 60,
        "num_compilations": 4,
        "compile_s": 0.5,
    }
    return counter.snapshot(**(values | changes))


@pytest.mark.parametrize(("pages", "tokens", "wasted"), [(0, 0, 0.0), (1, 8, 0.0), (1, 1, 0.875), (4, 24, 0.25)])
def test_wasted_slots_are_those_of_used_pages_without_a_token(pages, tokens, wasted):
    assert use(pages, tokens).wasted_fraction == wasted


def test_steps_are_summed_and_the_peak_is_kept():
    counter = StatsCounter(peak=PoolUse(page_size=8))
    steps = [use(2, 16), use(6, 36, running=3), use(6, 42, running=2), use(1, 4)]
    for index, moment in enumerate(steps):
        counter.count_step(moment, num_rows=index + 1, num_tokens=10 * index, num_padded=index)
    stats = snapshot(counter)
    assert (stats.num_steps, stats.num_step_rows, stats.num_step_tokens, stats.num_padded_tokens) == (4, 10, 60, 6)
    assert stats.mean_wasted_fraction == pytest.approx((0 + 0.25 + 0.125 + 0.5) / 4)
    assert stats.peak is steps[1]  # of moments with equally many pages the first


def test_a_counter_without_steps_has_no_mean():
    stats = snapshot(StatsCounter(peak=PoolUse(page_size=8)))
    assert (stats.num_steps, stats.mean_wasted_fraction, stats.peak.pages_used) == (0, 0.0, 0)


def test_a_snapshot_holds_every_counter_and_what_it_was_given():
    counter = StatsCounter(peak=use(3, 20))
    own = [field.name for field in dataclasses.fields(counter) if field.name not in ("peak", "wasted_fraction_sum")]
    for value, name in enumerate(own, start=1):
        setattr(counter, name, value)
    stats = snapshot(counter)
    assert [getattr(stats, name) for name in own] == list(range(1, len(own) + 1))
    assert (stats.num_pages, stats.pages_free, stats.now, stats.peak) == (10, 4, use(1, 3), use(3, 20))
    assert (stats.pages_cached, stats.pages_pinned) == (3, 1)
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions, stats.num_swaps) == (1, 2, 3, 2)
    assert (stats.num_finished, stats.num_generated_tokens) == (12, 13)
    assert (stats.num_copied_pages, stats.num_evicted_pages) == (5, 6)
    assert (stats.num_queried_tokens, stats.num_cached_tokens) == (70, 60)
    assert (stats.num_compilations, stats.compile_s) == (4, 0.5)
    with pytest.raises(TypeError, match="num_swap"):  # nothing is made up, nothing is lost
        snapshot(counter, num_swap=1)


def test_a_snapshot_does_not_change_any_more():
    counter = StatsCounter(peak=PoolUse(page_size=8))
    before = snapshot(counter)
    counter.count_step(use(1, 4), num_rows=1, num_tokens=4, num_padded=0)
    assert (before.num_steps, snapshot(counter).num_steps) == (0, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.num_steps = 5  # pyright: ignore[reportAttributeAccessIssue]
