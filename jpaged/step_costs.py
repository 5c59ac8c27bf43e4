"""`StepCosts`: what steps take, planned ahead or read at once; measured while they run."""

import bisect
import time
from collections.abc import Callable, Iterable
from typing import Final

_SPEED_WEIGHT: Final = 0.3  # of the last step, in how fast all steps are
_WEIGHT: Final = 0.05  # of the last step, in how its kind compares with others; the first ones count more
_MOST: Final = 3.0  # times more, or less, than expected that a step counts at the most: it may have been held up
_KNOWN: Final = 4  # times that a kind was measured, after which its steps say how fast all steps are
_DOUBT: Final = 0.99  # of what waiting is thought to cost more stays, each time that it is therefore not done
_FRESH: Final = 64  # steps that were read at once, after which one that was not is to be measured again


class StepCosts:
    """Costs of steps by their padded number of tokens, in any unit.

    Before anything was measured, a step of T tokens costs 1 + token * (T - 1), and `wait` more if the next one is
    planned only when it was read. What was measured corrects that, of sizes that had no step by what the next size did.
    Each step also says how fast the device and its host are just now, for all kinds: so a kind that had no step for
    long is not taken for what it was when they were slower.

    Args:
      sizes: padded numbers of tokens.
      token, wait: as above.
      measures: whether costs are corrected.
      clock: gives seconds.

    Attributes:
      hope: part of what waiting is thought to cost by which it is tried again; 1 where it was measured just now.

    Example:
      >>> costs = StepCosts([1, 4, 16], token=0.1, wait=0.5, measures=False)
      >>> costs.of(3, waits=False), costs.of(3, waits=True)
      (1.3, 1.8)
    """

    def __init__(
        self,
        sizes: Iterable[int],
        *,
        token: float,
        wait: float,
        measures: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sizes = sorted(set(sizes))
        self._token, self._wait = token, wait
        self._measures = measures
        self._clock = clock
        self._speed = 1.0  # seconds of a step that is expected to cost 1
        self._factors: tuple[dict[int, float], dict[int, float]] = ({}, {})  # measured / expected; by size
        self._times: dict[tuple[int, bool], int] = {}  # that a kind was measured
        self._num_since = _FRESH  # steps that were read at once since one that was not
        self._begun: tuple[int, bool, int, float] | None = None
        self._num_alike = 0  # steps in a row that were planned ahead
        self.hope = 1.0

    @property
    def knows_plain(self) -> bool:
        """Whether it is known, not from too long ago, what steps take that are planned ahead."""
        return self._num_since < _FRESH or not self._measures

    def begin(self, num_tokens: int | None, *, waits: bool = False, num_steps: int = 1) -> float | None:
        """A step was planned, so the one before has ended, as far as it held this one up.

        Args:
          num_tokens: of the step; `None`: it is of another kind, or there is none.
          waits: whether the next one is planned only when it was read.
          num_steps: so many one after the other, in one plan.

        Returns:
          What the step before took, if it was said to wait, and if that says what such steps take.
        """
        if not self._measures:
            return None
        now, before, seconds = self._clock(), self._begun, None
        if before is not None and num_tokens is not None:
            was_read = before[1] or (waits and self._num_alike == 1)  # so that guesses could be made
            # The first of several steps that are planned ahead takes the host's time alone.
            if (was_read and before[2] == 1) or (self._num_alike >= 2 and not waits):
                seconds = self._note(before[0], was_read, (now - before[3]) / before[2])
        self._num_alike = 0 if waits or num_tokens is None else self._num_alike + 1
        self._begun = None if num_tokens is None else (self._padded(num_tokens), waits, num_steps, now)
        return seconds if before is not None and before[1] else None

    def _note(self, size: int, waits: bool, seconds: float) -> float | None:
        kind = (size, waits)
        times = self._times[kind] = self._times.get(kind, -1) + 1
        if not times:
            return None  # it does some things for the first time
        if not any(self._factors):
            self._speed = seconds / self._expected(size, waits)
        expected = self.of(size, waits=waits)
        ratio = min(max(seconds / expected, 1 / _MOST), _MOST)
        factors = self._factors[waits]
        factors[size] = self._factor(size, waits) * ratio ** max(1 / times, _WEIGHT)
        if times > _KNOWN:  # else it is what was expected of its kind that was wrong
            self._speed *= ratio**_SPEED_WEIGHT
        if waits:
            self.hope = 1.0
            self._num_since += 1
        else:
            self._num_since = 0
        return expected * ratio

    def of(self, num_tokens: int, *, waits: bool) -> float:
        """What a step of so many tokens costs."""
        size = self._padded(num_tokens)
        return self._expected(size, waits) * self._factor(size, waits) * self._speed

    def doubt(self) -> None:
        """Waiting was thought to cost too much; some time that is tried again."""
        self.hope *= _DOUBT

    def _padded(self, num_tokens: int) -> int:
        return next((size for size in self._sizes if size >= num_tokens), num_tokens)

    def _expected(self, size: int, waits: bool) -> float:
        return 1.0 + self._token * (size - 1) + (self._wait if waits else 0.0)

    def _factor(self, size: int, waits: bool) -> float:
        factors = self._factors[waits] or self._factors[not waits]
        if size in factors or not factors:
            return factors.get(size, 1.0)
        known = sorted(factors)
        return factors[known[min(bisect.bisect(known, size), len(known) - 1)]]
