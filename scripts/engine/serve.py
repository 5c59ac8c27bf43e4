"""`serve`: requests through an engine, and what it spent on them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from jpaged import SamplingParams
from jpaged.engine import Engine
from jpaged.progress import GenerationProgress, progress_wanted
from jpaged.stats import EngineStats

Request = tuple[list[int], SamplingParams]


@dataclass(frozen=True)
class Run:
    """Some requests, from the first that was added to the last that ended.

    Attributes:
      wall_s: seconds.
      output_tokens: that were given out.
      before, after: the engine's counters then.
    """

    wall_s: float
    output_tokens: int
    before: EngineStats
    after: EngineStats

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s

    def spent(self, name: str) -> float:
        """By how much a counter grew."""
        return getattr(self.after, name) - getattr(self.before, name)

    @property
    def ms_per_step(self) -> dict[str, float]:
        """Milliseconds of the host's clock that a step took, by phase; they overlap with the device's work."""
        steps = max(self.spent("num_steps"), 1)
        names = [field.name for field in fields(EngineStats) if field.name.endswith("_s") and field.name != "compile_s"]
        return {name: round(1e3 * self.spent(name) / steps, 3) for name in names}

    @property
    def cached_fraction(self) -> float:
        """Part of the prompt tokens that the prefix cache had."""
        return self.spent("num_cached_tokens") / max(self.spent("num_queried_tokens"), 1)

    @property
    def padded_fraction(self) -> float:
        """Part of the computed tokens that was padding."""
        padded = self.spent("num_padded_tokens")
        return padded / max(padded + self.spent("num_step_tokens"), 1)


def request(token_ids: list[int], output_tokens: int, temperature: float = 0.0) -> Request:
    """A request of exactly so many output tokens."""
    return token_ids, SamplingParams(temperature=temperature, max_tokens=output_tokens, ignore_eos=True)


def serve(
    engine: Engine,
    requests: Sequence[Request],
    *,
    at_once: int | None = None,
    what: str = "requests",
    after_step: Callable[[], None] | None = None,
) -> Run:
    """Serves requests to their end; a bar is shown on a terminal.

    Args:
      engine: which has no other work.
      requests: in the order in which they are added.
      at_once: how many are added together; the next ones come when those have ended. `None`: all.
      what: the bar's name.
      after_step: called after each step.
    """
    at_once = at_once or len(requests)
    with GenerationProgress(enabled=progress_wanted(None), total=len(requests), what=what) as bar:
        before, start, produced = engine.stats(), time.perf_counter(), 0
        for first in range(0, len(requests), at_once):
            for prompt, params in requests[first : first + at_once]:
                engine.add(prompt, params)
            while engine.has_work:
                outputs = engine.step()
                if after_step:
                    after_step()
                if outputs:
                    produced += sum(len(output.token_ids) for output in outputs)
                    bar.advance(len(outputs), engine)
        return Run(time.perf_counter() - start, produced, before, engine.stats())


def exercise(engine: Engine) -> float:
    """Runs every step shape a few times, as the first runs of a program are slow: they record its CUDA graph.

    Of shapes of as many tokens, that of fewest rows runs with as few prompts as fill it, each other one with more than
    the one before it holds. Of page widths (`page_buckets`) only one runs for each of them, the least that holds these
    short requests. Programs of several decode steps run where a sequence can be long enough for one of them.

    Returns:
      Seconds.
    """
    begin = time.perf_counter()
    longest, scheduler = engine.pool_plan.max_model_len - 4, engine.config.scheduler
    several = {shape.num_tokens: shape.num_steps for shape in engine.step_shapes if shape.num_steps > 1}
    rows_before: dict[int, int] = {}  # of the shape before, by tokens
    for size, num_rows in sorted({(shape.num_tokens, shape.num_rows) for shape in engine.step_shapes}):
        if size <= scheduler.max_num_seqs:  # it decodes
            serve(engine, [request([1], 4)] * size, what=f"{size} rows")
            if (steps := several.get(size)) is not None:
                _exercise_several(engine, size, steps)
            continue
        tokens = min(size, scheduler.max_step_tokens)
        count = max(min(-(-tokens // longest), num_rows), 1 + rows_before.get(size, 0))
        tokens = min(tokens, count * longest)
        rows_before[size] = num_rows
        # Prompts that begin alike would share their pages in the step itself, and leave it smaller.
        lengths = [tokens // count + (row < tokens % count) for row in range(count)]
        prompts = [[row % engine.vocab_size] * length for row, length in enumerate(lengths)]
        for _ in range(3):
            engine.reset_prefix_cache()
            serve(engine, [request(prompt, 1) for prompt in prompts], what=f"{size} tokens of {count} rows")
    return time.perf_counter() - begin


def _exercise_several(engine: Engine, num_rows: int, steps: int) -> None:
    """Runs the program of so many decode steps three times: by one serve, or by several where sequences are short."""
    # A step for the prompt gives the first token, and a program runs where it has that many tokens to give.
    programs = min(3, (engine.pool_plan.max_model_len - 2) // steps)
    for _ in range(-(-3 // programs) if programs else 0):
        requests = [request([1], 1 + programs * steps)] * num_rows
        serve(engine, requests, what=f"{num_rows} rows, {steps} steps at once")
