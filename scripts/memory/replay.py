"""`replay`: a workload through the real allocator, prefix cache, memory manager and scheduler, with a fake model.

The fake model samples tokens that no request has in common and that end nothing, so an output is as long as the trace
says. Time passes as `Hardware` has it. Sums over time are averages weighted by how long the steps take.
"""

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from jpaged.config import SchedulerConfig
from jpaged.lengths import Lengths
from jpaged.memory_manager import MemoryManager
from jpaged.page_allocator import PageAllocator
from jpaged.prefix_cache import PrefixCache
from jpaged.request import Request, SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.sequence import Sequence, SequenceGroup, SequenceStatus
from jpaged.step_plan import StepPlan
from scripts.memory.beam_scores import BeamScores
from scripts.memory.feed import Feed
from scripts.memory.hardware import Hardware
from scripts.memory.prompts import Prompts

_STOP = (1 << 31) - 1  # no other token has this id
_QUEUE = 64  # requests that the scheduler is shown ahead; the others wait outside, so that their prompts take no memory


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes and policies.

    Attributes:
      slots: of the pool, the null page included, so pages are slots // page_size.
      page_size: token slots a page; any number, as the allocator takes it.
      max_num_seqs, max_num_batched_tokens, max_passes, headroom_pages, preemption: of `SchedulerConfig`.
      host_slots: of the host's pool, for swapping.
      prefix_cache: pages are found again.
      known_lengths: outputs end since they reach `max_tokens`, of which the scheduler knows; else at a stop token, and
        may be as long as `max_model_len` allows.
      max_model_len: tokens of a sequence at the most; `None`: the longest of the trace.
      num_sequences: answers to each request, or beams.
      beams: beam search instead of parallel sampling.
    """

    slots: int
    page_size: int = 16
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 4096
    max_passes: int = 0
    headroom_pages: int = SchedulerConfig.headroom_pages
    preemption: Literal["auto", "recompute", "swap"] = "auto"
    host_slots: int = 0
    prefix_cache: bool = True
    known_lengths: bool = True
    max_model_len: int | None = None
    num_sequences: int = 1
    beams: bool = False


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """What was measured. Means are over time, of the whole run or, if so named, while more requests waited.

    Attributes:
      num_requests, num_steps, seconds: of the run; seconds of the hardware's time.
      mean_requests, mean_sequences: running at once.
      saturated_mean_requests, saturated_fraction: running at once, and part of the time, while more requests waited.
      wasted_fraction: empty slots of used pages over the slots of used pages.
      used_fraction: used pages over all pages.
      saturated_shares: the pool by cause while more requests waited: tokens, partly_filled, free, null_page.
      shared_fraction: 1 - used pages / pages of the same sequences if none were shared.
      num_preemptions, num_swaps: of groups.
      num_preempted_requests: that were preempted at least once.
      max_times_computed: of any token of any sequence.
      recomputed_fraction: computations of tokens that had been computed before, over all.
      hit_fraction: prompt tokens found in the prefix cache over prompt tokens, when requests first ran.
      num_copied_pages: copies on write, and of partly filled pages that hit.
    """

    num_requests: int
    num_steps: int
    seconds: float
    mean_requests: float
    mean_sequences: float
    saturated_mean_requests: float
    saturated_fraction: float
    wasted_fraction: float
    used_fraction: float
    saturated_shares: dict[str, float]
    shared_fraction: float
    num_preemptions: int
    num_swaps: int
    num_preempted_requests: int
    max_times_computed: int
    recomputed_fraction: float
    hit_fraction: float
    num_copied_pages: int

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON, six digits after the point."""
        return rounded(asdict(self))


