"""What an engine shows of itself: `EngineStats` of its parts, and the page pool with its requests."""

import os
import time
from typing import TYPE_CHECKING, Literal

import jpaged
from jpaged.collector import Collector
from jpaged.engine_client import MAX_PAGE_IDS, EngineInfo, LiveRequest, PoolPicture
from jpaged.memory_manager import MemoryManager
from jpaged.scheduler import Scheduler
from jpaged.sequence import SequenceGroup, SequenceStatus
from jpaged.stats import EngineStats, PoolUse, StatsCounter
from jpaged.step import StepRunner

if TYPE_CHECKING:
    from jpaged.engine import Engine


def pool_use(memory: MemoryManager, scheduler: Scheduler) -> PoolUse:
    """The page pool at this moment."""
    return PoolUse(
        pages_used=memory.allocator.num_used,
        tokens_held=int(scheduler.num_tokens_held),
        running=len(scheduler.running_seqs),
        page_size=memory.allocator.page_size,
    )


def read_stats(
    counter: StatsCounter, memory: MemoryManager, scheduler: Scheduler, collector: Collector, runner: StepRunner
) -> EngineStats:
    """The engine's counters, and what its parts count themselves."""
    allocator, cache = memory.allocator, memory.prefix_cache
    return counter.snapshot(
        now=pool_use(memory, scheduler),
        num_pages=allocator.num_pages,
        pages_free=allocator.num_free,
        pages_cached=allocator.num_cached,
        pages_pinned=memory.pins.num_pages,
        num_running=len(scheduler.running_seqs),
        num_waiting=len(scheduler.waiting),
        num_finished=collector.num_finished,
        num_generated_tokens=collector.num_generated_tokens,
        num_guessing_rows=scheduler.num_guessing_rows,
        num_guesses=scheduler.num_guesses,
        num_hits=scheduler.num_hits,
        num_preemptions=scheduler.num_preemptions,
        num_swaps=scheduler.num_swaps,
        num_copied_pages=memory.num_copied_pages,
        num_evicted_pages=cache.num_evictions if cache else 0,
        num_queried_tokens=memory.num_queried_tokens,
        num_cached_tokens=memory.num_hit_tokens,
        num_compilations=len(runner.compilations),
        compile_s=sum(c.seconds for c in runner.compilations),
    )


def describe(engine: "Engine") -> EngineInfo:
    """What does not change while the engine serves."""
    config, plan = engine.config, engine.pool_plan
    return EngineInfo(
        version=jpaged.__version__,
        max_model_len=plan.max_model_len,
        vocab_size=engine.vocab_size,
        eos_token_ids=engine.eos_token_ids,
        page_size=plan.page_size,
        num_pages=plan.num_pages,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_num_prefill_tokens=config.scheduler.max_num_prefill_tokens,
        max_logprobs=config.max_logprobs,
        prefix_cache=config.cache.prefix_cache,
        policy=config.scheduler.policy,
        has_tokenizer=engine.tokenizer is not None,
        implementation=engine.implementation,
        implementation_reason=engine.implementation_reason,
        dtype=engine.dtype,
        device=engine.device.device_kind,
        process_id=os.getpid(),
    )


def picture(memory: MemoryManager, scheduler: Scheduler) -> PoolPicture:
    """The pool page by page, and the requests that live, in the order of arrival."""
    now, groups = time.monotonic(), [*scheduler.running, *scheduler.waiting]
    groups.sort(key=lambda group: group.request.arrival_time_s)
    requests, num_ids = [], 0
    for group in groups:
        pages = [seq.pages for seq in group.live]
        num_ids += sum(map(len, pages))  # the whole of a request or nothing of it
        requests.append(_live_request(group, now, pages, shown=num_ids <= MAX_PAGE_IDS))
    return PoolPicture(states=memory.allocator.states(), requests=tuple(requests))


def page_map(scheduler: Scheduler) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The pages of each sequence of each running request, by request id."""
    return {group.request.request_id: tuple(tuple(seq.pages) for seq in group.live) for group in scheduler.running}


def _live_request(group: SequenceGroup, now: float, pages: list[list[int]], *, shown: bool) -> LiveRequest:
    first, status = group.seqs[0], _status(group)
    return LiveRequest(
        request_id=group.request.request_id,
        status=status,
        num_prompt_tokens=first.num_prompt_tokens,
        num_computed_tokens=int(first.num_computed_tokens),
        num_output_tokens=int(sum(seq.num_output_tokens for seq in group.seqs)),
        num_preemptions=group.num_preemptions,
        age_s=now - group.request.arrival_time_s,
        num_pages=len(pages[0]) if len(pages) == 1 else len({page for of_one in pages for page in of_one}),
        pages=tuple(tuple(of_one) for of_one in pages) if shown else (),
    )


def _status(group: SequenceGroup) -> Literal["queued", "prefill", "decode"]:
    if group.status is not SequenceStatus.RUNNING:
        return "queued"
    first = group.seqs[0]
    return "prefill" if first.num_computed_tokens < first.num_prompt_tokens else "decode"
