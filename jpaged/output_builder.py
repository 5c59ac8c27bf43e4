"""`OutputBuilder`: one request's tokens -> text, stop strings, log-probabilities -> `Output`."""

from jpaged.errors import RequestError
from jpaged.incremental_decoder import IncrementalDecoder
from jpaged.request import Output, Sequence, TokenLogprobs
from jpaged.tokenizer import Tokenizer


class OutputBuilder:
    """Collects what one sequence produces.

    The text is held back where it could still become a stop string, so that text once given out is never taken back:

      [0, _visible_end)         may be given out
      [_visible_end, len(text)) is a prefix of some stop string

    Args:
      seq: the sequence.
      prompt: its prompt's text, if it came as text.
      tokenizer: `None`: no text is made, and stop strings are refused before.
    """

    def __init__(self, seq: Sequence, prompt: str | None, tokenizer: Tokenizer | None):
        self._seq = seq
        self._prompt = prompt
        params = seq.request.params
        self._stops: tuple[str, ...] = tuple(params.stop)
        self._longest_stop = max((len(stop) for stop in self._stops), default=0)
        self._decoder = IncrementalDecoder(tokenizer, params.skip_special_tokens) if tokenizer else None
        self._text = ""
        self._visible_end = 0
        self._num_tokens = 0
        self._logprobs: list[TokenLogprobs] | None = [] if params.logprobs is not None else None
        wants_prompt = params.prompt_logprobs is not None
        self._prompt_logprobs: dict[int, TokenLogprobs] | None = {} if wants_prompt else None
        self.error: str | None = None

    def set_prompt_logprobs(self, position: int, logprobs: TokenLogprobs) -> None:
        """Of the prompt token at `position`; a preempted prompt is computed again and sets them again."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs[position] = logprobs

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
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs)
        if self._decoder is None or (ends and not self._seq.request.params.include_stop_str_in_output):
            return None
        try:
            piece = self._decoder.add(token_id)
        except RequestError:
            return None  # models pad their vocabulary to round sizes: such an id has no text
        return self._append(piece)

    def finish(self) -> Output:
        """The sequence ended: what was held back becomes visible, half a character included."""
        if self._decoder is not None and not isinstance(self._seq.stop_reason, str):
            stop = self._append(self._decoder.finish())
            if stop is not None and self._seq.finish_reason in ("stop", "length"):
                self._seq.finish_reason, self._seq.stop_reason = "stop", stop
        self._visible_end = len(self._text)
        return self.output()

    def _append(self, piece: str) -> str | None:
        before = len(self._text)
        self._text += piece
        if self._stops and self._num_tokens > self._seq.request.params.min_tokens:
            # A new occurrence must end in the new piece.
            start = max(before - self._longest_stop + 1, 0)
            found = [(at, stop) for stop in self._stops if (at := self._text.find(stop, start)) >= 0]
            if found:
                at, stop = min(found, key=lambda pair: (pair[0], -len(pair[1])))
                keep = at + len(stop) if self._seq.request.params.include_stop_str_in_output else at
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

    def output(self) -> Output:
        """The answer so far; whole once the sequence is finished."""
        seq = self._seq
        return Output(
            request_id=seq.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=seq.request.prompt_token_ids,
            text=self._text[: self._visible_end],
            token_ids=tuple(seq.output_token_ids),
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            prompt_logprobs=self._whole_prompt_logprobs(),
            num_cached_tokens=seq.num_cached_tokens,
            num_preemptions=seq.num_preemptions,
            error=self.error,
        )

    def _whole_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        if self._prompt_logprobs is None:
            return None
        return tuple(map(self._prompt_logprobs.get, range(self._seq.num_prompt_tokens)))
