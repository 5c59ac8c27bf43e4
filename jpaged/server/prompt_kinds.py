"""The two kinds of prompts: text or token ids, and conversations. What they hold is never repeated in an error."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from jpaged.server.api_error import shown
from jpaged.server.kinds import Refused, Text

_TEXT: Final = Text(secret=True)
_MAX_MESSAGES: Final = 4096


@dataclass(frozen=True)
class Prompt:
    """A string, a list of strings, a list of token ids, or a list of such lists.

    Attributes:
      vocab_size: token ids are in [0, vocab_size).
      most: prompts in one request.

    Example:
      >>> Prompt(vocab_size=10, most=2).read([1, 2]), Prompt(vocab_size=10, most=2).read(["a", "b"])
      (([1, 2],), ('a', 'b'))
    """

    vocab_size: int
    most: int

    def read(self, value: Any) -> tuple[str | list[int], ...]:
        """One entry a prompt."""
        if isinstance(value, str):
            return (self._text(value, ""),)
        if not isinstance(value, list):
            raise Refused("", _kind_of(value), "text, token ids, or a list of either")
        if not value:
            raise Refused("", "empty", "at least one prompt or token id")
        if isinstance(value[0], int | float):
            return (self._tokens(value, ""),)
        if len(value) > self.most:
            raise Refused("", f"a list of {len(value)}", f"at most {self.most} prompts")
        wants_text = isinstance(value[0], str)
        prompts: list[str | list[int]] = []
        for index, prompt in enumerate(value):
            place = f"[{index}]"
            if isinstance(prompt, str) != wants_text or not isinstance(prompt, str | list):
                raise Refused(place, _kind_of(prompt), "only strings, or only lists of token ids")
            prompts.append(self._text(prompt, place) if isinstance(prompt, str) else self._tokens(prompt, place))
        return tuple(prompts)

    def _text(self, prompt: str, place: str) -> str:
        if not prompt:
            raise Refused(place, "empty", "at least one character")
        try:
            return _TEXT.read(prompt)
        except Refused as error:
            raise error.inside(place) from None

    def _tokens(self, prompt: list[Any], place: str) -> list[int]:
        if not prompt:
            raise Refused(place, "empty", "at least one token id")
        # Two passes in C for what may be millions of entries; the third is only for the message.
        if {int} != set(map(type, prompt)) or min(prompt) < 0 or max(prompt) >= self.vocab_size:
            prompt = [int(token) if isinstance(token, float) and token.is_integer() else token for token in prompt]
            for index, token in enumerate(prompt):
                if type(token) is not int or not 0 <= token < self.vocab_size:
                    got = shown(token) if isinstance(token, int) else _kind_of(token)
                    raise Refused(f"{place}[{index}]", got, f"token ids in [0, {self.vocab_size})")
        return prompt

    def schema(self) -> dict[str, Any]:
        text = {"type": "string", "minLength": 1}
        token = {"type": "integer", "minimum": 0, "maximum": self.vocab_size - 1}
        tokens = {"type": "array", "items": token, "minItems": 1}
        many = {"type": "array", "minItems": 1, "maxItems": self.most}
        return {"anyOf": [text, tokens, {**many, "items": text}, {**many, "items": tokens}]}


@dataclass(frozen=True)
class Messages:
    """A conversation. Beside role and content, a message may hold whatever its template uses."""

    def read(self, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, list) or not 1 <= len(value) <= _MAX_MESSAGES:
            got = f"a list of {len(value)}" if isinstance(value, list) else _kind_of(value)
            raise Refused("", got, f"a list of 1 to {_MAX_MESSAGES} messages")
        for index, message in enumerate(value):
            place = f"[{index}]"
            if not isinstance(message, dict):
                raise Refused(place, _kind_of(message), "an object with role and content")
            role = message.get("role")
            if not isinstance(role, str) or not 1 <= len(role) <= 64:
                raise Refused(f"{place}.role", _kind_of(role), "a string such as 'user'")
            content = message.get("content")
            if content is None and message.get("tool_calls"):
                continue
            try:
                self._check_content(content)
            except Refused as error:
                raise error.inside(f"{place}.content") from None
        return value

    @staticmethod
    def _check_content(content: Any) -> None:
        if isinstance(content, str):
            _TEXT.read(content)
            return
        if not isinstance(content, list):
            raise Refused("", _kind_of(content), "a string or a list of text parts")
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
                got = f"a part of type {shown(kind)}" if isinstance(kind, str) else _kind_of(part)
                raise Refused(f"[{index}]", got, '{"type": "text", "text": ...}: this model reads text only')
            _TEXT.read(part["text"])

    def schema(self) -> dict[str, Any]:
        part = {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            "required": ["type", "text"],
        }
        content = {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}
        message = {
            "type": "object",
            "properties": {"role": {"type": "string", "minLength": 1, "maxLength": 64}, "content": content},
            "required": ["role", "content"],
        }
        calls = {
            "type": "object",
            "properties": {"content": {"type": "null"}, "tool_calls": {"type": "array", "minItems": 1}},
        }
        calls["properties"]["role"] = message["properties"]["role"]
        calls["required"] = ["role", "tool_calls"]
        return {"type": "array", "items": {"anyOf": [message, calls]}, "minItems": 1, "maxItems": _MAX_MESSAGES}


def _kind_of(value: Any) -> str:
    """What a secret value is, without what it says."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), "another kind of value")
