"""`Intake`: the door. Checks a prompt and its parameters and makes a `Request`, or refuses it and says why."""

import itertools
import math
import numbers
import random
import time
from array import array
from collections.abc import Container, Iterable, Mapping, Set
from collections.abc import Sequence as AbstractSequence
from typing import Literal

from jpaged.config import MAX_BANNED_IDS
from jpaged.errors import RequestError
from jpaged.grammar import require_llguidance
from jpaged.request import Request, SamplingParams
from jpaged.tokenizer import Tokenizer


class Intake:
    """Makes requests. What needs the scheduler (lengths, duplicate ids) is checked there.

    Args:
      vocab_size: token ids are in [0, vocab_size).
      max_logprobs: entries of top-logprobs that a request may ask for.
      eos_token_ids: the model's end-of-sequence ids, which `min_tokens` bans too.
      tokenizer: `None`: token ids only, no stop strings.
      seed: of the seeds given to requests that bring none.
      priorities: requests may bring priorities.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_logprobs: int,
        eos_token_ids: Iterable[int],
        tokenizer: Tokenizer | None,
        seed: int,
        priorities: bool = False,
    ):
        self._vocab_size = vocab_size
        self._max_logprobs = max_logprobs
        self._eos_token_ids = frozenset(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._tokenizer = tokenizer
        self._priorities = priorities
        self._ids = itertools.count()
        self._seeds = random.Random(seed)

    def request(
        self,
        prompt: str | AbstractSequence[int],
        params: SamplingParams | None,
        request_id: str | None,
        live_ids: Container[str],
        *,
        stream: bool | Literal["deltas"] = False,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_s: float | None = None,
        pin: bool = False,
    ) -> Request:
        """The request, checked.

        Args:
          prompt: text or token ids.
          params: `None`: `SamplingParams()`.
          request_id: `None`: one is made up that is not in `live_ids`.
          live_ids: ids of the requests that the engine holds.
          stream: whether the answers are given as they grow.
          priority, cache_salt, pin: see `Request`.
          arrival_s: its `arrival_time_s`; `None`: now.

        Raises:
          RequestError: the prompt or a parameter is refused; the message names it.
        """
        params = SamplingParams() if params is None else params
        self._check_params(params)
        if stream and (params.use_beam_search or params.num_sequences > params.n):
            raise RequestError("beam search and best_of cannot stream: which answers are given is known at their end")
        if not isinstance(stream, bool) and stream != "deltas":
            raise RequestError(f'stream is {stream!r:.40}, expected True, False or "deltas"')
        if isinstance(priority, bool) or not isinstance(priority, numbers.Integral):
            raise RequestError(f"priority is {priority!r:.40}, expected an integer")
        if not -(2**31) <= priority < 2**31:
            raise RequestError("priority is out of range, expected an integer in [-2**31, 2**31)")
        if priority and not self._priorities:
            raise RequestError(f'priority is {priority}, but this engine serves in order of arrival (policy "fcfs")')
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise RequestError(f"cache_salt is {cache_salt!r:.40}, expected a non-empty string or None")
        if arrival_s is not None and not (isinstance(arrival_s, numbers.Real) and math.isfinite(arrival_s)):
            raise RequestError(f"arrival_s is {arrival_s!r:.40}, expected seconds of time.monotonic(), or None")
        token_ids = self._encode(prompt) if isinstance(prompt, str) else self._token_ids(prompt)
        if request_id is None:
            request_id = next(name for name in map(str, self._ids) if name not in live_ids)
        else:
            checked_name("request_id", request_id)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        return Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            seed=seed,
            priority=int(priority),
            cache_salt=cache_salt,
            pin=pin,
            arrival_time_s=time.monotonic() if arrival_s is None else arrival_s,
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        if self._tokenizer is None:
            raise RequestError("the prompt is text, but this engine has no tokenizer; give token ids")
        if not text:
            raise RequestError("the prompt is empty; expected at least one character")
        token_ids = tuple(self._tokenizer.encode(text))
        # A tokenizer may know more tokens than the model has embeddings for (added tokens of another checkpoint).
        self._check_in_vocabulary("the tokenized prompt", token_ids)
        return token_ids

    def _token_ids(self, prompt: AbstractSequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, array) and prompt.typecode == "q":  # from a client: integers, and perhaps very many
            return self._checked(tuple(prompt))
        # What has integers in it, and no order or another meaning.
        refused = isinstance(prompt, bytes | bytearray | memoryview | Mapping | Set)
        try:
            token_ids = tuple(t.__index__() for t in prompt if not isinstance(t, bool))
            whole = len(token_ids) == len(prompt)
        except (TypeError, AttributeError):
            whole, token_ids = False, ()
        if refused or not whole:
            raise RequestError(f"a prompt must be text or a list of token ids, got {_kind(prompt)}")
        return self._checked(token_ids)

    def _checked(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        if not token_ids:
            raise RequestError("the prompt is empty; expected at least one token id")
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            self._check_in_vocabulary("the prompt", token_ids)
        return token_ids

    def _check_in_vocabulary(self, what: str, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            if not 0 <= token < self._vocab_size:
                raise RequestError(f"{what} holds token id {token}, the vocabulary is [0, {self._vocab_size})")

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is {params!r:.80}, expected SamplingParams")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self._max_logprobs:
                raise RequestError(f"{name} is {value}, this engine gives at most {self._max_logprobs} (max_logprobs)")
        if params.use_beam_search:
            self._check_beam_search(params)
        self._check_in_vocabulary("logit_bias", params.logit_bias)
        self._check_in_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_in_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        if params.structured is not None:
            self._check_structured()
        banned = self._eos_token_ids | set(params.stop_token_ids) if params.bans_stops else ()
        if len(banned) > MAX_BANNED_IDS:
            raise RequestError(
                f"min_tokens bans {len(banned)} end-of-sequence and stop token ids until then, expected at most "
                f"{MAX_BANNED_IDS}; name fewer stop_token_ids, or leave min_tokens out"
            )
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, this engine has none; use stop_token_ids")

    def _check_structured(self) -> None:
        require_llguidance()
        if self._tokenizer is None:
            raise RequestError("structured outputs need a tokenizer, this engine has none: its tokens have no text")
        if self._tokenizer.decode_plan.kind == "words":
            raise RequestError("structured outputs need tokens that are text; those of this vocabulary are whole words")
        if not self._eos_token_ids:
            raise RequestError(
                "structured outputs end with an end-of-sequence id, this engine has none; give it some (eos_token_ids)"
            )

    def _check_beam_search(self, params: SamplingParams) -> None:
        stops = set(params.stop_token_ids) if params.ignore_eos else self._eos_token_ids | set(params.stop_token_ids)
        # As `BeamSearch.num_candidates`: so many that enough are left when all stop ids are among them.
        needed = max(2, 1 + len(stops)) * params.num_sequences
        if needed > self._max_logprobs:
            raise RequestError(
                f"a beam search of width {params.num_sequences} with {len(stops)} stop token ids looks at the {needed} "
                f"likeliest tokens of a beam, this engine gives at most {self._max_logprobs}: raise max_logprobs"
            )


def checked_name(what: str, name: object) -> str:
    """The name of a request or of a pinned prefix; raises RequestError if it cannot be one.

    Example:
      >>> checked_name("request_id", "a")
      'a'
    """
    if not isinstance(name, str) or not name:
        raise RequestError(f"{what} is {name!r:.80}, expected a non-empty string")
    return name


def _kind(prompt: object) -> str:
    """What a prompt is, without a word of what it says."""
    name = type(prompt).__name__
    items = prompt if isinstance(prompt, AbstractSequence) and not isinstance(prompt, bytes | bytearray) else ()
    kinds = {type(item).__name__ for item in items} - {"int"}
    return f"{name} with {', '.join(sorted(kinds)[:3])}" if kinds else name
