"""Sequences in a memory manager, without a scheduler: they start, compute what they have, and end."""

import gc
import itertools
import sys
from collections.abc import Callable

from jpaged.memory_manager import MemoryManager
from jpaged.page_allocator import PageAllocator
from jpaged.prefix_cache import PrefixCache, PrefixHit
from jpaged.request import Request, SamplingParams
from jpaged.sequence import Sequence, SequenceGroup

SIZE = 4
IDS = itertools.count()


def make(num_pages: int = 20, *, host_pages: int = 0, window: int | None = None, cache: bool = True) -> MemoryManager:
    allocator = PageAllocator(num_pages, SIZE)
    return MemoryManager(
        allocator,
        prefix_cache=PrefixCache(allocator, sliding_window=window) if cache else None,
        host_allocator=PageAllocator(host_pages + 1, SIZE) if host_pages else None,
        sliding_window=window,
    )


def new_seq(tokens, *, salt: str | None = None, **params) -> Sequence:
    params = SamplingParams(**{"max_tokens": 4, **params})
    return SequenceGroup(
        Request(request_id=str(next(IDS)), prompt_token_ids=tuple(tokens), params=params, cache_salt=salt)
    ).seqs[0]


def compute(memory: MemoryManager, seq: Sequence, num_tokens: int | None = None) -> None:
    """A row of the plan being made."""
    num_tokens = seq.num_tokens - seq.num_computed_tokens if num_tokens is None else num_tokens
    assert memory.append(seq, num_tokens)
    assert len(seq.pages) == memory.allocator.pages_for(seq.num_computed_tokens + num_tokens)
    assert seq.writable_end >= seq.num_computed_tokens + num_tokens
    seq.num_computed_tokens += num_tokens
    memory.commit(seq)


def run(memory: MemoryManager, tokens, **more) -> Sequence:
    """A sequence that starts, computes its tokens in one step, and goes on to hold its pages."""
    seq = new_seq(tokens, **more)
    memory.start_plan()
    memory.start(seq, memory.find(seq))
    compute(memory, seq)
    memory.take_transfers()
    return seq


def found(memory: MemoryManager, tokens, **more) -> PrefixHit:
    """What a new sequence finds in the next plan."""
    memory.start_plan()
    hit = memory.find(new_seq(tokens, **more))
    assert hit is not None
    return hit


def end(memory: MemoryManager, *seqs: Sequence) -> None:
    for seq in seqs:
        memory.release(seq)


def num_lines_run(call: Callable[[], object]) -> int:
    """Lines of Python that a call executes: what it costs, whatever the machine does meanwhile.

    The collector waits: it would run finalizers and callbacks of whatever else the process holds.
    """
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count
