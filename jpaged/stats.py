"""`EngineStats`: what the engine did and what the page pool holds, as one frozen snapshot."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PoolUse:
    """The page pool at one moment.

    Attributes:
      pages_used: pages that running sequences and pins hold; a shared page counts once.
      tokens_held: tokens whose KV is in those pages; a page that is only pinned counts as full.
      running: sequences that run.
      page_size: token slots a page.

    Example:
      >>> PoolUse(pages_used=4, tokens_held=60, running=2, page_size=16).wasted_fraction
      0.0625
    """

    pages_used: int = 0
    tokens_held: int = 0
    running: int = 0
    page_size: int = 1

    @property
    def wasted_fraction(self) -> float:
        """Part of the used pages' token slots that holds no token."""
        slots = self.pages_used * self.page_size
        return 1.0 - self.tokens_held / slots if slots else 0.0


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters since the engine started (`_s`: seconds), and the pool now and at its peak.

    Attributes:
      num_pages: pages in the pool; free + cached + used + the null page.
      pages_free: pages that hold nothing.
      pages_cached: pages that nobody holds, kept for the prefix cache until they are needed.
      pages_pinned: pages of pinned prefixes; they are among the used ones.
      now: the pool at this moment.
      peak: the pool when most pages were in use; of several such steps the first, in which they are emptiest.
      mean_wasted_fraction: wasted part of the used slots, averaged over the steps.
      num_running: sequences that hold pages.
      num_waiting: requests that hold none, be it that they are new or were preempted.
      num_requests: requests added.
      num_finished: requests that ended, for whatever reason.
      num_guessing_rows: rows that guessed tokens ahead (`SpeculationConfig`), each counted in each step.
      num_guesses: tokens that they guessed.
      num_hits: those of them that came true.
      num_preemptions: times a request lost its pages.
      num_swaps: those of them that moved the pages to the host.
      num_copied_pages: pages copied, to be written by one of several holders, or for the tokens that a prompt shares.
      num_evicted_pages: cached pages that were given out for other contents.
      num_queried_tokens: tokens that were looked up in the prefix cache when requests began to run.
      num_cached_tokens: those of them that were found.
      num_steps: steps dispatched.
      num_step_rows: rows of all steps (divided by num_steps: the mean batch size).
      num_step_tokens: tokens computed, padding not counted.
      num_padded_tokens: padding computed beside them.
      num_generated_tokens: output tokens given out.
      num_compilations, compile_s: compiled programs, and the sum of their times, which may overlap.
      plan_s: scheduler.
      pack_s: building the packed inputs.
      move_s: copying pages, and moving them to the host and back.
      dispatch_s: host-to-device transfer and handing the step to the runtime.
      wait_s: waiting for the device.
      update_s: reading results, stop rules, detokenisation.
    """

    num_pages: int
    pages_free: int
    pages_cached: int
    pages_pinned: int
    now: PoolUse
    peak: PoolUse
    mean_wasted_fraction: float
    num_running: int
    num_waiting: int
    num_requests: int
    num_finished: int
    num_guessing_rows: int
    num_guesses: int
    num_hits: int
    num_preemptions: int
    num_swaps: int
    num_copied_pages: int
    num_evicted_pages: int
    num_queried_tokens: int
    num_cached_tokens: int
    num_steps: int
    num_step_rows: int
    num_step_tokens: int
    num_padded_tokens: int
    num_generated_tokens: int
    num_compilations: int
    compile_s: float
    plan_s: float
    pack_s: float
    move_s: float
    dispatch_s: float
    wait_s: float
    update_s: float


@dataclass
class StatsCounter:
    """The engine's own counters; `EngineStats` is made from them. Fields as there."""

    peak: PoolUse
    wasted_fraction_sum: float = 0.0
    num_requests: int = 0
    num_steps: int = 0
    num_step_rows: int = 0
    num_step_tokens: int = 0
    num_padded_tokens: int = 0
    plan_s: float = 0.0
    pack_s: float = 0.0
    move_s: float = 0.0
    dispatch_s: float = 0.0
    wait_s: float = 0.0
    update_s: float = 0.0

    def count_step(self, use: PoolUse, *, num_rows: int, num_tokens: int, num_padded: int, times: int = 1) -> None:
        """Counts a step, or the rows, tokens and padding of several of one program together."""
        self.num_steps += times
        self.num_step_rows += num_rows
        self.num_step_tokens += num_tokens
        self.num_padded_tokens += num_padded
        self.wasted_fraction_sum += times * use.wasted_fraction
        if use.pages_used > self.peak.pages_used:
            self.peak = use

    def snapshot(self, **of_others: Any) -> EngineStats:
        """These counters, beside those of `EngineStats` that others keep."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "wasted_fraction_sum"}
        mean_wasted_fraction = self.wasted_fraction_sum / max(self.num_steps, 1)
        return EngineStats(**own, mean_wasted_fraction=mean_wasted_fraction, **of_others)
