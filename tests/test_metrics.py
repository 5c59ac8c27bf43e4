"""Every value is counted in one bucket, the bound included."""

from hypothesis import given
from hypothesis import strategies as st

from jpaged.metrics import Histogram


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
