"""`serve_contiguous`: the same workload where each request gets one run of slots when it starts, as in Orca."""

import heapq
from collections import Counter, defaultdict, deque
from typing import Any

from jpaged.lengths import Lengths
from jpaged.residency import Reservation
from scripts.memory.buddy import BuddyAllocator
from scripts.memory.feed import TimedFeed
from scripts.memory.hardware import Hardware
from scripts.memory.replay import rounded


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
) -> dict[str, Any]:
    """Serves a workload, first come first served; requests join and leave with every step.

    A prompt is computed in one step. A run is a power of two slots (`BuddyAllocator`); nothing is preempted, since
    everything that a request may need is there from its start.

    Returns:
      mean_requests: running at once, over the time.
      saturated_mean_requests, saturated_fraction: the same, and part of the time, while more requests waited.
      saturated_shares: the pool then, by cause: tokens, not_yet_used (for tokens that will come), internal (for tokens
        that will never come), rounding (up to a power of two), free.

    Raises:
      ValueError: a request can never fit.
    """
    pool = BuddyAllocator(slots)
    running: list[tuple[int, int, int, int, int]] = []  # a heap: last step, start, final tokens, reserved, run
    waiting: deque[int] = deque()
    sums: defaultdict[str, float] = defaultdict(float)
    held: Counter[str] = Counter()  # what running requests hold, now
    clock, step, seconds = 0.0, 0, 0.0
    while True:
        while (next_s := feed.next_s) is not None and next_s <= clock and len(waiting) < max_num_seqs:
            waiting.append(feed.take())
        prompt_tokens = 0
        while waiting and len(running) < max_num_seqs:
            index = waiting[0]
            prompt, output = int(lengths.prompt_tokens[index]), max(int(lengths.output_tokens[index]), 1)
            reserved = reserved_slots(reservation, prompt, output, max_model_len)
            start = pool.allocate(reserved)
            if start is None:
                if not running:
                    raise ValueError(f"{reserved} slots for one request do not fit into {slots}; enlarge the pool")
                break
            waiting.popleft()
            prompt_tokens += prompt
            run = pool.size_of(start)
            heapq.heappush(running, (step + output, start, prompt + output, reserved, run))
            held += Counter(tokens=prompt - 1, final=prompt + output, reserved=reserved, runs=run)
        if not running:
            if feed.next_s is None:
                return _summary(sums, seconds, slots)
            clock = max(clock, feed.next_s)
            continue
        num_running = len(running)
        held["tokens"] += num_running  # each has computed one more token, a new one its whole prompt
        step += 1
        step_s = hardware.step_s(prompt_tokens + num_running, held["tokens"])
        clock += step_s
        seconds += step_s
        sums["requests"] += num_running * step_s
        if waiting:
            sums["saturated_seconds"] += step_s
            sums["saturated_requests"] += num_running * step_s
            for name, value in held.items():
                sums[name] += value * step_s
        while running and running[0][0] == step:
            _, start, final, reserved, run = heapq.heappop(running)
            pool.free(start)
            held -= Counter(tokens=final - 1, final=final, reserved=reserved, runs=run)


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
