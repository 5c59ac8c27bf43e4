"""Histograms, and which of them an engine keeps about its requests."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """A histogram at one moment.

    Attributes:
      bounds: upper bounds of the buckets, ascending; values above the last one have a bucket of their own.
      counts: values in each bucket (not cumulative), one more entry than `bounds`.
      sum: of all values.

    Example:
      >>> snapshot = HistogramSnapshot((1.0, 2.0), (3, 0, 1), 12.0)
      >>> snapshot.count, snapshot.cumulative
      (4, (3, 3, 4))
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Of all values."""
        return sum(self.counts)

    @property
    def cumulative(self) -> tuple[int, ...]:
        """Values up to each bound, then all of them: what Prometheus calls `le`."""
        total, running = 0, []
        for count in self.counts:
            total += count
            running.append(total)
        return tuple(running)


class Histogram:
    """Counts values by buckets.

    Args:
      bounds: upper bounds of the buckets, included, ascending.

    Example:
      >>> histogram = Histogram((1.0, 2.0))
      >>> histogram.observe(1.0)
      >>> histogram.observe(5.0, times=2)
      >>> histogram.snapshot()
      HistogramSnapshot(bounds=(1.0, 2.0), counts=(1, 0, 2), sum=11.0)
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._sum)
