"""The time that the host spends on a step: scheduler, memory manager and prefix cache, without a model or a device.

    python scripts/bench_host.py                        the tables below, and a JSON line
    python scripts/bench_host.py --cached 10000 --json  a smaller prefix cache, only the JSON line

- Steps of sequences that all decode: `plan` and `update`, medians over `--steps` steps.
- A long prompt: finding all of its pages in the prefix cache (its tokens are hashed and compared), and entering them.
- Steps of 64 sequences among which some end and new ones begin in each, so that pages are entered, found and evicted,
  beside prefix caches of growing size: what a step costs must not depend on how many pages are cached.

Times are those of the processor, so other programs on a shared machine do not count, though they slow it down.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jpaged.config import SchedulerConfig
from jpaged.memory_manager import MemoryManager
from jpaged.prefix_cache import CacheKey, token_bytes
from jpaged.request import Request, SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.sequence import SequenceGroup
from scripts.report import print_json, print_table

PAGE_SIZE = 16
VOCAB = 100_000
CHAIN_PAGES = 100  # of each cached text
NUM_SHORT = 64  # sequences that run beside a large prefix cache
SHORT_PROMPT, SHORT_OUTPUT = 96, 32


@dataclass(frozen=True)
class StepTimes:
    """Medians, ms; `p99_ms` is of both together."""

    plan_ms: float
    update_ms: float
    step_ms: float
    p99_ms: float

    @classmethod
    def of(cls, plans: list[float], updates: list[float]) -> "StepTimes":
        steps = [plan + update for plan, update in zip(plans, updates, strict=True)]
        plan, update, step = (round(1e3 * statistics.median(times), 4) for times in (plans, updates, steps))
        return cls(plan, update, step, round(1e3 * statistics.quantiles(steps, n=100)[98], 4))


def add_request(scheduler: Scheduler, number: int, prompt: list[int], max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    scheduler.add(SequenceGroup(Request(request_id=str(number), prompt_token_ids=tuple(prompt), params=params)))


def run_steps(scheduler: Scheduler, num_steps: int, rng: random.Random, refill: Callable[[], None]) -> StepTimes:
    """Times steps; `refill` brings new requests, outside of what is timed."""
    plans, updates = [], []
    for _ in range(num_steps):
        refill()
        start = time.thread_time()
        plan = scheduler.plan()
        planned = time.thread_time()
        if plan is None:
            raise RuntimeError("nothing is left to run")
        token_ids = [rng.randrange(VOCAB) for _ in plan.seqs]
        sampled = time.thread_time()
        scheduler.update(plan, token_ids)
        updates.append(time.thread_time() - sampled)
        plans.append(planned - start)
    return StepTimes.of(plans, updates)


def decode_times(num_seqs: int, num_steps: int) -> StepTimes:
    """Steps in which all sequences decode, and none begins or ends."""
    rng = random.Random(0)
    memory = MemoryManager.for_pool(num_seqs * (200 + num_steps) // PAGE_SIZE + num_seqs, PAGE_SIZE)
    config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * 200)
    scheduler = Scheduler(config, memory, max_model_len=4096)
    for number in range(num_seqs):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(50, 150))]
        add_request(scheduler, number, prompt, max_tokens=num_steps + 50)
    while any(len(seq.tokens) == seq.num_prompt_tokens for seq in scheduler.running_seqs) or scheduler.waiting:
        run_steps(scheduler, 2, rng, lambda: None)
    return run_steps(scheduler, num_steps, rng, lambda: None)


def prompt_times(num_tokens: int, repeats: int) -> dict[str, float]:
    """Finding and entering a prompt, ms, medians."""
    rng = random.Random(0)
    prompt = [rng.randrange(VOCAB) for _ in range(num_tokens)]
    memory = MemoryManager.for_pool(num_tokens // PAGE_SIZE + 2, PAGE_SIZE)
    group = SequenceGroup(Request(request_id="long", prompt_token_ids=tuple(prompt), params=SamplingParams()))
    enters, finds = [], []
    for _ in range(repeats):
        seq = group.seqs[0]
        memory.start(seq, None)
        if not memory.append(seq, num_tokens):
            raise RuntimeError("the pool is too small")
        seq.num_computed_tokens = num_tokens
        start = time.thread_time()
        memory.commit(seq)
        entered = time.thread_time()
        hit = memory.find(seq)
        finds.append(time.thread_time() - entered)
        enters.append(entered - start)
        if hit is None or hit.num_tokens < num_tokens - PAGE_SIZE:
            raise RuntimeError("the prompt was not found")
        memory.release(seq)
        memory.reset_prefix_cache([])
    return {"find_ms": round(1e3 * statistics.median(finds), 3), "enter_ms": round(1e3 * statistics.median(enters), 3)}


def fill(memory: MemoryManager, num_pages: int, rng: random.Random) -> None:
    """Leaves so many cached pages, of texts that nobody asks for again."""
    cache, allocator = memory.prefix_cache, memory.allocator
    if cache is None:
        raise RuntimeError("there is no prefix cache to fill")
    for first in range(0, num_pages, CHAIN_PAGES):
        pages = allocator.allocate(min(CHAIN_PAGES, num_pages - first))
        entry = cache.root(CacheKey())
        for page in pages:
            entry = cache.insert(entry, token_bytes([rng.randrange(VOCAB) for _ in range(PAGE_SIZE)]), page)
        allocator.free(pages)


def cached_times(num_cached: int, num_steps: int) -> tuple[StepTimes, int]:
    """Steps with admissions, hits and evictions beside so many cached pages, and the evictions in them."""
    rng = random.Random(0)
    each = -(-(SHORT_PROMPT + SHORT_OUTPUT) // PAGE_SIZE)
    memory = MemoryManager.for_pool(num_cached + NUM_SHORT * (each + 2) + 1, PAGE_SIZE)
    fill(memory, memory.capacity, rng)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=NUM_SHORT, max_num_batched_tokens=1024), memory, max_model_len=4096
    )
    shared = [rng.randrange(VOCAB) for _ in range(SHORT_PROMPT // 2)]
    numbers = iter(range(10**9))

    def refill() -> None:
        for _ in range(NUM_SHORT + 2 - len(scheduler.running) - len(scheduler.waiting)):
            prompt = shared + [rng.randrange(VOCAB) for _ in range(SHORT_PROMPT // 2)]
            add_request(scheduler, next(numbers), prompt, max_tokens=rng.randint(1, SHORT_OUTPUT))

    run_steps(scheduler, 3 * SHORT_OUTPUT, rng, refill)
    before = memory.prefix_cache.num_evictions if memory.prefix_cache else 0
    times = run_steps(scheduler, num_steps, rng, refill)
    return times, memory.prefix_cache.num_evictions - before if memory.prefix_cache else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="steps that are timed (default: %(default)s)")
    parser.add_argument("--seqs", type=int, nargs="*", default=[256, 1024], help="sequences that decode at once")
    parser.add_argument("--prompt", type=int, default=50_000, help="tokens of the long prompt (default: %(default)s)")
    parser.add_argument("--cached", type=int, nargs="*", default=[10_000, 100_000, 1_000_000], help="cached pages")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    args = parser.parse_args()

    decode = {num_seqs: decode_times(num_seqs, args.steps) for num_seqs in args.seqs}
    prompt = prompt_times(args.prompt, repeats=9)
    cached, evictions = {}, {}
    for num_cached in args.cached:
        cached[num_cached], evictions[num_cached] = cached_times(num_cached, args.steps)
        gc.collect()
    results = {
        "page_size": PAGE_SIZE,
        "steps": args.steps,
        "decode": {str(num_seqs): vars(times) for num_seqs, times in decode.items()},
        "prompt_tokens": args.prompt,
        "prompt": prompt,
        "cached": {str(n): vars(times) | {"evictions": evictions[n]} for n, times in cached.items()},
    }
    if not args.json:
        columns = ["plan, ms", "update, ms", "both, ms", "99th percentile, ms"]
        print_table(
            "A step in which all sequences decode",
            ["sequences", *columns],
            [[f"{num_seqs:,}", *vars(times).values()] for num_seqs, times in decode.items()],
        )
        print_table(
            f"A prompt of {args.prompt:,} tokens",
            ["", "ms"],
            [["found in the prefix cache", prompt["find_ms"]], ["entered there", prompt["enter_ms"]]],
        )
        print_table(
            f"A step of {NUM_SHORT} sequences that come and go",
            ["cached pages", *columns, "evictions"],
            [[f"{n:,}", *vars(times).values(), f"{evictions[n]:,}"] for n, times in cached.items()],
        )
    print_json("bench_host", results)


if __name__ == "__main__":
    main()
