"""`StructuredOutput`: the form that an output must have. What it says is checked here, what it means in `grammar`."""

import json
from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from jpaged.errors import RequestError

MAX_TEXT_BYTES: Final = 64 * 1024  # of a schema, a regex, a grammar, or all choices together
MAX_CHOICES: Final = 1024

# How the errors of requests begin that were taken and cannot be served: the server tells whose fault it is by these.
FORM_REFUSED: Final = "structured"  # and a field: the form is wrong
DEAD_END: Final = "the form cannot be continued with any token that is allowed, and is not complete"
FORM_TOO_COMPLEX: Final = "the form took more than it may while it was followed"
FORM_FAILED: Final = "the form could not be followed, by a fault of this program"
TOO_MANY_WAIT: Final = "too many forms wait to be compiled; try again"

Kind = Literal["json", "json_object", "regex", "choice", "grammar"]
_KINDS: Final[tuple[Kind, ...]] = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """The form of an output; exactly one of the first five is given. Hashable, once made. Names are those of vLLM.

    Attributes:
      json: a JSON schema, as a mapping or as text; kept as text.
      json_object: any JSON object.
      regex: a regular expression that the whole output matches, in the syntax of Rust's `regex` (no look-around, no
        backreferences).
      choice: the output is one of these strings.
      grammar: a context-free grammar, in llguidance's dialect of Lark or in GBNF.
      disable_any_whitespace: JSON comes without spaces and line breaks between its parts.

    Raises:
      RequestError: none or several are given, or one is empty, too long or of another type; the message names it.

    Example:
      >>> StructuredOutput(json={"type": "integer"})
      StructuredOutput(json='{"type": "integer"}', ...)
      >>> StructuredOutput(choice=["yes", "no"]).kind
      'choice'
      >>> StructuredOutput(regex="[0-9]+", json_object=True)
      Traceback (most recent call last):
      ...
      jpaged.errors.RequestError: structured has json_object and regex, expected exactly one of json, json_object,
        regex, choice and grammar

    Reference: the syntax of schemas and grammars, https://github.com/guidance-ai/llguidance/tree/main/docs
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: AbstractSequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"structured.{name} is {getattr(self, name)!r:.80}, expected True or False")
        given = [name for name in _KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(given) != 1:
            raise RequestError(
                f"structured has {' and '.join(given) or 'nothing'}, expected exactly one of json, json_object, regex, "
                "choice and grammar"
            )
        if self.disable_any_whitespace and self.kind not in ("json", "json_object"):
            raise RequestError(f"structured.disable_any_whitespace is set with {self.kind}: it is about JSON alone")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))

    @property
    def kind(self) -> Kind:
        """Which of the five is given."""
        return next(name for name in _KINDS if getattr(self, name) is not None and getattr(self, name) is not False)


def is_refusal(error: str) -> bool:
    """Whether a request that was taken ended in `error` because of what it asks for, not by a fault of this program.

    Example:
      >>> is_refusal("structured.regex is refused: unclosed group"), is_refusal("the model produced NaN")
      (True, False)
    """
    return error.startswith((FORM_REFUSED, DEAD_END, FORM_TOO_COMPLEX, TOO_MANY_WAIT))


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError(f"structured.{name} is {text!r:.80}, expected a non-empty string")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"structured.{name} holds half of a surrogate pair at {error.start}") from error
    if num_bytes > MAX_TEXT_BYTES:
        raise RequestError(f"structured.{name} has {num_bytes} bytes, expected at most {MAX_TEXT_BYTES}")


def _schema_text(schema: object) -> str:
    if isinstance(schema, str):
        _check_text("json", schema)
        try:
            parsed = json.loads(schema, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"structured.json is no JSON text: {error!s:.120}") from None
        if not isinstance(parsed, dict):
            raise RequestError(f"structured.json holds {schema!r:.80}, expected a JSON object, the schema")
        return schema
    if not isinstance(schema, Mapping):
        raise RequestError(f"structured.json is {schema!r:.80}, expected a JSON schema, as a mapping or as text")
    try:
        text = json.dumps(dict(schema), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured.json cannot be written as JSON: {error!s:.120}") from None
    _check_text("json", text)
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _choices(choice: object) -> tuple[str, ...]:
    if isinstance(choice, str | bytes) or not isinstance(choice, AbstractSequence) or not choice:
        raise RequestError(f"structured.choice is {choice!r:.80}, expected a list of strings")
    if len(choice) > MAX_CHOICES:
        raise RequestError(f"structured.choice has {len(choice)} entries, expected at most {MAX_CHOICES}")
    for text in choice:
        _check_text("choice", text)
    num_bytes = sum(len(text.encode()) for text in choice)
    if num_bytes > MAX_TEXT_BYTES:
        raise RequestError(f"structured.choice has {num_bytes} bytes in all, expected at most {MAX_TEXT_BYTES}")
    return tuple(choice)
