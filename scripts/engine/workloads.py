"""The workloads: how many requests, how long, and what their prompts have in common. Imports no jax.

decode         steps that compute one token a row, at a batch size and a context
prefill        32 prompts of 4,096 tokens, one output token each
uniform        256 requests at once, prompt and output of 100 to 1,024 tokens each
azure          the first 1,000 conversations of the Azure trace of at most 8,000 tokens, at once
shared-prefix  256 requests at once: 2,048 shared tokens, 64 of their own, 64 output tokens
alone          requests of 512 tokens and 128 output tokens, one after the other
together       as many requests as the engine has rows, at once and one after the other
start          from the start of a process until an engine answers: without a compilation cache, and with one
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from jpaged.errors import ConfigError
from jpaged.trace_file import read_trace

NAMES: Final = ("start", "decode", "prefill", "shared-prefix", "uniform", "azure", "alone", "together")
CELLS: Final = (
    *((rows, 1024) for rows in (1, 8, 32, 64, 128, 256)),
    *((rows, 4096) for rows in (1, 8, 32, 64)),
)
DECODE_STEPS: Final = 128
# Of default_rng: the first below 60,000 whose sums are within 15 tokens of the load that vLLM was given, 143,501 prompt
# and 144,294 output tokens.
_UNIFORM_SEED: Final = 1481
_AZURE_ROWS, _AZURE_MOST_TOKENS = 1000, 8000


@dataclass(frozen=True)
class Load:
    """Requests that are served all at once, or in turn.

    Attributes:
      name: of the workload.
      prompts: tokens of each prompt.
      outputs: tokens of each output, none of which ends early.
      shared: leading tokens that all prompts have in common.
      in_turn: the next request comes when one has ended.
    """

    name: str
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    shared: int = 0
    in_turn: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(map(sum, zip(self.prompts, self.outputs, strict=True)))

    def scaled(self, scale: float) -> "Load":
        """Fewer and shorter requests; each has at least two tokens and an output token.

        Example:
          >>> Load("prefill", (4096,) * 32, (1,) * 32).scaled(1 / 16)
          Load(name='prefill', prompts=(256, 256), outputs=(1, 1), shared=0, in_turn=False)
        """
        if scale == 1:
            return self
        count = scaled(len(self.prompts), scale)
        shared = scaled(self.shared, scale) if self.shared else 0
        return replace(
            self,
            prompts=tuple(max(scaled(tokens, scale), shared + 2) for tokens in self.prompts[:count]),
            outputs=tuple(scaled(tokens, scale) for tokens in self.outputs[:count]),
            shared=shared,
        )

    def token_ids(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Random prompts; another seed has nothing in common with them."""
        rng = np.random.default_rng([seed, len(self.prompts)])
        common = rng.integers(0, vocab_size, self.shared).tolist()
        return [common + rng.integers(0, vocab_size, tokens - self.shared).tolist() for tokens in self.prompts]


def scaled(count: int, scale: float) -> int:
    """Example:
    >>> scaled(1024, 0.1), scaled(1, 0.1)
    (102, 1)
    """
    return max(round(count * scale), 1)


def decode_steps(scale: float) -> int:
    """Steps that a cell is averaged over.

    Example:
      >>> decode_steps(1.0), decode_steps(0.001)
      (128, 2)
    """
    return max(scaled(DECODE_STEPS, scale), 2)


def scaled_cells(cells: Sequence[tuple[int, int]], scale: float) -> list[tuple[int, int]]:
    """(rows, context) of each cell; what falls together is one cell, and a context has at least 8 tokens."""
    return list(dict.fromkeys((scaled(rows, scale), max(scaled(context, scale), 8)) for rows, context in cells))


def parse_cells(text: str) -> list[tuple[int, int]]:
    """Cells as they are given on the command line.

    Raises:
      ConfigError: not of the form ROWS@CONTEXT,...

    Example:
      >>> parse_cells("32@1024,1@4096")
      [(32, 1024), (1, 4096)]
    """
    cells = []
    for word in text.split(","):
        rows, at, context = word.strip().partition("@")
        if not (at and rows.isascii() and rows.isdigit() and context.isascii() and context.isdigit()):
            raise ConfigError(f"a cell is {word.strip()!r}, expected ROWS@CONTEXT, such as 32@1024")
        if int(rows) < 1 or int(context) < 2:
            raise ConfigError(f"a cell is {word.strip()!r}, expected at least 1 row and a context of 2 tokens")
        cells.append((int(rows), int(context)))
    return cells


def parse_names(text: str) -> list[str]:
    """Workloads as they are given on the command line, in the order in which they run.

    Raises:
      ConfigError: one is not there.

    Example:
      >>> parse_names("uniform,decode")
      ['decode', 'uniform']
      >>> parse_names("foo")
      Traceback (most recent call last):
      ...
      jpaged.errors.ConfigError: a workload is 'foo', expected all, or some of start, decode, prefill, shared-prefix,
        uniform, azure, alone, together
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in (*NAMES, "all"):
            raise ConfigError(f"a workload is {word!r}, expected all, or some of {', '.join(NAMES)}")
    return [name for name in NAMES if name in words or ("all" in words and name != "together")]


def uniform() -> Load:
    """Example:
    >>> load = uniform()
    >>> sum(load.prompts), sum(load.outputs), min(load.prompts), max(load.outputs)
    (143487, 144295, 101, 1024)
    """
    prompts, outputs = np.random.default_rng(_UNIFORM_SEED).integers(100, 1025, (2, 256)).tolist()
    return Load("uniform", tuple(prompts), tuple(outputs))


def azure(path: str) -> Load:
    """Raises:
    ConfigError: no trace, or none of its requests is short enough.
    """
    lengths = read_trace(path)
    kept = np.nonzero((lengths.total_tokens <= _AZURE_MOST_TOKENS) & (lengths.output_tokens > 0))[0][:_AZURE_ROWS]
    if not kept.size:
        raise ConfigError(f"{path} has no request of at most {_AZURE_MOST_TOKENS} tokens; expected a trace of lengths")
    prompts, outputs = lengths.prompt_tokens[kept].tolist(), lengths.output_tokens[kept].tolist()
    return Load("azure", tuple(prompts), tuple(outputs))


def make_load(name: str, *, trace: str | None = None) -> Load:
    """The whole workload of a name.

    Args:
      name: one of those that are a `Load`.
      trace: the file of the workload "azure".

    Raises:
      ConfigError: it needs a trace.
    """
    if name == "azure":
        if trace is None:
            raise ConfigError("the workload 'azure' needs --trace FILE, the conversations of the Azure trace of 2023")
        return azure(trace)
    if name == "uniform":
        return uniform()
    if name == "prefill":
        return Load(name, (4096,) * 32, (1,) * 32)
    if name == "shared-prefix":
        return Load(name, (2048 + 64,) * 256, (64,) * 256, shared=2048)
    if name == "alone":
        return Load(name, (512,) * 4, (128,) * 4, in_turn=True)
    raise ConfigError(f"the load is {name!r}, expected prefill, uniform, azure, shared-prefix or alone")
