"""The time that the host spends on a step, without a model or a device: the results of steps are made up.

    python scripts/bench_host.py                        the tables below, and a JSON line
    python scripts/bench_host.py --cached 10000 --json  a smaller prefix cache, only the JSON line

- Steps as the engine takes them, planned one ahead of the results: `plan`; `pack`, with what else is done before the
  step is handed over; `update`, with the outputs; `count`, the figures about the pool. Sequences that all decode, the
  same with their text, as it comes (stream) or at the end, and a mix in which one ends and a prompt comes with each
  step.
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
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jpaged.batch import BatchPacker
from jpaged.collector import Collector
from jpaged.config import EngineConfig, SchedulerConfig
from jpaged.engine_view import pool_use
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.memory_manager import MemoryManager
from jpaged.prefix_cache import CacheKey, token_bytes
from jpaged.request import Request, SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.sequence import SequenceGroup
from jpaged.step_outputs import DispatchedStep, StepOutputs
from jpaged.tokenizer import Tokenizer
from scripts.report import print_json, print_table

PAGE_SIZE = 16
VOCAB = 100_000
MAX_MODEL_LEN = 8192
LETTERS = "abcdefghijklmnopqrstuvwxyz"
Text = Literal["none", "at end", "stream"]
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


PARTS = ("plan", "pack", "update", "count")


@dataclass
class Steps:
    """What an engine does on the host, around steps whose results are made up: all rows sample the same tokens."""

    num_seqs: int
    text: Text = "none"
    prompt_tokens: int = 0
    times: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def __post_init__(self) -> None:
        chunk = max(self.num_seqs, 16) + self.prompt_tokens
        config = SchedulerConfig(max_num_seqs=self.num_seqs, max_num_batched_tokens=chunk)
        self.memory = MemoryManager.for_pool(self.num_seqs * 96 + 64, PAGE_SIZE)
        self.scheduler = Scheduler(config, self.memory, max_model_len=MAX_MODEL_LEN, eos_token_ids=[VOCAB - 1])
        shapes = EngineConfig(scheduler=config).step_shapes(MAX_MODEL_LEN, PAGE_SIZE)
        self.packer = BatchPacker(shapes, page_size=PAGE_SIZE, max_num_seqs=self.num_seqs)
        self.collector = Collector(self.scheduler, None if self.text == "none" else vocabulary())
        self.rng = random.Random(0)
        self.sampled = np.arange(1, chunk + 1, dtype=np.int32) % 500 + 3
        self.in_flight: deque[DispatchedStep] = deque()
        self.num_added = 0

    def add(self, num_prompt: int, max_tokens: int) -> None:
        prompt = tuple(self.rng.randrange(3, 500) for _ in range(num_prompt))
        params = SamplingParams(max_tokens=max_tokens)
        group = SequenceGroup(Request(request_id=str(self.num_added), prompt_token_ids=prompt, params=params))
        self.num_added += 1
        self.scheduler.add(group)
        self.collector.open(group, None, stream="deltas" if self.text == "stream" else False)

    def step(self) -> None:
        """One step: another one is planned and packed, then the one before is read."""
        clock, at = time.perf_counter, [time.perf_counter()]
        plan = self.scheduler.plan()
        if plan is None:
            raise RuntimeError("nothing is left to run")
        at.append(clock())
        self.collector.begin(plan)
        self.packer.pack(plan)
        at.append(clock())
        pool_use(self.memory, self.scheduler)
        at.append(clock())
        zeros = np.zeros(1, np.float32)
        outputs = StepOutputs(self.sampled[: plan.num_seqs], *[zeros] * 6)  # type: ignore[arg-type]
        self.in_flight.append(DispatchedStep(plan, outputs))
        started = clock()
        if len(self.in_flight) > 1:
            self.collector.collect(done := self.in_flight.popleft(), np.asarray(done.outputs.token_ids))
            self.collector.take_news()
        seconds = (at[1] - at[0], at[2] - at[1], clock() - started, at[3] - at[2])
        for part, spent in zip(PARTS, seconds, strict=True):
            self.times[part].append(spent)

    def medians(self) -> dict[str, float]:
        """Of each part and of the steps as a whole, ms, and the 99th percentile of the steps."""
        times = {**self.times, "step": [sum(parts) for parts in zip(*self.times.values(), strict=True)]}
        found = {f"{part}_ms": round(1e3 * statistics.median(spent), 4) for part, spent in times.items()}
        return found | {"p99_ms": round(1e3 * statistics.quantiles(times["step"], n=100)[98], 4)}


def vocabulary() -> Tokenizer:
    """A byte-level vocabulary of some hundred short words."""
    tokens = ["<s>", "</s>", "<pad>", *LETTERS, *(first + second for first in LETTERS for second in LETTERS)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [f"{word[0]} {word[1]}" for word in tokens[29:]],
    }
    return Tokenizer(gguf_vocabulary(metadata, "bench"), "bench")


def decode_times(num_seqs: int, num_steps: int, text: Text = "none") -> dict[str, float]:
    """Steps in which all sequences decode, and none begins or ends. Prompts differ in length, so pages end in turn."""
    steps = Steps(num_seqs, text, prompt_tokens=1024)
    for _ in range(num_seqs):
        steps.add(steps.rng.randint(50, 150), max_tokens=num_steps + 1000)
    return timed(steps, num_steps, lambda: None)


def mixed_times(num_seqs: int, num_steps: int, text: Text = "none") -> dict[str, float]:
    """Steps in which about one sequence ends, and one prompt of 512 tokens begins."""
    steps = Steps(num_seqs, text, prompt_tokens=512)

    def refill() -> None:
        while len(steps.collector) < num_seqs:
            steps.add(512, max_tokens=steps.rng.randint(1, 2 * num_seqs - 1))

    return timed(steps, num_steps, refill, warm_up=3 * num_seqs)


def timed(steps: Steps, num_steps: int, refill: Callable[[], None], warm_up: int = 0) -> dict[str, float]:
    """Times steps once everybody has begun; `refill` brings new requests, outside of what is timed."""
    num_warm = 0
    while steps.scheduler.waiting or num_warm < warm_up + 8:
        refill()
        steps.step()
        num_warm += 1
    for spent in steps.times.values():
        spent.clear()
    gc.collect()
    gc.freeze()
    for _ in range(num_steps):
        refill()
        steps.step()
    gc.unfreeze()
    return steps.medians()


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
    parser.add_argument("--seqs", type=int, nargs="*", default=[1, 32, 256, 512], help="sequences that decode at once")
    parser.add_argument("--prompt", type=int, default=50_000, help="tokens of the long prompt (default: %(default)s)")
    parser.add_argument("--cached", type=int, nargs="*", default=[10_000, 100_000, 1_000_000], help="cached pages")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    args = parser.parse_args()

    steps = {f"{num_seqs} decode": decode_times(num_seqs, args.steps) for num_seqs in args.seqs}
    if args.seqs:
        num_seqs = max(n for n in args.seqs if n <= 256 or n == min(args.seqs))
        steps[f"{num_seqs} decode, text at the end"] = decode_times(num_seqs, args.steps, "at end")
        steps[f"{num_seqs} decode, text streamed"] = decode_times(num_seqs, args.steps, "stream")
        steps[f"{num_seqs} come and go"] = mixed_times(num_seqs, args.steps)
        steps[f"{num_seqs} come and go, text at the end"] = mixed_times(num_seqs, args.steps, "at end")
    prompt = prompt_times(args.prompt, repeats=9)
    cached, evictions = {}, {}
    for num_cached in args.cached:
        cached[num_cached], evictions[num_cached] = cached_times(num_cached, args.steps)
        gc.collect()
    results = {
        "page_size": PAGE_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "steps": args.steps,
        "step": steps,
        "prompt_tokens": args.prompt,
        "prompt": prompt,
        "cached": {str(n): vars(times) | {"evictions": evictions[n]} for n, times in cached.items()},
    }
    if not args.json:
        print_table(
            "A step on the host, medians",
            ["sequences", *(f"{part}, ms" for part in (*PARTS, "all")), "99th percentile, ms"],
            [[name, *times.values()] for name, times in steps.items()],
        )
        print_table(
            f"A prompt of {args.prompt:,} tokens",
            ["", "ms"],
            [["found in the prefix cache", prompt["find_ms"]], ["entered there", prompt["enter_ms"]]],
        )
        columns = ["plan, ms", "update, ms", "both, ms", "99th percentile, ms"]
        print_table(
            f"Planning a step of {NUM_SHORT} sequences that come and go",
            ["cached pages", *columns, "evictions"],
            [[f"{n:,}", *vars(times).values(), f"{evictions[n]:,}"] for n, times in cached.items()],
        )
    print_json("bench_host", results)


if __name__ == "__main__":
    main()
