"""`TokenTexts`: how single tokens are shown in log-probabilities: as text, and as exact bytes."""

from typing import Final

from jpaged.errors import RequestError
from jpaged.tokenizer import IncrementalDecoder, Tokenizer

_MIN_LOGPROB: Final = -9999.0  # JSON has no -Infinity


class TokenTexts:
    """Looks tokens up, each once.

    Args:
      tokenizer: the model's; `None`: tokens are shown by their ids.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def text(self, token_id: int, *, as_id: bool = False) -> str:
        """The token's text; bytes that are no whole character show as U+FFFD.

        Args:
          as_id: "token_id:ID" instead, which names the token without doubt.
        """
        return f"token_id:{token_id}" if as_id else self._look_up(token_id)[0]

    def bytes(self, token_id: int) -> "bytes":
        """The token's bytes; those of several tokens, joined, are the text's."""
        return self._look_up(token_id)[1]

    def decoder(self, skip_special_tokens: bool) -> IncrementalDecoder | None:
        """Where in a text its tokens begin is told by decoding it once more, token by token."""
        return IncrementalDecoder(self._tokenizer, skip_special_tokens) if self._tokenizer else None

    def _look_up(self, token_id: int) -> tuple[str, "bytes"]:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._made(token_id)
        return found

    def _made(self, token_id: int) -> tuple[str, "bytes"]:
        if self._tokenizer is None:
            return f"token_id:{token_id}", b""
        try:
            spelled = self._tokenizer.id_to_token(token_id)
        except RequestError:  # models pad their vocabulary: such an id has no text
            return "", b""
        plan = self._tokenizer.decode_plan
        data = spelled.encode() if plan.kind == "words" else plan.token_bytes(spelled)
        return data.decode(errors="replace"), data


def finite(logprob: float) -> float:
    """A log-probability that JSON can say.

    Example:
      >>> finite(float("-inf")), finite(-1.5)
      (-9999.0, -1.5)
    """
    return logprob if logprob > _MIN_LOGPROB else _MIN_LOGPROB