def rounded(value: Any) -> Any:
    """Floats with six digits after the point, wherever they are."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return round(value, 6) if isinstance(value, float) else value


class Computations:
    """How often each token of each sequence was computed."""

    def __init__(self) -> None:
        self._runs: dict[Sequence, list[int]] = {}  # start, end, start, end, ... of what was computed in one go
        self.most = 0
        self.num_computed = 0
        self.num_recomputed = 0

    def add(self, plan: StepPlan) -> None:
        """The tokens of a step."""
        self.num_computed += plan.num_tokens
        runs = self._runs
        for seq, start, num_tokens in zip(plan.seqs, plan.starts, plan.q_lens, strict=True):
            run = runs.get(seq)
            if run is None:
                runs[seq] = [start, start + num_tokens]
            elif run[-1] == start:
                run[-1] += num_tokens
            else:
                run += (start, start + num_tokens)

    def ended(self, seq: Sequence) -> None:
        """A sequence has ended."""
        run = self._runs.pop(seq)
        if len(run) == 2:
            self.most = max(self.most, int(run[1] > run[0]))
            return
        counts = Counter(position for i in range(0, len(run), 2) for position in range(run[i], run[i + 1]))
        self.most = max(self.most, *counts.values())
        self.num_recomputed += sum(counts.values()) - len(counts)


class Replay:
    """One run. `run` may be called once."""

    def __init__(
        self, lengths: Lengths, feed: Feed, hardware: Hardware, settings: Settings, *, scores: BeamScores | None = None
    ) -> None:
        self._lengths, self._feed, self._hardware, self._settings = lengths, feed, hardware, settings
        self._prompts = Prompts(lengths, settings.num_sequences, reuse=settings.prefix_cache)
        self._bases = self._prompts.bases()
        self._scores = scores
        size = settings.page_size
        self.allocator = PageAllocator(settings.slots // size, size)
        self.memory = MemoryManager(
            self.allocator,
            prefix_cache=PrefixCache(self.allocator) if settings.prefix_cache else None,
            host_allocator=PageAllocator(settings.host_slots // size, size) if settings.host_slots else None,
        )
        config = SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_passes=settings.max_passes,
            headroom_pages=settings.headroom_pages,
            preemption=settings.preemption,
        )
        longest = settings.max_model_len or int(lengths.total_tokens.max()) + 1
        self.scheduler = Scheduler(config, self.memory, max_model_len=longest)
        self._ends = lengths.prompt_tokens + np.maximum(lengths.output_tokens, 1)
        self.computations = Computations()
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._clock_s = 0.0
        self._num_ended = self._num_preempted = self._num_preemptions = self._num_steps = 0

    def run(self) -> ReplayResult:
        """Serves everything.

        Raises:
          JpagedError: a request can never fit into the pool.
        """
        while True:
            self._admit()
            plan = self.scheduler.plan()
            if plan is None:
                if (next_s := self._feed.next_s) is None:
                    break
                self._clock_s = max(self._clock_s, next_s)
                continue
            self._measure(plan)
            if plan.seqs:
                self._update(plan)
        return self._result()

    def _admit(self) -> None:
        room = _QUEUE - len(self.scheduler.waiting)
        while room > 0 and (next_s := self._feed.next_s) is not None and next_s <= self._clock_s:
            self.scheduler.add(SequenceGroup(self._request(self._feed.take(), next_s)))
            room -= 1

    def _request(self, index: int, arrival_s: float) -> Request:
        settings, count = self._settings, self._settings.num_sequences
        params = SamplingParams(
            n=count,
            max_tokens=max(int(self._lengths.output_tokens[index]), 1) if settings.known_lengths else None,
            stop_token_ids=() if settings.known_lengths else (_STOP,),
            temperature=0.0 if settings.beams else 1.0,
            use_beam_search=settings.beams,
            ignore_eos=True,
        )
        base = int(self._bases[index])
        prompt = self._prompts.prompt(index, base)
        return Request(
            request_id=str(index), prompt_token_ids=prompt, params=params, seed=base, arrival_time_s=arrival_s
        )

    def _measure(self, plan: StepPlan) -> None:
        scheduler, size, sums = self.scheduler, self._settings.page_size, self._sums
        seqs = scheduler.running_seqs
        num_kv = sum(seq.num_computed_tokens for seq in seqs)
        step_s = self._hardware.step_s(plan.num_tokens, num_kv) if plan.seqs else 0.0
        self._clock_s += step_s
        self._num_steps += 1
        self.computations.add(plan)
        used, requests = self.allocator.num_used, len(scheduler.running)
        parts = {
            "seconds": 1.0,
            "requests": requests,
            "sequences": len(seqs),
            "slots": used * size,
            "tokens": scheduler.num_tokens_held,
            "unshared": sum(-(-seq.num_computed_tokens // size) for seq in seqs),
        }
        for name, value in parts.items():
            sums[name] += value * step_s
        if scheduler.waiting or ((next_s := self._feed.next_s) is not None and next_s <= self._clock_s):
            for name in ("seconds", "requests", "slots", "tokens"):
                sums["saturated_" + name] += parts[name] * step_s

    def _update(self, plan: StepPlan) -> None:
        if not self._settings.known_lengths:
            tokens = [self._token_or_stop(seq) for seq in plan.seqs]
        elif self._settings.num_sequences == 1:
            tokens = [seq.group.request.seed + len(seq.tokens) for seq in plan.seqs]
        else:
            tokens = [_token(seq) for seq in plan.seqs]
        scores, seqs = self._scores, plan.seqs
        candidates = None if scores is None else lambda row: scores.of(seqs[row])
        self.scheduler.update(plan, tokens, candidates)
        for seq in plan.seqs:
            if seq.status is SequenceStatus.FINISHED:
                self.computations.ended(seq)
                if seq.group.is_finished and seq is seq.group.seqs[-1]:
                    self._ended(seq.group)

    def _token_or_stop(self, seq: Sequence) -> int:
        ends = len(seq.tokens) + 1 >= self._ends[int(seq.group.request.request_id)]
        return _STOP if ends else seq.group.request.seed + len(seq.tokens)

    def _ended(self, group: SequenceGroup) -> None:
        self._num_ended += 1
        self._num_preempted += group.num_preemptions > 0
        self._feed.ended(int(group.request.request_id), self._clock_s)

    def _result(self) -> ReplayResult:
        sums, memory, pool = self._sums, self.memory, self.allocator.num_pages * self._settings.page_size
        seconds, saturated = sums["seconds"], sums["saturated_seconds"] or float("inf")
        tokens, slots = (sums["saturated_" + name] / saturated for name in ("tokens", "slots"))
        null_page = self._settings.page_size
        return ReplayResult(
            num_requests=self._num_ended,
            num_steps=self._num_steps,
            seconds=self._clock_s,
            mean_requests=sums["requests"] / seconds,
            mean_sequences=sums["sequences"] / seconds,
            saturated_mean_requests=sums["saturated_requests"] / saturated,
            saturated_fraction=sums["saturated_seconds"] / seconds,
            wasted_fraction=1 - sums["tokens"] / sums["slots"],
            used_fraction=sums["slots"] / seconds / pool,
            saturated_shares={
                "tokens": tokens / pool,
                "partly_filled": (slots - tokens) / pool,
                "free": (pool - null_page - slots) / pool,
                "null_page": null_page / pool,
            },
            shared_fraction=1 - sums["slots"] / self._settings.page_size / sums["unshared"],
            num_preemptions=self.scheduler.num_preemptions,
            num_swaps=self.scheduler.num_swaps,
            num_preempted_requests=self._num_preempted,
            max_times_computed=self.computations.most,
            recomputed_fraction=self.computations.num_recomputed / self.computations.num_computed,
            hit_fraction=memory.num_hit_tokens / memory.num_queried_tokens if memory.num_queried_tokens else 0.0,
            num_copied_pages=memory.num_copied_pages,
        )


def replay(
    lengths: Lengths, feed: Feed, hardware: Hardware, settings: Settings, *, scores: BeamScores | None = None
) -> ReplayResult:
    """Serves a workload.

    Args:
      lengths: the requests.
      feed: when they come.
      hardware: how long steps take.
      settings: sizes and policies. The pool is that of the settings.
      scores: of beam searches.
    """
    return Replay(lengths, feed, hardware, settings, scores=scores).run()


def with_pages(settings: Settings, page_size: int) -> Settings:
    """The same memory in pages of another size."""
    return replace(settings, page_size=page_size)


def _token(seq: Sequence) -> int:
    request = seq.group.request
    return request.seed + len(seq.tokens) + seq.index * (request.params.max_tokens or 0)
