"""`serve_contiguous`: the same workload where each request gets one run of slots when it starts, as in Orca."""

import heapq
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Any

from jpaged.lengths import Lengths
from jpaged.residency import Reservation
from scripts.memory.buddy import BuddyAllocator
from scripts.memory.feed import TimedFeed
from scripts.memory.hardware import Hardware
from scripts.memory.replay import rounded


@dataclass(slots=True)
class _Run:
    """A running request: where its slots begin, how many it has and asked for, and its tokens."""

    start: int
    size: int
    reserved: int
    final: int
    output: int
    prompt_left: int


def reserved_slots(reservation: Reservation, prompt_tokens: int, output_tokens: int, max_model_len: int) -> int:
    """Slots that a request asks for when it starts.

    Args:
      reservation: "oracle" knows the output's length; "pow2" reserves for the output the next power of two, so at most
        twice as much; "max" reserves `max_model_len` for every request.

    Example:
      >>> [reserved_slots(kind, 100, 300, 2048) for kind in ("oracle", "pow2", "max")]
      [400, 612, 2048]
    """
    if reservation == "max":
        return max_model_len
    output = 1 << (output_tokens - 1).bit_length() if reservation == "pow2" else output_tokens
    return min(prompt_tokens + output, max_model_len)


def serve_contiguous(
    lengths: Lengths,
    feed: TimedFeed,
    hardware: Hardware,
    reservation: Reservation,
    *,
    slots: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> dict[str, Any]:
    """Serves a workload by the rules of the real scheduler: first come, first served; requests join and leave with
    every step; a step has a budget of tokens, which decoding requests take from first, then prompts, in chunks.

    A run is a power of two slots (`BuddyAllocator`); nothing is preempted, since everything that a request may need is
    there from its start.

    Returns:
      mean_requests: running at once, over the time.
      saturated_mean_requests, saturated_fraction: the same, and part of the time, while more requests waited.
      saturated_shares: the pool then, by cause: tokens, not_yet_used (for tokens that will come), internal (for tokens
        that will never come), rounding (up to a power of two), free.

    Raises:
      ValueError: a request can never fit.
    """
    pool = BuddyAllocator(slots)
    prefilling: deque[_Run] = deque()
    decoding: list[tuple[int, int, _Run]] = []  # a heap by the step after which they have ended
    waiting: deque[int] = deque()
    sums: defaultdict[str, float] = defaultdict(float)
    held: Counter[str] = Counter()  # what running requests hold, now
    clock, step, seconds = 0.0, 0, 0.0
    while True:
        while (next_s := feed.next_s) is not None and next_s <= clock and len(waiting) < max_num_seqs:
            waiting.append(feed.take())
        num_tokens = len(decoding)
        left = max_num_batched_tokens - num_tokens - sum(run.prompt_left for run in prefilling)
        while waiting and left > 0 and len(prefilling) + len(decoding) < max_num_seqs:
            index = waiting[0]
            prompt, output = int(lengths.prompt_tokens[index]), max(int(lengths.output_tokens[index]), 1)
            reserved = reserved_slots(reservation, prompt, output, max_model_len)
            start = pool.allocate(reserved)
            if start is None:
                if not prefilling and not decoding:
                    raise ValueError(f"{reserved} slots for one request do not fit into {slots}; enlarge the pool")
                break
            waiting.popleft()
            run = _Run(start, pool.size_of(start), reserved, prompt + output, output, prompt)
            prefilling.append(run)
            left -= prompt
            held += Counter(final=run.final, reserved=reserved, runs=run.size)
        num_running = len(prefilling) + len(decoding)
        if not num_running:
            if feed.next_s is None:
                return _summary(sums, seconds, slots)
            clock = max(clock, feed.next_s)
            continue
        step += 1
        while prefilling and num_tokens < max_num_batched_tokens:
            run = prefilling[0]
            chunk = min(run.prompt_left, max_num_batched_tokens - num_tokens)
            run.prompt_left -= chunk
            num_tokens += chunk
            if run.prompt_left:
                break
            # The step that computes the last of the prompt gives the first token of the output.
            heapq.heappush(decoding, (step + run.output - 1, run.start, prefilling.popleft()))
        held["tokens"] += num_tokens
        step_s = hardware.step_s(num_tokens, held["tokens"])
        clock += step_s
        seconds += step_s
        sums["requests"] += num_running * step_s
        if waiting:
            sums["saturated_seconds"] += step_s
            sums["saturated_requests"] += num_running * step_s
            for name, value in held.items():
                sums[name] += value * step_s
        while decoding and decoding[0][0] == step:
            _, start, run = heapq.heappop(decoding)
            pool.free(start)
            held -= Counter(tokens=run.final - 1, final=run.final, reserved=run.reserved, runs=run.size)


def _summary(sums: dict[str, float], seconds: float, slots: int) -> dict[str, Any]:
    saturated = sums["saturated_seconds"] or float("inf")
    tokens, final, reserved, runs = (sums[k] / saturated / slots for k in ("tokens", "final", "reserved", "runs"))
    return rounded(
        {
            "mean_requests": sums["requests"] / seconds,
            "saturated_mean_requests": sums["saturated_requests"] / saturated,
            "saturated_fraction": sums["saturated_seconds"] / seconds,
            "saturated_shares": {
                "tokens": tokens,
                "not_yet_used": final - tokens,
                "internal": reserved - final,
                "rounding": runs - reserved,
                "free": 1 - runs,
            },
        }
    )
