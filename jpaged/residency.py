"""`Residency`: token slots that a running sequence takes in pages, and in one contiguous reservation. Imports no jax.

A request of p prompt and o output tokens runs for o steps: the prefill, which gives the first token, and o - 1 decodes.
In its step t it holds the K and V of p + t tokens, t in [0, o); those of the last token are never written.

    steady state   steps take equally long and there is always a next request, so a running sequence is at each step of
                   its life equally often, and a request that runs for twice as many steps is met twice as often
    at the end     the same mix of running sequences, all with p + o tokens: the most that they can come to hold

Sums over a life are in closed form, so a trace of any length costs a few array operations.
"""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from jpaged.errors import ConfigError
from jpaged.lengths import Lengths

Reservation = Literal["oracle", "pow2", "max"]
RESERVATIONS: Final = ("oracle", "pow2", "max")


@dataclass(frozen=True, kw_only=True)
class Residency:
    """Token slots of a running sequence on average, by what is in them.

    Attributes:
      slots: slots taken; the sum of the others.
      tokens: hold the K and V of a token.
      partly_filled: empty slots of a page that holds tokens (paged only).
      not_yet_used: reserved for tokens that will come.
      internal: reserved for tokens that will never come.
      rounding: added because an allocator gives powers of two.

    Example:
      >>> Residency(slots=16, tokens=12, partly_filled=4).wasted_fraction
      0.25
    """

    slots: float
    tokens: float
    partly_filled: float = 0.0
    not_yet_used: float = 0.0
    internal: float = 0.0
    rounding: float = 0.0

    @property
    def wasted_fraction(self) -> float:
        """Part of the slots that holds no token."""
        return 1.0 - self.tokens / self.slots


def paged(lengths: Lengths, page_size: int, *, sliding_window: int | None = None) -> Residency:
    """The steady state in pages: ceil(tokens / page_size) of them, and none reserved.

    Args:
      lengths: the workload.
      page_size: token slots a page.
      sliding_window: tokens that the model looks back; pages to the left of them are given back.

    Example:
      >>> from jpaged.lengths import fixed_lengths
      >>> paged(fixed_lengths(8, 4), page_size=8)  # 8, 9, 10 and 11 tokens
      Residency(slots=14.0, tokens=9.5, partly_filled=4.5, not_yet_used=0.0, internal=0.0, rounding=0.0)
    """
    window = _window(lengths, sliding_window)
    first, last = lengths.prompt_tokens, lengths.prompt_tokens + _steps(lengths) - 1
    pages = _sum_of_ceil(last, page_size) - _sum_of_ceil(first - 1, page_size)
    pages -= _sum_of_floor(last - window, page_size) - _sum_of_floor(first - 1 - window, page_size)
    slots, tokens = page_size * _per_step(lengths, pages), _mean_tokens(lengths, window)
    return Residency(slots=slots, tokens=tokens, partly_filled=slots - tokens)


