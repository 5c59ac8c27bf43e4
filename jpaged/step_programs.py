"""`Program`: the parts that a step is compiled in, and which of them a step needs.

    packed ──► decode ──► token ids [k, S] (instead of all that follows: k steps of one token a row)

    packed ──► forward ──► hidden [T, E] ──► logits [S, V] ──► sampling ──► token ids
                                │                  │              (greedy, draw, filter or full)
                                ▼                  ▼
                        prompt logprobs         logprobs          (only where somebody asks)

A part is a straight run of kernels that the device does without asking the host. What a step needs beside the forward
pass is known to the host, which made the rows, so it is decided there and not on the device.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jpaged.config import StepShape
from jpaged.sampling_rows import NUM_SAMPLING_FIELDS, SAMPLING_KINDS, SamplingKind, sampling_kind, wants_logprobs


@dataclass(frozen=True)
class Program:
    """One compiled part of a step.

    Attributes:
      part: which one.
      size: the step's shape, or the number of rows where nothing else matters.
      kind: of a sampling program.

    Example:
      >>> print(Program("forward", StepShape(32, 8, 64)), "|", Program("sampling", 8, "draw"))
      forward T32 S8 P64 | sampling S8 draw
    """

    part: Literal["decode", "forward", "sampling", "logprobs", "prompt logprobs"]
    size: StepShape | int
    kind: SamplingKind | None = None

    def __str__(self) -> str:
        size = self.size if isinstance(self.size, StepShape) else f"S{self.size}"
        return f"{self.part} {size}" + (f" {self.kind}" if self.kind else "")


@dataclass(frozen=True)
class StepNeeds:
    """What a step runs.

    Attributes:
      shape: of the step.
      sampling: the least kind of those compiled that does for all rows.
      logprobs: some row asks for log-probabilities of the token that it samples.
      prompt_logprobs: some row asks for those of its prompt.
    """

    shape: StepShape
    sampling: SamplingKind = "greedy"
    logprobs: bool = False
    prompt_logprobs: bool = False

    @classmethod
    def read(cls, packed: np.ndarray, shape: StepShape, kinds: Sequence[SamplingKind] = SAMPLING_KINDS) -> "StepNeeds":
        """What a packed plan asks for; `kinds` as for `all_programs`."""
        if shape.num_steps > 1:
            return cls(shape, "draw")  # the planner saw to it that this does
        fields = sampling_part(packed, shape)
        asks = packed[packed.shape[0] - fields.size - 1]  # wants_prompt_logprobs, the last scalar
        return cls(shape, sampling_kind(fields, kinds), wants_logprobs(fields), bool(asks))

    def programs(self) -> Iterator[Program]:
        """In the order in which they run."""
        if self.shape.num_steps > 1:
            yield Program("decode", self.shape)
            return
        yield Program("forward", self.shape)
        yield Program("sampling", self.shape.num_rows, self.sampling)
        if self.logprobs:
            yield Program("logprobs", self.shape.num_rows)
        if self.prompt_logprobs:
            yield Program("prompt logprobs", self.shape)


def sampling_part(packed: Any, shape: StepShape) -> Any:
    """The sampling parameters i32[NUM_SAMPLING_FIELDS, S], with which the packed array ends, on host or device."""
    size = NUM_SAMPLING_FIELDS * shape.num_rows
    return packed[packed.shape[0] - size :].reshape(NUM_SAMPLING_FIELDS, shape.num_rows)


def all_programs(shapes: Iterable[StepShape], kinds: Sequence[SamplingKind] = SAMPLING_KINDS) -> tuple[Program, ...]:
    """Every program that a step of these shapes may need; first those that take longest to compile.

    Args:
      shapes: of the steps.
      kinds: of sampling, as `SamplerTuning.kinds`.

    Example:
      >>> [str(program) for program in all_programs([StepShape(8, 4, 2)])][:4]
      ['forward T8 S4 P2', 'sampling S4 full', 'sampling S4 filter', 'sampling S4 draw']
    """
    by_size = operator.attrgetter("num_tokens", "num_rows", "pages_per_row")
    all_shapes = sorted(shapes, key=by_size, reverse=True)
    largest_first = [shape for shape in all_shapes if shape.num_steps == 1]
    several = [shape for shape in all_shapes if shape.num_steps > 1]
    rows = sorted({shape.num_rows for shape in largest_first}, reverse=True)
    return (
        *(Program("forward", shape) for shape in largest_first),
        *(Program("decode", shape) for shape in several),
        *(Program("sampling", size, kind) for kind in reversed(kinds) for size in rows),
        *(Program("logprobs", size) for size in rows),
        *(Program("prompt logprobs", shape) for shape in largest_first),
    )
