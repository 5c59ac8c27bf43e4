"""`replay`: gives known answers once more, by the scheduler alone, in a world where steps take what they are said to.

The scheduler plans, guesses and judges as it does in an engine; only that the tokens are known, and that time passes by
the costs of a device. So the rule that decides on guesses is tried at costs of devices that are not there, and without
the noise of a clock. Host and device work side by side as in the engine: a step begins when it was planned and the one
before it has ended, and is read when it has ended.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from jpaged.memory_manager import MemoryManager
from jpaged.request import Request, SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.sequence import SequenceGroup
from jpaged.speculation import Speculation
from jpaged.step_plan import StepPlan

_PAGE_SIZE: Final = 16
_MAX_LEN: Final = 1024
_NO_ANSWER: Final = 0  # what would come after an answer's last token
_ROWS: Final = 16


@dataclass(frozen=True)
class Answer:
    """What was asked, and answered."""

    prompt: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True)
class Device:
    """What steps take, in one unit of time.

    Attributes:
      name: for people.
      platform: as jax calls it.
      steps: what a step takes on the device, by its padded number of tokens.
      decode_steps: of one program.
      plan, plan_row: what the host does before a step, and for each of its rows.
      read, read_row: what it does after it.
    """

    name: str
    platform: str
    steps: dict[int, float]
    decode_steps: int = 1
    plan: float = 0.6
    plan_row: float = 0.02
    read: float = 0.4
    read_row: float = 0.01

    def step_of(self, num_tokens: int) -> float:
        """What a step of so many tokens takes."""
        return next(cost for size, cost in self.steps.items() if size >= num_tokens)


# Milliseconds. Of the CPU, of its own seconds on two cores in float32; of the H200, docs/benchmarks/engine.md for rows
# of 1,024 tokens, and what its host needs for a step of 1 and of 32 rows (docs/design/0010-speculation.md).
DEVICES: Final = (
    Device(
        name="2 CPU cores, SmolLM2-135M",
        platform="cpu",
        steps={1: 53.0, 4: 86.0, 8: 92.0, 16: 119.0, 32: 180.0, 64: 350.0, 256: 1350.0},
    ),
    Device(
        name="H200, SmolLM2-135M, 4 steps a program",
        platform="gpu",
        steps={1: 0.66, 8: 0.7, 16: 0.8, 32: 0.95, 64: 1.23, 128: 1.7, 256: 2.27},
        decode_steps=4,
    ),
    Device(
        name="H200, Llama 3.1 8B",
        platform="gpu",
        steps={1: 4.67, 8: 4.75, 16: 5.0, 32: 5.5, 64: 6.9, 128: 9.95, 256: 15.64},
    ),
)


class World:
    """A scheduler, a device and a clock.

    Args:
      device: that the scheduler believes to plan for.
      guesses: whether rows guess.

    Attributes:
      now: time.
    """

    def __init__(self, device: Device, *, guesses: bool) -> None:
        self._device = device
        buckets = tuple(device.steps)
        config = EngineConfig(
            cache=CacheConfig(num_pages=2 + _ROWS * _MAX_LEN // _PAGE_SIZE, page_size=_PAGE_SIZE),
            scheduler=SchedulerConfig(max_num_seqs=_ROWS, max_num_batched_tokens=buckets[-1], max_model_len=_MAX_LEN),
            token_buckets=buckets,
            speculation=SpeculationConfig() if guesses else None,
        )
        assert config.cache.num_pages is not None
        shapes = config.step_shapes(_MAX_LEN, _PAGE_SIZE, device.platform)
        rule = config.speculation and Speculation(config.speculation, shapes, device.platform, lambda: self.now)
        self._scheduler = Scheduler(
            config.scheduler,
            MemoryManager.for_pool(config.cache.num_pages, _PAGE_SIZE, prefix_cache=True),
            max_model_len=_MAX_LEN,
            token_buckets=buckets,
            speculation=rule,
            decode_steps=device.decode_steps,
        )
        self._known: dict[str, list[int]] = {}
        self._device_free = 0.0
        self.now = 0.0

    @property
    def counts(self) -> tuple[int, int]:
        """Guesses, and those that came true."""
        return self._scheduler.num_guesses, self._scheduler.num_hits

    def answer(self, answers: Sequence[Answer], *, tokens_each: int | None = None) -> np.ndarray:
        """When each answer ended, if all are asked for at once."""
        scheduler, start = self._scheduler, self.now
        for number, one in enumerate(answers):
            params = SamplingParams(max_tokens=tokens_each or len(one.tokens), ignore_eos=True)
            name = str(number)
            request = Request(request_id=name, prompt_token_ids=tuple(one.prompt), params=params, seed=number)
            scheduler.add(SequenceGroup(request))
            self._known[name] = [*one.prompt, *one.tokens]
        in_flight: deque[tuple[StepPlan, float]] = deque()
        ends = np.zeros(len(answers))
        while scheduler.has_work:
            plan = scheduler.plan()
            if plan is not None and plan.seqs:
                in_flight.append((plan, self._run(plan)))
            ahead = 1 if plan is not None and plan.seqs and plan.drafts is None else 0
            while len(in_flight) > ahead:
                done, end = in_flight.popleft()
                device = self._device
                self.now = max(self.now, end) + device.read + device.read_row * done.num_seqs
                results = scheduler.update(done, done.new_tokens(self._samples(done)))
                for row in results.ended:
                    ends[int(done.seqs[row].request.request_id)] = self.now - start
        return ends

    def _run(self, plan: StepPlan) -> float:
        """When a step ends that was planned just now."""
        device = self._device
        self.now += device.plan + device.plan_row * plan.num_seqs
        steps = device.step_of(plan.num_tokens) * plan.num_steps
        self._device_free = max(self._device_free, self.now) + steps
        return self._device_free

    def _samples(self, plan: StepPlan) -> np.ndarray:
        """What the model samples, which is known."""

        def token(row: int, place: int) -> int:
            known, position = self._known[plan.seqs[row].request.request_id], int(plan.positions[row]) + place
            return known[position] if position < len(known) else _NO_ANSWER

        rows = range(plan.num_seqs)
        if plan.num_more is not None:
            return np.array([[token(row, place) for row in rows] for place in range(plan.num_steps)])
        counts = [0] * plan.num_seqs if plan.drafts is None else plan.drafts.counts.tolist()
        after_guesses = [token(row, 1 + place) for row in rows for place in range(counts[row])]
        return np.array([*(token(row, 0) for row in rows), *after_guesses])


def replay(device: Device, answers: Sequence[Answer], rows: int) -> dict[str, Any]:
    """The answers, `rows` at a time, with and without guesses; prompts are in the prefix cache.

    Returns:
      device, speedup: of all; slow_row: of the slowest twentieth of answers, how much sooner each ended at the least;
      guesses, acceptance.
    """
    worlds = World(device, guesses=False), World(device, guesses=True)
    seconds, sooner = np.zeros(2), []
    many = [answers[index % len(answers)] for index in range(-(-len(answers) // rows) * rows)]
    for first in range(0, len(many), rows):
        group, ends = many[first : first + rows], []
        for which, world in enumerate(worlds):
            world.answer(group, tokens_each=1)
            start = world.now
            ends.append(world.answer(group))
            seconds[which] += world.now - start
        sooner += (ends[0] / ends[1]).tolist()
    guesses, hits = worlds[1].counts
    return {
        "device": device.name,
        "speedup": round(float(seconds[0] / seconds[1]), 3),
        "slow_row": round(float(np.percentile(sooner, 5)), 3),
        "guesses": guesses,
        "acceptance": round(hits / guesses, 3) if guesses else None,
    }
