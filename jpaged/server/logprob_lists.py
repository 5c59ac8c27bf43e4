"""Log-probabilities as the two endpoints give them."""

import contextlib
from collections.abc import Sequence
from typing import Any

from jpaged.errors import RequestError
from jpaged.request import TokenLogprobs
from jpaged.server.generation_request import GenerationRequest
from jpaged.server.token_text import TokenTexts, finite


class ChoiceLogprobs:
    """The `logprobs` object of one answer, in pieces as it grows, or whole.

    Args:
      request: what was asked for.
      texts: of tokens.
    """

    def __init__(self, request: GenerationRequest, texts: TokenTexts) -> None:
        self._texts = texts
        self._as_ids = request.names_token_ids
        self._top = request.params.logprobs or 0
        self._add = self._add_chat if request.endpoint == "chat" else self._add_completion
        self._decoder = texts.decoder(request.params.skip_special_tokens) if request.endpoint == "completions" else None
        self._offset = 0
        self._start()

    def _start(self) -> None:
        self._content: list[dict[str, Any]] = []
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> None:
        """The prompt's tokens, for `echo`; the first one has no log-probability."""
        for token_id, entry in zip(token_ids, entries, strict=True):
            self._add(token_id, entry)

    def add(self, entries: Sequence[TokenLogprobs]) -> None:
        """The next tokens of the answer."""
        for entry in entries:
            self._add(entry.token_id, entry)

    def take(self) -> dict[str, Any]:
        """The object for all that was added since the last call."""
        if self._add == self._add_chat:
            taken: dict[str, Any] = {"content": self._content}
        else:
            taken = {
                "tokens": self._tokens,
                "token_logprobs": self._logprobs,
                "top_logprobs": self._tops if self._top else None,
                "text_offset": self._offsets,
            }
        self._start()
        return taken

    def _add_completion(self, token_id: int, entry: TokenLogprobs | None) -> None:
        text = self._texts.text(token_id, as_id=self._as_ids)
        self._tokens.append(text)
        self._offsets.append(self._offset)
        if self._decoder is not None:
            with contextlib.suppress(RequestError):  # an id that has no text: models pad their vocabulary
                self._offset += len(self._decoder.add(token_id))
        if entry is None:
            self._logprobs.append(None)
            self._tops.append(None)
            return
        self._logprobs.append(finite(entry.logprob))
        top: dict[str, float] = {}
        for other, value in entry.top[: self._top]:  # best first: of several that look alike, the best is told
            top.setdefault(self._texts.text(other, as_id=self._as_ids), finite(value))
        top.setdefault(text, finite(entry.logprob))  # the token itself is always among them
        self._tops.append(top)

    def _add_chat(self, token_id: int, entry: TokenLogprobs | None) -> None:
        assert entry is not None  # `echo` is not for chats
        self._content.append(
            {
                **self._named(token_id, entry.logprob),
                "top_logprobs": [self._named(other, value) for other, value in entry.top[: self._top]],
            }
        )

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._texts.text(token_id, as_id=self._as_ids),
            "logprob": finite(logprob),
            "bytes": list(self._texts.bytes(token_id)),
        }


def prompt_logprob_list(
    entries: Sequence[TokenLogprobs | None], texts: TokenTexts, *, top: int
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: for each token of the prompt, token id -> log-probability, rank and text.

    Args:
      entries: of the engine; `None` for the first token.
      texts: of tokens.
      top: likeliest tokens that were asked for. The rank of a token that is not among those known is null.
    """
    found: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            found.append(None)
            continue
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, start=1)}
        values = {entry.token_id: entry.logprob} | dict(entry.top[:top])
        found.append(
            {
                f"{token}": {"logprob": finite(value), "rank": ranks.get(token), "decoded_token": texts.text(token)}
                for token, value in values.items()
            }
        )
    return found
