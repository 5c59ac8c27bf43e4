"""Decodes token ids one by one, giving out text as soon as it is certain.

`tokenizers` decodes by a short pipeline, which is different for the two families of vocabularies:

  byte-level      The bytes of all tokens are joined and read as UTF-8; what is no UTF-8 becomes U+FFFD.
  SentencePiece   "▁" becomes a space; a *run* of neighbouring byte tokens `<0xNN>` is read as UTF-8, and if any part of
                  the run is none, every byte of it becomes U+FFFD; all is joined; one leading space is dropped.

`DecodePlan` reads the pipeline out of a tokenizer, and `IncrementalDecoder` runs it on a stream. Nothing is decoded
twice: the state is what is still uncertain, and each stage says what that is:

  byte-level      the bytes of an incomplete character, at most 3. A byte that can no longer become part of a
                  character is certain at once, so invalid bytes do not pile up.
  SentencePiece   the present run of byte tokens, whole: one bad byte at its end would change all of it. A run ends at
                  the first other token that is not left out. And whether the leading space was met yet.

So after any ids, the pieces given out are a prefix of the decoded text of every continuation of these ids, and with
`finish()` they join to exactly `Tokenizer.decode(ids)`.
"""

import codecs
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from jpaged.errors import ModelLoadError, RequestError


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins by which byte-level vocabularies spell bytes (Radford et al., GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF: Final = _byte_alphabet()
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>", re.ASCII)


@dataclass(frozen=True)
class DecodePlan:
    """How one tokenizer turns its tokens into text.

    Attributes:
      kind: "byte_level": tokens are spelled bytes; "pieces": tokens are text; "words": text, joined by single spaces.
      replacements: (old, new) pairs applied to every token in turn ("pieces").
      byte_fallback: whether `<0xNN>` tokens stand for bytes ("pieces").
      strip: (character, n): up to n of it are dropped at the very start of the text ("pieces").
      known: `piece` of token ids that came before.
    """

    kind: Literal["byte_level", "pieces", "words"]
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: tuple[str, int] = ("", 0)
    known: dict[int, bytes | str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_state(cls, state: bytes | None, source: str) -> "DecodePlan":
        """Reads the JSON state of a decoder of the `tokenizers` library (`None`: there is no decoder).

        Raises:
          ModelLoadError: the decoder has a stage that cannot be run on a stream.

        Example:
          >>> DecodePlan.from_state(b'{"type": "ByteLevel"}', "tokenizer.json").kind
          'byte_level'
        """
        if state is None:
            return cls("words")
        stage = json.loads(state)
        stages = stage["decoders"] if stage["type"] == "Sequence" else [stage]
        if [stage["type"] for stage in stages] == ["ByteLevel"]:
            return cls("byte_level")
        replacements: list[tuple[str, str]] = []
        byte_fallback, strip = False, ("", 0)
        order = ("Replace", "ByteFallback", "Fuse", "Strip")
        names = [stage["type"] for stage in stages]
        known = all(name in order for name in names) and names == sorted(names, key=order.index)
        single = all(names.count(name) <= 1 for name in order[1:]) and ("Strip" not in names or "Fuse" in names)
        for stage in stages if known and single else []:
            if stage["type"] == "Replace":
                known = known and "String" in stage["pattern"]
                replacements.append((stage["pattern"].get("String", ""), stage["content"]))
            elif stage["type"] == "ByteFallback":
                byte_fallback = True
            elif stage["type"] == "Strip":
                known = known and stage["stop"] == 0
                strip = (stage["content"], stage["start"])
        if not (known and single):
            raise ModelLoadError(
                f"{source} has the decoder {state.decode()}, expected ByteLevel, or a sequence of Replace (of fixed "
                "strings), ByteFallback, Fuse and Strip (at the start), in this order"
            )
        return cls("pieces", tuple(replacements), byte_fallback, strip)

    def token_bytes(self, token: str) -> bytes:
        """The bytes that a token stands for, wherever it stands; `strip` is left out of account.

        Raises:
          RequestError: what a token stands for depends on where it stands ("words").

        Example:
          >>> DecodePlan("byte_level").token_bytes("Ã©").decode()
          'é'
          >>> DecodePlan("pieces", (("▁", " "),), byte_fallback=True).token_bytes("<0x0A>")
          b'\\n'
        """
        if self.kind == "words":
            raise RequestError("the tokens of this vocabulary are words joined by spaces: they have no bytes")
        piece = self.piece(token)
        return piece.encode() if isinstance(piece, str) else piece

    def piece(self, token: str) -> bytes | str:
        """What a token adds to the text: text, or bytes that may be a part of a character."""
        if self.kind == "words":
            return token
        if self.kind == "byte_level":
            try:
                return bytes([_BYTE_OF[character] for character in token])
            except KeyError:  # an added token, spelled in plain text
                return token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return token


class _Decodable(Protocol):
    """What `IncrementalDecoder` needs of a tokenizer."""

    @property
    def decode_plan(self) -> DecodePlan: ...
    @property
    def special_token_ids(self) -> Collection[int]: ...
    def id_to_token(self, token_id: int) -> str: ...


class IncrementalDecoder:
    """Decodes one stream of token ids; see the module's text for what it promises.

    Args:
      tokenizer: the vocabulary.
      skip_special_tokens: leave special tokens out of the text, as `Tokenizer.decode` does.

    Example:
      >>> from types import SimpleNamespace
      >>> tokens = ["h", "Ã", "©"]  # the last two spell the two bytes of "é"
      >>> plan = DecodePlan("byte_level")
      >>> vocabulary = SimpleNamespace(decode_plan=plan, special_token_ids=(), id_to_token=tokens.__getitem__)
      >>> decoder = IncrementalDecoder(vocabulary)
      >>> [decoder.add(0), decoder.add(1), decoder.add(2), decoder.finish()]
      ['h', '', 'é', '']
    """

    def __init__(self, tokenizer: _Decodable, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.special_token_ids if skip_special_tokens else ())
        plan = tokenizer.decode_plan
        stages = {"byte_level": _Bytes, "pieces": _Pieces, "words": _Words}
        self._stage = stages[plan.kind](plan)
        self._plan = plan
        self._finished = False

    def add(self, token_id: int) -> str:
        """Takes the next token and returns the text that has become certain, perhaps none.

        Raises:
          RequestError: the id is not in the vocabulary; the decoder stays as it was.
          ValueError: the stream was finished.
        """
        return self.add_all((token_id,))

    def add_all(self, token_ids: Sequence[int]) -> str:
        """`add` for many tokens at once.

        Raises:
          RequestError, ValueError: as `add`, before any of them was taken.
        """
        if self._finished:
            raise ValueError("finish() was called: make a new IncrementalDecoder for another stream")
        known = self._plan.known
        pieces = list(map(known.get, token_ids))
        if None in pieces:
            for token_id in token_ids:
                if token_id not in known:
                    known[token_id] = self._plan.piece(self._tokenizer.id_to_token(token_id))
            pieces = list(map(known.get, token_ids))
        if not self._skipped.isdisjoint(token_ids):
            pieces = [known[token_id] for token_id in token_ids if token_id not in self._skipped]
        return self._stage.add(pieces)

    def finish(self) -> str:
        """Ends the stream and returns the text that was held back: usually none, and U+FFFD for half a character.

        A second call returns nothing.
        """
        if self._finished:
            return ""
        self._finished = True
        return self._stage.finish()


class _Bytes:
    def __init__(self, plan: DecodePlan) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between = True  # no part of a character is held back

    def add(self, pieces: list[bytes]) -> str:
        piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if self._is_between and piece.isascii():
            return piece.decode()
        text = self._utf8.decode(piece)
        self._is_between = not self._utf8.getstate()[0]
        return text

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Words:
    def __init__(self, plan: DecodePlan) -> None:
        self._space = ""

    def add(self, pieces: list[str]) -> str:
        if not pieces:
            return ""
        space, self._space = self._space, " "
        return space + " ".join(pieces)

    def finish(self) -> str:
        return ""


class _Pieces:
    def __init__(self, plan: DecodePlan) -> None:
        self._run = bytearray()
        self._strip, self._left_to_strip = plan.strip

    def add(self, pieces: list[bytes | str]) -> str:
        text = ""
        for piece in pieces:
            if isinstance(piece, bytes):
                self._run += piece
            else:
                text += self._end_run() + piece if self._run else piece
        return self._stripped(text) if self._left_to_strip else text

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(run)

    def _stripped(self, text: str) -> str:
        while text and self._left_to_strip:
            if text[0] != self._strip:
                self._left_to_strip = 0
            else:
                self._left_to_strip -= 1
                text = text[1:]
        return text
