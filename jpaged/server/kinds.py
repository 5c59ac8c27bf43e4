"""Kinds of values that a parameter may have: each reads a JSON value, or refuses it, and gives its own JSON schema.

The checks and the OpenAPI document come from the same objects, so that neither can say what the other does not.
`read` raises `Refused` with the place of the fault within the value and what is wrong there.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jpaged.server.api_error import shown


class Refused(Exception):
    """A value is not of its kind.

    Args:
      place: where in the value, such as "[2]" or ".type"; "" for the value itself.
      got: the value, fit for a message.
      expected: what it should have been.
    """

    def __init__(self, place: str, got: str, expected: str):
        super().__init__(place, got, expected)
        self.place, self.got, self.expected = place, got, expected

    def inside(self, place: str) -> "Refused":
        """The same fault, seen from the value that holds this one."""
        return Refused(place + self.place, self.got, self.expected)


class Kind(Protocol):
    """One kind of value."""

    def read(self, value: Any) -> Any:
        """The value as the server uses it.

        Raises:
          Refused: it is not of this kind.
        """
        ...

    def schema(self) -> dict[str, Any]:
        """JSON schema (2020-12)."""
        ...


@dataclass(frozen=True)
class Boolean:
    """true or false.

    Example:
      >>> Boolean().read(True)
      True
    """

    def read(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise Refused("", shown(value), "true or false")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Integer:
    """A whole number in [least, most]; JSON counts 2.0 among them.

    Example:
      >>> Integer(1, 8).read(2.0)
      2
    """

    least: int
    most: int

    def read(self, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not self.least <= value <= self.most:
            raise Refused("", shown(value), f"an integer in [{self.least}, {self.most}]")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True)
class Number:
    """A finite number in [least, most], or in (least, most]."""

    least: float
    most: float
    open_below: bool = False

    def read(self, value: Any) -> float:
        number = float("nan")
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value) if abs(value) < 1e300 else math.inf
        if not self.least <= number <= self.most or (self.open_below and number == self.least):
            border = "(" if self.open_below else "["
            raise Refused("", shown(value), f"a number in {border}{self.least:g}, {self.most:g}]")
        return number

    def schema(self) -> dict[str, Any]:
        least = "exclusiveMinimum" if self.open_below else "minimum"
        return {"type": "number", least: self.least, "maximum": self.most}


@dataclass(frozen=True)
class Text:
    """A string of valid Unicode.

    Attributes:
      least, most: characters.
      pattern: a regular expression that all of it matches, and `expected`, what that means.
      secret: what it holds is not repeated in errors.
    """

    least: int = 0
    most: int | None = None
    pattern: str = ""
    expected: str = ""
    secret: bool = False

    def read(self, value: Any) -> str:
        if not isinstance(value, str):
            raise Refused("", "another kind of value" if self.secret else shown(value), "a string")
        if len(value) < self.least or (self.most is not None and len(value) > self.most):
            most = "" if self.most is None else f" and at most {self.most}"
            raise Refused("", f"a string of {len(value)} characters", f"at least {self.least}{most}")
        if self.pattern and not re.fullmatch(self.pattern, value):
            raise Refused("", shown(value), self.expected)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Refused("", f"half of a surrogate pair at character {error.start}", "valid Unicode") from None
        return value

    def schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        if self.least:
            schema["minLength"] = self.least
        if self.most is not None:
            schema["maxLength"] = self.most
        if self.pattern:
            schema["pattern"] = f"^{self.pattern}$"
        return schema


@dataclass(frozen=True)
class Choice:
    """One of some strings."""

    values: tuple[str, ...]

    def read(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self.values:
            raise Refused("", shown(value), f"one of {', '.join(map(repr, self.values))}")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.values)}


@dataclass(frozen=True)
class Name:
    """A name of one of some things; a name of nothing is told by whoever looks it up."""

    values: tuple[str, ...]

    def read(self, value: Any) -> str:
        return Text().read(value)

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.values)}


@dataclass(frozen=True)
class Neutral:
    """A parameter that is known and not supported: only values that ask for nothing are taken.

    Attributes:
      values: those values, beside null.
      why: what is missing, and what to use instead.
      secret: what it holds is not repeated in errors.
    """

    values: tuple[Any, ...]
    why: str
    secret: bool = False

    def read(self, value: Any) -> None:
        if not any(type(value) is type(neutral) and value == neutral for neutral in self.values):
            raise Refused("", "given" if self.secret else shown(value), f"it to be left out: {self.why}")

    def schema(self) -> dict[str, Any]:
        return {"enum": [*self.values, None]}


@dataclass(frozen=True)
class ListOf:
    """A list of one kind."""

    kind: Kind
    most: int
    least: int = 0

    def read(self, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not self.least <= len(value) <= self.most:
            raise Refused("", shown(value), f"a list of {self.least} to {self.most} entries")
        entries = []
        for index, entry in enumerate(value):
            try:
                entries.append(self.kind.read(entry))
            except Refused as error:
                raise error.inside(f"[{index}]") from None
        return tuple(entries)

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": self.kind.schema(), "minItems": self.least, "maxItems": self.most}


@dataclass(frozen=True)
class TokenMap:
    """An object whose keys are token ids, written as strings, since JSON knows no other keys."""

    kind: Kind
    vocab_size: int
    most: int

    def read(self, value: Any) -> dict[int, Any]:
        if not isinstance(value, dict) or len(value) > self.most:
            raise Refused("", shown(value), f"an object of at most {self.most} token ids")
        entries: dict[int, Any] = {}
        for key, entry in value.items():
            # Written in one way only: of "7" and "07" one would be lost.
            if not (key.isascii() and key.isdecimal() and key == f"{int(key[:12])}" and int(key) < self.vocab_size):
                raise Refused("", f"the key {shown(key)}", f"token ids in [0, {self.vocab_size})")
            try:
                entries[int(key)] = self.kind.read(entry)
            except Refused as error:
                raise error.inside(f"[{key}]") from None
        return entries

    def schema(self) -> dict[str, Any]:
        # That an id is in the vocabulary is more than a pattern can say.
        keys = {"pattern": "^(0|[1-9][0-9]{0,10})$"}
        return {
            "type": "object",
            "propertyNames": keys,
            "additionalProperties": self.kind.schema(),
            "maxProperties": self.most,
        }


@dataclass(frozen=True)
class AnyObject:
    """A JSON object that is handed on as it is, to whom it concerns."""

    def read(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Refused("", shown(value), "an object")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "object"}


@dataclass(frozen=True)
class Ignored:
    """A harmless field that clients send and that changes nothing here."""

    def read(self, value: Any) -> None:
        return None

    def schema(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class OneOf:
    """The first kind of several that takes the value.

    Attributes:
      expected: what all of them are together, in words.
    """

    kinds: Sequence[Kind]
    expected: str

    def read(self, value: Any) -> Any:
        for kind in self.kinds:
            try:
                return kind.read(value)
            except Refused:
                continue
        raise Refused("", shown(value), self.expected)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [kind.schema() for kind in self.kinds]}


@dataclass(frozen=True)
class Record:
    """An object with named entries; null stands for one that is left out.

    Attributes:
      kinds: by name.
      required: names that must be there.
      is_open: other entries are handed on as they are, to whom they concern; else they are refused.
    """

    kinds: Mapping[str, Kind]
    required: tuple[str, ...] = field(default=())
    is_open: bool = False

    def read(self, value: Any) -> dict[str, Any]:
        """The entries that are given."""
        if not isinstance(value, dict):
            raise Refused("", shown(value), "an object")
        for name in self.required:
            if value.get(name) is None:
                raise Refused(f".{name}", "nothing", "a value")
        entries = {}
        for name, entry in value.items():
            if name not in self.kinds and self.is_open:
                entries[name] = entry
                continue
            if name not in self.kinds:
                raise Refused("", f"the unknown entry {shown(name)}", f"only {', '.join(self.kinds)}")
            if entry is not None:
                try:
                    entries[name] = self.kinds[name].read(entry)
                except Refused as error:
                    raise error.inside(f".{name}") from None
        return entries

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {
                name: kind.schema() if name in self.required else nullable(kind.schema())
                for name, kind in self.kinds.items()
            },
            "required": list(self.required),
            "additionalProperties": self.is_open,
        }


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, null beside.

    Example:
      >>> nullable({"type": "boolean"})
      {'anyOf': [{'type': 'boolean'}, {'type': 'null'}]}
    """
    if not schema or None in schema.get("enum", ()):
        return schema
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {"anyOf": [schema, {"type": "null"}]}
