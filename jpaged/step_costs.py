"""`StepCosts`: what steps take, planned ahead or read at once; measured while they run."""

import bisect
import time
from collections.abc import Callable, Iterable
from typing import Final

_WEIGHT: Final = 0.2  # of the last step
_MOST: Final = 3.0  # times what steps took so far that one counts at the most: it may have waited for its caller
_DOUBT: Final = 0.998  # of what waiting is thought to cost stays, each time that it is therefore not done


class StepCosts:
    """Costs of steps by their padded number of tokens, in any unit.

    Before anything was measured, a step of T tokens costs 1 + token * (T - 1), and `wait` more if the next one is
    planned only when it was read. What was measured corrects that, of sizes that had no step by what the next size did.

    Args:
      sizes: padded numbers of tokens.
      token, wait: as above.
      measures: whether costs are corrected.
      clock: gives seconds.

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
        self._factors: tuple[dict[int, float], dict[int, float]] = ({}, {})  # measured / expected; by size
        self._seen: set[tuple[int, bool]] = set()
        self._begun: tuple[int, bool, int, float] | None = None
        self._num_alike = 0  # steps in a row that were planned ahead

    def begin(self, num_tokens: int | None, *, waits: bool = False, num_steps: int = 1) -> None:
        """A step was planned, so the one before has ended, as far as it held this one up.

        Args:
          num_tokens: of the step; `None`: it is of another kind, or there is none.
          waits: whether the next one is planned only when it was read.
          num_steps: so many one after the other, in one plan.
        """
        if not self._measures:
            return
        now, before = self._clock(), self._begun
        if before is not None and num_tokens is not None:
            was_read = before[1] or (waits and self._num_alike == 1)  # so that guesses could be made
            # The first of several steps that are planned ahead takes the host's time alone.
            if was_read or (self._num_alike >= 2 and not waits):
                self._note(before[0], was_read, (now - before[3]) / before[2])
        self._num_alike = 0 if waits or num_tokens is None else self._num_alike + 1
        self._begun = None if num_tokens is None else (self._padded(num_tokens), waits, num_steps, now)

    def _note(self, size: int, waits: bool, seconds: float) -> None:
        if (size, waits) not in self._seen:
            self._seen.add((size, waits))  # it does some things for the first time
            return
        factors, factor = self._factors[waits], seconds / self._expected(size, waits)
        known = factors.get(size)
        factors[size] = factor if known is None else known + _WEIGHT * (min(factor, _MOST * known) - known)

    def of(self, num_tokens: int, *, waits: bool) -> float:
        """What a step of so many tokens costs."""
        size = self._padded(num_tokens)
        return self._expected(size, waits) * self._factor(size, waits)

    def doubt(self) -> None:
        """Waiting was thought to cost too much; some time that is tried again."""
        factors = self._factors[True]
        for size in factors:
            factors[size] *= _DOUBT

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
