"""Histograms, and those of the lives of pages."""

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
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


_LIFE_S = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 86400)


class PageLives:
    """How long pages keep what is in them, and how long that waits for somebody who needs it again.

    Args:
      num_pages: ids are in [0, num_pages).

    Example:
      >>> lives = PageLives(3)
      >>> lives.given_out([1, 2])
      >>> lives.cached([1, 2])
      >>> lives.reused([1])
      >>> lives.evicted(2)
      >>> {name: snapshot.count for name, snapshot in lives.histograms().items()}
      {'kv_block_lifetime_seconds': 1, 'kv_block_idle_before_evict_seconds': 1, 'kv_block_reuse_gap_seconds': 1}
    """

    def __init__(self, num_pages: int) -> None:
        self._given_out_s = [0.0] * num_pages
        self._cached_s = [0.0] * num_pages
        self._lifetimes, self._idle, self._reuse_gaps = (Histogram(_LIFE_S) for _ in range(3))

    def given_out(self, pages: Iterable[int]) -> None:
        """They begin to hold something new."""
        now = time.monotonic()
        for page in pages:
            self._given_out_s[page] = now

    def cached(self, pages: Iterable[int]) -> None:
        """The last holder let them go; what is in them is kept."""
        now = time.monotonic()
        for page in pages:
            self._cached_s[page] = now

    def reused(self, pages: Iterable[int]) -> None:
        """Somebody came back for what cached pages hold."""
        now = time.monotonic()
        for page in pages:
            self._reuse_gaps.observe(now - self._cached_s[page])

    def evicted(self, page: int) -> None:
        """What a cached page held is given up for something else."""
        now = time.monotonic()
        self._lifetimes.observe(now - self._given_out_s[page])
        self._idle.observe(now - self._cached_s[page])

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """By their names in `/metrics`, where a page is a block as vLLM calls it."""
        return {
            "kv_block_lifetime_seconds": self._lifetimes.snapshot(),
            "kv_block_idle_before_evict_seconds": self._idle.snapshot(),
            "kv_block_reuse_gap_seconds": self._reuse_gaps.snapshot(),
        }
