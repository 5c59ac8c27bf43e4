"""`CompletionBuilder`: one sequence's tokens -> text, stop strings, log-probabilities -> `Completion`."""

import math
from collections.abc import Iterable

from jpaged.delta import Delta
from jpaged.errors import RequestError
from jpaged.incremental_decoder import IncrementalDecoder
from jpaged.request import Completion, TokenLogprobs
from jpaged.sequence import Sequence
from jpaged.tokenizer import Tokenizer


def text_of(decoder: IncrementalDecoder, token_ids: Iterable[int]) -> str:
    """What the next tokens add to a text. Models pad their vocabulary to round sizes: such an id has no text."""
    token_ids = tuple(token_ids)
    try:
        return decoder.add_all(token_ids)
    except RequestError:
        if len(token_ids) == 1:
            return ""
        return "".join(text_of(decoder, (token_id,)) for token_id in token_ids)


class CompletionBuilder:
    """Collects what one sequence produces.

    Each token must be given (`add_token`) where there are stop strings or log-probabilities. Else the tokens are read
    from the sequence, when somebody wants to see the text.

    The text is held back where it could still become a stop string, so that text once given out is never taken back:

      [0, _visible_end)         may be given out
      [_visible_end, len(text)) is a prefix of some stop string

    Args:
      seq: the sequence.
      tokenizer: `None`: no text is made, and stop strings are refused before.
    """

    def __init__(self, seq: Sequence, tokenizer: Tokenizer | None):
        self._seq = seq
        params = seq.request.params
        self._num_prompt_tokens = seq.num_prompt_tokens
        self._stops: tuple[str, ...] = tuple(params.stop)
        self._keeps_stops, self._may_stop = params.include_stop_str_in_output, params.may_stop
        self._longest_stop = max((len(stop) for stop in self._stops), default=0)
        self._decoder = IncrementalDecoder(tokenizer, params.skip_special_tokens) if tokenizer else None
        self._text = ""
        self._visible_end = 0
        self._num_tokens = 0
        self._logprobs: list[TokenLogprobs] | None = [] if params.logprobs is not None else None
        self._cumulative_logprob: float | None = 0.0
        self._num_tokens_given, self._text_given, self._end_given = 0, 0, False  # in deltas

    def add_token(self, token_id: int, logprobs: TokenLogprobs | None, *, ends: bool) -> str | None:
        """Takes the next output token.

        Args:
          token_id: the token.
          logprobs: its log-probabilities, if asked for.
          ends: it is an end-of-sequence or stop token; it shows in the text only with `include_stop_str_in_output`.

        Returns:
          The stop string that the text now ends at, or `None`.
        """
        self._num_tokens += 1
        if logprobs is None:
            self._cumulative_logprob = None
        elif self._cumulative_logprob is not None:
            self._cumulative_logprob += logprobs.logprob
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs)
        if self._decoder is None or (ends and not self._keeps_stops):
            return None
        try:
            piece = self._decoder.add(token_id)
        except RequestError:
            return None  # as in `text_of`
        return self._append(piece)

    @property
    def mean_logprob(self) -> float:
        """Of the tokens so far; -inf where there is none, or where they are not known."""
        known = self._num_tokens > 0 and self._cumulative_logprob is not None
        return self._cumulative_logprob / self._num_tokens if known else -math.inf  # type: ignore[operator]

    def finish(self) -> None:
        """The sequence ended: what was held back becomes visible, half a character included."""
        self._read()
        if self._decoder is not None and not isinstance(self._seq.stop_reason, str):
            stop = self._append(self._decoder.finish())
            if stop is not None and self._seq.finish_reason in ("stop", "length"):
                self._seq.finish_reason, self._seq.stop_reason = "stop", stop
        self._visible_end = len(self._text)

    def _read(self) -> None:
        """Takes the output tokens that it was not given."""
        tokens, first = self._seq.tokens, self._num_prompt_tokens + self._num_tokens
        if first >= len(tokens) or self._stops:
            return
        self._num_tokens = len(tokens) - self._num_prompt_tokens
        self._cumulative_logprob = None
        if self._decoder is not None:
            ends = self._seq.finish_reason == "stop" and not self._keeps_stops
            self._text += text_of(self._decoder, tokens[first:-1] if ends else tokens[first:])
            self._visible_end = len(self._text)

    def _append(self, piece: str) -> str | None:
        before = len(self._text)
        self._text += piece
        if not self._stops:
            self._visible_end = before + len(piece)
            return None
        if self._may_stop(self._num_tokens):
            # A new occurrence must end in the new piece.
            start = max(before - self._longest_stop + 1, 0)
            found = [(at, stop) for stop in self._stops if (at := self._text.find(stop, start)) >= 0]
            if found:
                at, stop = min(found, key=lambda pair: (pair[0], -len(pair[1])))
                keep = at + len(stop) if self._keeps_stops else at
                self._text = self._text[:keep]
                self._visible_end = keep
                return stop
        self._visible_end = max(self._visible_end, len(self._text) - self._held_back())
        return None

    def _held_back(self) -> int:
        """Length of the longest tail of the text that begins a stop string."""
        for length in range(min(self._longest_stop - 1, len(self._text)), 0, -1):
            tail = self._text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

    def completion(self, index: int) -> Completion:
        """The answer so far; whole once the sequence is finished.

        Args:
          index: its place among the answers to the request.
        """
        seq = self._seq
        self._read()
        return Completion(
            index=index,
            text=self._text[: self._visible_end],
            token_ids=tuple(seq.output_token_ids),
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            cumulative_logprob=self._cumulative_logprob if self._num_tokens else None,
        )

    def delta(self, index: int) -> Delta | None:
        """What became known since the last call; `None` if nothing did.

        Args:
          index: its place among the answers to the request.
        """
        seq, given, reason = self._seq, self._num_tokens_given, self._seq.finish_reason
        token_ids = tuple(seq.tokens[self._num_prompt_tokens + given :])
        if not token_ids and (reason is None or self._end_given):
            return None
        self._read()
        text = self._text[self._text_given : self._visible_end]
        logprobs = None if self._logprobs is None else tuple(self._logprobs[given:])
        self._num_tokens_given = given + len(token_ids)
        self._text_given, self._end_given = self._visible_end, reason is not None
        return Delta(index, text, token_ids, logprobs, reason, seq.stop_reason)
