"""`Work`: what a load test sends, request by request; made before it begins, so that nothing is made in between."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jpaged.errors import ConfigError
from jpaged.lengths import Lengths
from jpaged.tokenizer import Tokenizer
from jpaged.workload import parse_lengths

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_UNIFORM = re.compile(r"uniform:(\d{1,8})-(\d{1,8})\+(\d{1,8})-(\d{1,8})", re.ASCII)
_TRIES = 100


@dataclass(frozen=True, slots=True)
class Work:
    """One request.

    Attributes:
      index: among all.
      body: JSON.
      prompt_tokens, output_tokens: as wanted.
      due_s: when it arrives, seconds since the start; `None`: when a place is free.
    """

    index: int
    body: bytes
    prompt_tokens: int
    output_tokens: int
    due_s: float | None = None


def read_lengths(text: str, rng: np.random.Generator) -> Lengths:
    """As `parse_lengths`, and "uniform:LOW-HIGH+LOW-HIGH": tokens of prompts and of outputs, both ends included.

    Raises:
      ConfigError: another text.

    Example:
      >>> lengths = read_lengths("uniform:4-4+1-2", np.random.default_rng(0))
      >>> set(lengths.prompt_tokens.tolist()), set(lengths.output_tokens.tolist())
      ({4}, {1, 2})
    """
    if not text.startswith("uniform:"):
        return parse_lengths(text)
    match = _UNIFORM.fullmatch(text)
    if not match:
        raise ConfigError(f"lengths are {text!r}, expected uniform:LOW-HIGH+LOW-HIGH, such as uniform:10-90+1-50")
    low, high, low_output, high_output = map(int, match.groups())
    if low > high or low_output > high_output:
        raise ConfigError(f"lengths are {text!r}, where a low end is above the high one")
    count = 10_000
    prompts, outputs = rng.integers(low, high + 1, count), rng.integers(low_output, high_output + 1, count)
    return Lengths(source=text, prompt_tokens=prompts, output_tokens=outputs)


def pick_rows(lengths: Lengths, count: int, rng: np.random.Generator, *, in_order: bool) -> np.ndarray:
    """Which rows of `lengths` are the requests, i64[count].

    Args:
      lengths: of a workload.
      count: of requests.
      rng: draws them.
      in_order: the first ones, as a trace's times want it; else drawn by weight, none twice while there are enough.

    Raises:
      ConfigError: in order, there are fewer.
    """
    if in_order:
        if count > len(lengths):
            raise ConfigError(f"{count} requests were asked for, but {lengths.source} has {len(lengths)}")
        return np.arange(count)
    chances = None if lengths.weights is None else lengths.weights / lengths.weights.sum()
    return rng.choice(len(lengths), count, replace=count > len(lengths) or chances is not None, p=chances)


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """How prompts are made: of random tokens, so that no cache finds them but where that is wanted.

    Attributes:
      vocab_size: ids are in [first_id, vocab_size).
      first_id: past the special tokens, which stand first in most vocabularies.
      shared_tokens: so many tokens at the beginning are the same in all prompts.
      tokenizer: makes text of them; `None`: prompts are token ids.
    """

    vocab_size: int
    first_id: int = 3
    shared_tokens: int = 0
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.first_id < self.vocab_size:
            raise ConfigError(f"the first token id is {self.first_id}, expected one below {self.vocab_size}")
        if self.shared_tokens < 0:
            raise ConfigError(f"the shared prefix is {self.shared_tokens} tokens, expected 0 or more")

    def make(self, num_tokens: int, seed: int, index: int) -> list[int] | str:
        """Request `index`'s prompt; the same seed gives the same prompts."""
        shared = min(self.shared_tokens, num_tokens)
        head = np.random.default_rng([seed, 0]).integers(self.first_id, self.vocab_size, shared)
        own = np.random.default_rng([seed, 1, index])
        tail = own.integers(self.first_id, self.vocab_size, num_tokens - shared)
        ids = [*head.tolist(), *tail.tolist()]
        return ids if self.tokenizer is None else self._text(self.tokenizer, ids, own)

    def _text(self, tokenizer: Tokenizer, ids: list[int], rng: np.random.Generator) -> str:
        """Text of as many tokens, nearly always: tokens that become text seldom come back as the same ones."""
        wanted, text = len(ids), tokenizer.decode(ids)
        for _ in range(_TRIES):
            count = len(tokenizer.encode(text, add_special_tokens=False))
            if count == wanted:
                break
            if count > wanted:
                text = text[: min(len(text) * wanted // count + 1, len(text) - 1)]
            else:
                letters = rng.integers(0, 26, max((wanted - count) // 2, 1))
                text += "".join(f" {chr(97 + letter)}" for letter in letters)
        return text


def make_work(
    lengths: Lengths,
    rows: Sequence[int] | np.ndarray,
    prompts: Prompts,
    *,
    endpoint: Endpoint,
    model: str,
    stream: bool,
    seed: int,
    due_s: np.ndarray | None = None,
    extra: dict[str, Any] | None = None,
) -> list[Work]:
    """The requests.

    Args:
      lengths, rows: how long they are; outputs of 0 tokens become 1.
      prompts: how prompts are made.
      endpoint: chats need text.
      model: the name that the server knows.
      stream: answers come as they grow, with usage at the end.
      seed: of the prompts.
      due_s: when they arrive, f64[rows]; `None`: when a place is free.
      extra: parameters that are added to each, or change it; `None` takes one out.

    Raises:
      ConfigError: a chat without a tokenizer.
    """
    if endpoint == "chat" and prompts.tokenizer is None:
        raise ConfigError("chats need text; say which tokenizer makes it (--tokenizer)")
    works = []
    for index, row in enumerate(rows):
        num_prompt, num_output = int(lengths.prompt_tokens[row]), max(int(lengths.output_tokens[row]), 1)
        prompt = prompts.make(num_prompt, seed, index)
        body: dict[str, Any] = {"model": model, "temperature": 0.0, "ignore_eos": True, "max_tokens": num_output}
        if endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        body = {name: value for name, value in (body | (extra or {})).items() if value is not None}
        data = json.dumps(body, separators=(",", ":")).encode()
        works.append(Work(index, data, num_prompt, num_output, None if due_s is None else float(due_s[index])))
    return works
