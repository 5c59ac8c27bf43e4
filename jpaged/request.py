"""What is asked (`SamplingParams`, `Request`) and what is given back (`Output`)."""

import math
import numbers
import time
from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import Literal

from jpaged.config import MAX_BIAS_IDS
from jpaged.errors import RequestError
from jpaged.structured import StructuredOutput
from jpaged.timing import RequestTiming

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


def _token_ids(name: str, values: object, most: int) -> tuple[int, ...]:
    texts = str | bytes | bytearray | memoryview  # sequences whose items are no token ids
    if isinstance(values, texts) or not isinstance(values, AbstractSequence):
        raise RequestError(f"{name} is {values!r:.80}, expected a list of token ids")
    if len(values) > most:
        raise RequestError(f"{name} has {len(values)} entries, expected at most {most}")
    return tuple(_integer(f"an entry of {name}", token, 0) for token in values)


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
      max_tokens: output tokens at the most; `None`: up to the context limit. 0 computes the prompt
        and samples nothing.
      min_tokens: end-of-sequence and stop token ids cannot be sampled before so many output tokens.
      stop: strings that end the output; they are cut off unless `include_stop_str_in_output`. They are looked for in
        the text that is certain: where a vocabulary spells text by single bytes, that may be one token later.
      stop_token_ids: token ids that end the output, beside the model's own end-of-sequence ids.
      ignore_eos: do not end at the model's own end-of-sequence ids.
      logprobs: give the log-probability of each sampled token and of the n likeliest; `None`: none. They are of the
        model's raw distribution, before temperature, penalties and bias.
      prompt_logprobs: likewise for the prompt's tokens.
      skip_special_tokens: leave special tokens out of the text.
      n: answers to give. They share the pages of the prompt, and each samples with a seed of its own (`seed` + its
        index).
      best_of: answers to sample, of which the n with the highest mean log-probability are given. `None`: n.
      use_beam_search: search for the n likeliest answers with `best_of` beams instead of sampling, as Hugging Face does
        with `num_beams`; needs temperature 0 and none of the other ways to change probabilities.
      length_penalty: beam search divides an answer's log-probability by its length to this power.
      allowed_token_ids: token ids that alone can be sampled; `None`: all. Name an end-of-sequence id too where the
        output shall be able to end.
      structured: the form that the output must have: a JSON schema, a regex, a choice or a grammar. It ends with "stop"
        where that is complete. `min_tokens`, `ignore_eos` and `stop_token_ids` then hold back the end only as long as
        the form allows something else; a stop token id that the form does not allow cannot come. A form that llguidance
        refuses ends the request with "error"; `jpaged.grammar.check_grammar` tells before.
      early_stopping: when a beam search ends: True, as soon as enough answers ended; False, when a heuristic says that
        no running beam will do better; "never", when none possibly can.

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
    allowed_token_ids: AbstractSequence[int] | None = None
    structured: StructuredOutput | None = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lengths()
        self._check_stops()
        self._check_masks()
        self._check_answers()
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
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MAX_BIAS_IDS:
            raise RequestError(
                f"logit_bias must be a mapping from token id to number with at most {MAX_BIAS_IDS} entries"
            )
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
        for name in ("logprobs", "prompt_logprobs", "max_tokens", "min_tokens"):
            value = getattr(self, name)
            if value is not None or name == "min_tokens":
                self._set(name, _integer(name, value, 0))
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
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids, most=64))

    def _check_masks(self) -> None:
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids, most=2**20))
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty, expected at least one token id, or None for all")
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise RequestError(f"structured is {self.structured!r:.80}, expected StructuredOutput or None")

    def _check_answers(self) -> None:
        self._set("n", _integer("n", self.n, 1))
        if self.best_of is not None:
            self._set("best_of", _integer("best_of", self.best_of, self.n))
        self._set("length_penalty", _number("length_penalty", self.length_penalty))
        if not isinstance(self.use_beam_search, bool):
            raise RequestError(f"use_beam_search is {self.use_beam_search!r}, expected True or False")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError(f'early_stopping is {self.early_stopping!r}, expected True, False or "never"')
        if self.max_tokens == 0 and self.num_sequences > 1:
            raise RequestError(
                f"n or best_of is {self.num_sequences} with max_tokens 0, expected 1: nothing is sampled"
            )
        if self.use_beam_search:
            self._check_beam_search()
            return
        for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(self, name) != default:
                raise RequestError(f"{name} is {getattr(self, name)!r} without use_beam_search, which alone reads it")
        if self.greedy and self.num_sequences > 1:
            raise RequestError(
                f"n or best_of is {self.num_sequences} with temperature 0, expected 1: all answers would be the same; "
                "raise the temperature, or set use_beam_search"
            )

    def _check_beam_search(self) -> None:
        if self.num_sequences < 2:
            raise RequestError("use_beam_search with one beam, expected best_of (or n) of at least 2")
        expected = {"temperature": 0.0, "top_k": (0, -1), "top_p": 1.0, "min_p": 0.0, "uses_penalties": False}
        for name, wanted in expected.items():
            if getattr(self, name) not in (wanted if isinstance(wanted, tuple) else (wanted,)):
                what = "a penalty is set" if name == "uses_penalties" else f"{name} is {getattr(self, name)}"
                raise RequestError(
                    f"{what} with use_beam_search, which follows the model's raw probabilities; leave it out"
                )
        for name in ("logit_bias", "stop", "allowed_token_ids", "structured"):
            if getattr(self, name):
                raise RequestError(f"{name} is set with use_beam_search, which does not support it; leave it out")
        if self.logprobs is not None:
            raise RequestError("logprobs are not given with use_beam_search; each answer has its cumulative_logprob")

    @property
    def num_sequences(self) -> int:
        """Sequences that run for a request: samples or beams."""
        return self.n if self.best_of is None else self.best_of

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def uses_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def bans_stops(self) -> bool:
        """Whether stop tokens are banned before `min_tokens`. Where the output has a form, its masks see to that."""
        return self.min_tokens > 0 and self.structured is None

    def may_stop(self, num_tokens: int) -> bool:
        """Whether an output may stop with its token number `num_tokens`, counted from 1: not before `min_tokens`."""
        return num_tokens > self.min_tokens


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to continue it. Immutable.

    Attributes:
      request_id: unique among the requests that the engine holds.
      prompt_token_ids: the prompt, at least one token.
      params: how to sample and when to stop.
      seed: the seed in force (`params.seed`, or one that the engine drew).
      priority: lower comes first, where the scheduler's policy is "priority".
      cache_salt: cached pages are shared only between requests with the same salt.
      pin: keep the prompt's pages when the request ends (`Engine.pin_prefix`).
      arrival_time_s: monotonic clock at arrival.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    priority: int = 0
    cache_salt: str | None = None
    pin: bool = False
    arrival_time_s: float = field(default_factory=time.monotonic)


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


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer to a request, whole or so far.

    Attributes:
      index: 0, 1, ... among the answers of the request; with `best_of` and beam search the best is first.
      text: the text so far; stop strings are cut off.
      token_ids: the tokens so far, the ending stop token included.
      finish_reason: "stop", "length", "abort" or "error"; `None` while it runs.
      stop_reason: the stop string or token id that ended it; `None` for the model's end-of-sequence id.
      logprobs: one entry a token of `token_ids`, if asked for.
      cumulative_logprob: sum of the tokens' log-probabilities, where they are known: with `logprobs`, `best_of` and
        beam search.
      score: what a beam search ranks by: `cumulative_logprob` over length to the power of `length_penalty`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None


@dataclass(frozen=True, kw_only=True)
class Output:
    """The answer to one request, whole or so far.

    Attributes:
      request_id: as given.
      prompt: the prompt's text, or `None` if token ids were given.
      prompt_token_ids: the prompt's tokens.
      completions: the answers, `n` of them; one, if nothing else was asked for, or if it was aborted or failed before
        there were more. `text`, `token_ids`, `finish_reason`,
        `stop_reason` and `logprobs` are those of the first.
      prompt_logprobs: one entry a token of the prompt, `None` for its first token, if asked for.
      num_cached_tokens: prompt tokens that were not computed for this request, since their KV was found in the prefix
        cache when it began to run. What a preemption makes it compute again does not change it.
      num_preemptions: how often it lost its pages, and got them back from the host or by computing them again.
      error: what went wrong, with finish_reason "error".
      timing: when it came, ran and ended, once it has.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    finished: bool
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None
    timing: RequestTiming | None = field(default=None, compare=False, repr=False)

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.completions[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.completions[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return self.completions[0].logprobs
