"""`Conversation`: the turns of a chat, kept short enough for the context window."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jpaged.errors import RequestError


class _ChatEncoder(Protocol):
    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...


class Conversation:
    """What was said, oldest first. Questions and answers alternate; a system message, if any, stands before them.

    Args:
      encoder: turns messages into tokens, such as a `Tokenizer`.
      max_prompt_tokens: what all turns and the question may take together; older turns are dropped beyond it.
      system: a system message that is never dropped; `None`: the template's own, if it has one.
    """

    def __init__(self, encoder: _ChatEncoder, *, max_prompt_tokens: int, system: str | None = None):
        self._encoder = encoder
        self._max_prompt_tokens = max_prompt_tokens
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """System message and turns, as they are given to the template."""
        return [*self._system, *self._turns]

    def ask(self, question: str) -> tuple[list[int], int]:
        """Adds a question; `answer` or `retract` must follow.

        Returns:
          The prompt's tokens, and how many of the oldest messages had to be dropped for good. A question that is too
          long alone is given as it is, for the engine to refuse.

        Raises:
          RequestError: the template refuses the messages; the question is not kept.
        """
        self._turns.append({"role": "user", "content": question})
        dropped = 0
        try:
            token_ids = self._encoder.encode_chat(self.messages)
            while len(token_ids) > self._max_prompt_tokens and dropped + 1 < len(self._turns):
                dropped += 2  # a question and its answer, so that the roles still alternate
                token_ids = self._encoder.encode_chat([*self._system, *self._turns[dropped:]])
        except RequestError:
            self.retract()
            raise
        del self._turns[:dropped]
        return token_ids, dropped

    def answer(self, text: str) -> None:
        """Keeps the answer to the last question, whole or broken off."""
        self._turns.append({"role": "assistant", "content": text})

    def retract(self) -> None:
        """Forgets the last question, which has no answer."""
        self._turns.pop()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._turns.clear()
