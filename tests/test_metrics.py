"""Every value is counted in one bucket, the bound included; a page's life is measured from its ends."""

import time

from hypothesis import given
from hypothesis import strategies as st

from jpaged.metrics import Histogram
from jpaged.page_allocator import PageAllocator


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 4)), max_size=30))
def test_cumulative_counts_are_those_of_prometheus(values):
    bounds = (-1.0, 0.0, 2.5)
    histogram = Histogram(bounds)
    for value, times in values:
        histogram.observe(value, times)
    snapshot = histogram.snapshot()
    for bound, count in zip(bounds, snapshot.cumulative, strict=False):
        assert count == sum(times for value, times in values if value <= bound)
    assert snapshot.cumulative[-1] == snapshot.count == sum(times for _, times in values)
    assert abs(snapshot.sum - sum(value * times for value, times in values)) < 1e-9


def test_a_snapshot_does_not_change_any_more():
    histogram = Histogram((1,))
    before = histogram.snapshot()
    histogram.observe(0)
    assert (before.count, histogram.snapshot().count) == (0, 1)


def test_lives_of_pages_are_those_of_their_contents(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    allocator = PageAllocator(num_pages=4, page_size=16)
    kept, dropped = allocator.allocate(2)
    allocator.retain(kept)
    allocator.share([kept, dropped])  # by another answer to the same prompt: nobody had let go
    allocator.free([kept, dropped])
    clock[0] = 3.0
    allocator.free([kept, dropped])
    clock[0] = 7.0
    allocator.share([kept])  # a prompt that begins alike
    clock[0] = 20.0
    allocator.free([kept])
    clock[0] = 50.0
    allocator.allocate(3)  # all there are
    found = {name: (one.count, one.sum) for name, one in allocator.lives.histograms().items()}
    assert found == {
        "kv_block_lifetime_seconds": (1, 50.0),
        "kv_block_idle_before_evict_seconds": (1, 30.0),
        "kv_block_reuse_gap_seconds": (1, 4.0),
    }
