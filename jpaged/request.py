"""What was asked (`SamplingParams`, `Request`), what the engine knows (`Sequence`), what is given back (`Output`)."""

import enum
import math
import numbers
import time
from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import Literal

from jpaged.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]


def _number(name: str, value: object) -> float:
    try:
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an integer that no float can hold
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(f"{name} is {value!r}, expected a finite number")
    return number


def _integer(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise RequestError(f"{name} is {value!r}, expected an integer of at least {least}")
    return int(value)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Names and ranges are those of vLLM and the OpenAI API.

    Attributes:
      temperature: 0 is greedy; else logits are divided by it. In [0, 2].
      top_k: keep the k likeliest tokens; 0 or -1 keeps all.
      top_p: keep the smallest set of likeliest tokens whose probability reaches top_p. In (0, 1].
      min_p: drop tokens less likely than min_p times the likeliest. In [0, 1].
      repetition_penalty: > 1 makes tokens of prompt and output less likely (multiplicative, as in CTRL).
      presence_penalty: subtracted once from the logit of each token of the output. In [-2, 2].
      frequency_penalty: subtracted for each occurrence in the output. In [-2, 2].
      logit_bias: token id -> value in [-100, 100], added to the logit; at most 300 entries.
      seed: the sampled tokens depend on it and on the position only, never on the batch. `None`: drawn by the engine.
      max_tokens: output tokens at the most; `None`: up to the context limit. 0 only with `prompt_logprobs`.
      min_tokens: end-of-sequence and stop token ids cannot be sampled before so many output tokens.
      stop: strings that end the output; they are cut off unless `include_stop_str_in_output`. They are looked for in
        the text that is certain: where a vocabulary spells text by single bytes, that may be one token later.
      stop_token_ids: token ids that end the output, beside the model's own end-of-sequence ids.
      ignore_eos: do not end at the model's own end-of-sequence ids.
      logprobs: give the log-probability of each sampled token and of the n likeliest; `None`: none. They are of the
        model's raw distribution, before temperature, penalties and bias.
      prompt_logprobs: likewise for the prompt's tokens.
      skip_special_tokens: leave special tokens out of the text.

    Raises:
      RequestError: a value is out of range; the message names it.

    Example:
      >>> SamplingParams(temperature=0.7, top_p=0.9, max_tokens=32).top_p
      0.9
      >>> SamplingParams(top_p=0.0)
      Traceback (most recent call last):
      ...
      jpaged.errors.RequestError: top_p is 0.0, expected a number in (0, 1]
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 128
    min_tokens: int = 0
    stop: str | AbstractSequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: AbstractSequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lengths()
        self._check_stops()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}, expected True or False")

    def _set(self, name: str, value: object) -> None:
        """Stores the plain Python number of what may have been a numpy one."""
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        ranges = {
            "temperature": (0.0, 2.0),
            "min_p": (0.0, 1.0),
            "presence_penalty": (-2.0, 2.0),
            "frequency_penalty": (-2.0, 2.0),
        }
        for name, (low, high) in ranges.items():
            value = _number(name, getattr(self, name))
            if not low <= value <= high:
                raise RequestError(f"{name} is {value}, expected a number in [{low:g}, {high:g}]")
            self._set(name, value)
        self._set("top_p", _number("top_p", self.top_p))
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}, expected a number in (0, 1]")
        self._set("repetition_penalty", _number("repetition_penalty", self.repetition_penalty))
        if not 0.01 <= self.repetition_penalty <= 100:
            raise RequestError(f"repetition_penalty is {self.repetition_penalty}, expected a number in [0.01, 100]")
        self._set("top_k", _integer("top_k", self.top_k, -1))
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > 300:
            raise RequestError("logit_bias must be a mapping from token id to number with at most 300 entries")
        bias = {}  # a copy: the caller may go on to change theirs
        for token, value in self.logit_bias.items():
            token, number = _integer("a key of logit_bias", token, 0), _number(f"logit_bias[{token}]", value)
            if not -100 <= number <= 100:
                raise RequestError(f"logit_bias[{token}] is {value}, expected a number in [-100, 100]")
            bias[token] = number
        self._set("logit_bias", bias)
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, 0))
            if self.seed >= 2**63:
                raise RequestError(f"seed is {self.seed}, expected an integer in [0, 2**63)")

    def _check_lengths(self) -> None:
        least = 0 if self.prompt_logprobs is not None else 1
        for name, smallest in (("logprobs", 0), ("prompt_logprobs", 0), ("max_tokens", least), ("min_tokens", 0)):
            value = getattr(self, name)
            if value is not None or name == "min_tokens":
                self._set(name, _integer(name, value, smallest))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, expected at most max_tokens ({self.max_tokens})")

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, AbstractSequence) or len(stop) > 64:
            raise RequestError("stop must be a string or a list of at most 64 strings")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop holds {text!r}, expected non-empty strings")
        self._set("stop", tuple(stop))
        texts = str | bytes | bytearray | memoryview  # sequences whose items are no token ids
        if isinstance(self.stop_token_ids, texts) or not isinstance(self.stop_token_ids, AbstractSequence):
            raise RequestError(f"stop_token_ids is {self.stop_token_ids!r}, expected a list of token ids")
        if len(self.stop_token_ids) > 64:
            raise RequestError(f"stop_token_ids has {len(self.stop_token_ids)} entries, expected at most 64")
        for token in self.stop_token_ids:
            _integer("an entry of stop_token_ids", token, 0)
        self._set("stop_token_ids", tuple(int(t) for t in self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def uses_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to continue it. Immutable.

    Attributes:
      request_id: unique among the requests that the engine holds.
      prompt_token_ids: the prompt, at least one token.
      params: how to sample and when to stop.
      seed: the seed in force (`params.seed`, or one that the engine drew).
      arrival_time_s: monotonic clock at arrival.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    arrival_time_s: float = field(default_factory=time.monotonic)


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the model's raw distribution.

    Attributes:
      token_id: the token that stands there.
      logprob: its log-probability.
      top: (token id, log-probability) of the likeliest tokens, best first; as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Sequence:
    """What the engine knows of a request while it holds it. Mutable; the scheduler owns it.

    Token ranges, all half-open:
      [0, num_prompt_tokens)                   the prompt
      [num_prompt_tokens, len(tokens))         output that the host has read
      [len(tokens), num_tokens)                output that steps in flight have sampled (`num_pending`)
      [0, num_computed_tokens)                 tokens whose KV is written, by steps that ran or are in flight
    """

    request: Request
    tokens: list[int] = field(init=False)
    num_pending: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    state_index: int | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that were sampled, read or not."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Output tokens that the host has read."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED


@dataclass(frozen=True, kw_only=True)
class Output:
    """The answer to one request, whole or so far.

    Attributes:
      request_id: as given.
      prompt: the prompt's text, or `None` if token ids were given.
      prompt_token_ids: the prompt's tokens.
      text: the output's text so far; stop strings are cut off.
      token_ids: the output's tokens so far, the ending stop token included.
      finish_reason: "stop", "length", "abort" or "error"; `None` while it runs.
      stop_reason: the stop string or token id that ended it; `None` for the model's end-of-sequence id.
      logprobs: one entry a token of `token_ids`, if asked for.
      prompt_logprobs: one entry a token of the prompt, `None` for its first token, if asked for.
      num_cached_tokens: prompt tokens whose KV was found in a prefix cache; 0 in this version, which has none.
      num_preemptions: how often it lost its pages and was recomputed.
      error: what went wrong, with finish_reason "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