def paged_at_end(
    lengths: Lengths, page_size: int, *, sliding_window: int | None = None, chunk_tokens: int = 0
) -> Residency:
    """The same sequences in pages, all at the end of their lives.

    Args:
      lengths, page_size, sliding_window: as for `paged`.
      chunk_tokens: prompt tokens that one step may compute; with a window they are held beside it.
    """
    window, totals = _window(lengths, sliding_window), lengths.total_tokens
    pages = -(-totals // page_size)
    if sliding_window is not None:
        # A run of n tokens that begins anywhere in a page touches (n - 2) // page_size + 2 pages at the most.
        pages = np.minimum(pages, (max(window + chunk_tokens, 2) - 2) // page_size + 2)
    mix = _mix(lengths)
    slots = page_size * float(np.average(pages, weights=mix))
    tokens = float(np.average(np.minimum(totals, window + chunk_tokens), weights=mix))
    return Residency(slots=slots, tokens=tokens, partly_filled=slots - tokens)


def final_wasted_fraction(lengths: Lengths, page_size: int, *, sliding_window: int | None = None) -> float:
    """Part of the slots that is empty when each request, counted once, holds all of its tokens, or its window.

    Example:
      >>> from jpaged.lengths import fixed_lengths
      >>> final_wasted_fraction(fixed_lengths(8, 4), page_size=16)
      0.25
    """
    totals, window = lengths.total_tokens, _window(lengths, sliding_window)
    pages = -(-totals // page_size) - np.maximum(totals - window, 0) // page_size
    tokens, slots = np.minimum(totals, window), pages * page_size
    return 1.0 - float(np.average(tokens, weights=lengths.weights) / np.average(slots, weights=lengths.weights))


def contiguous(
    lengths: Lengths,
    reservation: Reservation,
    *,
    max_model_len: int,
    pool_slots: int,
    buddy: bool = False,
    sliding_window: int | None = None,
    chunk_tokens: int = 0,
) -> Residency:
    """The steady state where every sequence gets one run of slots when it starts, and keeps it.

    Args:
      lengths: the workload.
      reservation: "oracle" knows the output's length; "pow2" reserves for the output the next power of two; "max"
        reserves `max_model_len` for every sequence.
      max_model_len: the longest sequence that is served; no reservation is longer.
      pool_slots: slots of the memory; no run is longer.
      buddy: runs are powers of two, as a buddy allocator gives them.
      sliding_window, chunk_tokens: as for `paged_at_end`; a run is a ring that holds no more than both.

    Raises:
      ConfigError: a request is longer than `max_model_len`, or another reservation.

    Example:
      >>> from jpaged.lengths import fixed_lengths
      >>> contiguous(fixed_lengths(8, 4), "max", max_model_len=32, pool_slots=1024)
      Residency(slots=32.0, tokens=9.5, partly_filled=0.0, not_yet_used=2.5, internal=20.0, rounding=0.0)
    """
    totals = lengths.total_tokens
    if totals.max() > max_model_len:
        raise ConfigError(f"a request of {lengths.source} has {totals.max()} tokens, max_model_len is {max_model_len}")
    reserved = {
        "oracle": totals,
        "pow2": lengths.prompt_tokens + _next_power_of_two(lengths.output_tokens),
        "max": np.full_like(totals, max_model_len),
    }.get(reservation)
    if reserved is None:
        raise ConfigError(f"reservation is {reservation!r}, expected one of {', '.join(RESERVATIONS)}")
    window = _window(lengths, sliding_window)
    ring = max_model_len if sliding_window is None else window + chunk_tokens
    reserved = np.minimum(reserved, min(max_model_len, ring))
    runs = np.minimum(_next_power_of_two(reserved), pool_slots) if buddy else reserved
    used = np.minimum(totals, ring)
    mix, tokens = _mix(lengths), _mean_tokens(lengths, window)
    mean_used, mean_reserved, mean_run = (float(np.average(x, weights=mix)) for x in (used, reserved, runs))
    return Residency(
        slots=mean_run,
        tokens=tokens,
        not_yet_used=mean_used - tokens,
        internal=mean_reserved - mean_used,
        rounding=mean_run - mean_reserved,
    )


def _steps(lengths: Lengths) -> np.ndarray:
    """Steps of a life, i64[n]: a request without output still has its prefill."""
    return np.maximum(lengths.output_tokens, 1)


def _mix(lengths: Lengths) -> np.ndarray:
    """How often a request is met among the running ones, f64[n], relative to the others."""
    steps = _steps(lengths).astype(float)
    return steps if lengths.weights is None else steps * lengths.weights


def _per_step(lengths: Lengths, sums: np.ndarray) -> float:
    """The mean over the steps of all lives of something that is summed over each life."""
    return float(np.average(sums / _steps(lengths), weights=_mix(lengths)))


def _window(lengths: Lengths, sliding_window: int | None) -> int:
    """The window in tokens; one that covers the longest request is as good as none."""
    longest = int(lengths.total_tokens.max())
    return longest if sliding_window is None else min(sliding_window, longest)


def _mean_tokens(lengths: Lengths, window: int) -> float:
    first, last = lengths.prompt_tokens, lengths.prompt_tokens + _steps(lengths) - 1
    return _per_step(lengths, _sum_of_min(last, window) - _sum_of_min(first - 1, window))


def _next_power_of_two(values: np.ndarray) -> np.ndarray:
    """Example:
    >>> _next_power_of_two(np.array([0, 1, 2, 3, 8, 9])).tolist()
    [0, 1, 2, 4, 8, 16]
    """
    _, exponents = np.frexp(np.maximum(values - 1, 0))
    return np.where(values > 0, np.int64(1) << exponents.astype(np.int64), 0)


def _sum_of_ceil(n: np.ndarray, size: int) -> np.ndarray:
    """ceil(x / size) summed over x in [1, n]; i64.

    Example:
      >>> _sum_of_ceil(np.array([0, 4, 5]), 4).tolist()
      [0, 4, 6]
    """
    whole, rest = np.divmod(n, size)
    return size * whole * (whole + 1) // 2 + rest * (whole + 1)


def _sum_of_floor(n: np.ndarray, size: int) -> np.ndarray:
    """floor(x / size) summed over x in [1, n], 0 for n below 1; i64.

    Example:
      >>> _sum_of_floor(np.array([-3, 4, 5]), 4).tolist()
      [0, 1, 2]
    """
    whole, rest = np.divmod(np.maximum(n, 0) + 1, size)
    return size * whole * (whole - 1) // 2 + rest * whole


def _sum_of_min(n: np.ndarray, window: int) -> np.ndarray:
    """min(x, window) summed over x in [1, n]; i64.

    Example:
      >>> _sum_of_min(np.array([2, 5]), 3).tolist()
      [3, 12]
    """
    inside = np.minimum(n, window)
    return inside * (inside + 1) // 2 + (n - inside) * window
