"""Builds a `tokenizers` tokenizer from the vocabulary that a GGUF file carries.

Two kinds are known, by `tokenizer.ggml.model`:

  "gpt2"   byte-level BPE: tokens are spelled in the 256 printable stand-ins for bytes, merges are listed, and
           `tokenizer.ggml.pre` names the rule by which text is split before merging.
  "llama"  a SentencePiece BPE: tokens have scores, spaces are "▁", unknown characters fall back to byte tokens.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Final, cast

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from jpaged.errors import ModelLoadError
from jpaged.vocabulary import Vocabulary

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type; 5 is unused, 6 a byte

_GPT2: Final = ("default", "gpt-2", "phi-2", "olmo")
_DIGITS_APART: Final = ("smollm", "starcoder")
_LLAMA3: Final = ("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe")
_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Tokens that end a turn or a text, in the chat formats of Llama 3 and ChatML. A GGUF file states one end-of-sequence
# id; Llama 3.1 has three.
_END_TOKENS: Final = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>")


def gguf_vocabulary(metadata: Mapping[str, object], source: str) -> Vocabulary:
    """Builds the tokenizer that the metadata of a GGUF file describes.

    Args:
      metadata: of a `GGUFFile`.
      source: the file's name, for errors.

    Raises:
      ModelLoadError: the file has no vocabulary, or one of an unknown or inconsistent kind.
    """
    fields = _Fields(metadata, source)
    kind = fields.text("model")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(fields.strings("tokens"))]
    types = [int(value) for value in fields.numbers("token_type", [_NORMAL] * len(tokens))]
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(types) != len(tokens):
        raise ModelLoadError(
            f"{source} lists {len(tokens)} tokens, {len(vocab)} of them different, with {len(types)} types; expected "
            "equal numbers: the vocabulary is damaged, convert the model again"
        )
    pre = fields.text("pre", "default")
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(vocab, fields.strings("merges"), pre, source)
        elif kind == "llama":
            scores = [float(value) for value in fields.numbers("scores", None)]
            tokenizer = _sentencepiece(vocab, scores, types, fields.flag("add_space_prefix", True), source)
        else:
            raise ModelLoadError(
                f'{source} has a vocabulary of model "{kind}", expected "gpt2" (byte-level BPE) or "llama" '
                "(SentencePiece); use a folder with tokenizer.json instead"
            )
    except ModelLoadError:
        raise
    except Exception as error:  # `tokenizers` raises bare exceptions
        raise ModelLoadError(f"{source}: the vocabulary cannot be built: {error}") from error

    special = {
        name: fields.token_id(key, len(tokens))
        for name, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        )
    }
    special_ids = {name: index for name, index in special.items() if index is not None}
    _add_tokens(tokenizer, tokens, types, special_ids)
    ends = [special["eos_token"], *(fields.token_id(key, len(tokens)) for key in ("eot_token_id", "eom_token_id"))]
    ends += [vocab[token] for token in _END_TOKENS if token in vocab and types[vocab[token]] == _CONTROL]
    return Vocabulary(
        tokenizer=tokenizer,
        special_ids=special_ids,
        eos_token_ids=tuple(dict.fromkeys(index for index in ends if index is not None)),
        add_bos=fields.flag("add_bos_token", kind == "llama" or pre in _LLAMA3) and "bos_token" in special_ids,
        add_eos=fields.flag("add_eos_token", False) and "eos_token" in special_ids,
        chat_templates=_chat_templates(metadata),
    )


class _Fields:
    """Typed access to the `tokenizer.ggml.*` metadata."""

    def __init__(self, metadata: Mapping[str, object], source: str) -> None:
        self._metadata = metadata
        self._source = source

    def _get(self, key: str, kind: type | tuple[type, ...], expected: str, default: object) -> object:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, kind) and value is not default:
            raise ModelLoadError(f"{self._source}: tokenizer.ggml.{key} is {value!r:.80}, expected {expected}")
        if value is None:
            raise ModelLoadError(
                f"{self._source} has no tokenizer.ggml.{key}, expected {expected}: it carries no complete vocabulary"
            )
        return value

    def text(self, key: str, default: str | None = None) -> str:
        return cast(str, self._get(key, str, "a string", default))

    def flag(self, key: str, default: bool) -> bool:
        return cast(bool, self._get(key, bool, "a boolean", default))

    def _array(self, key: str, items: type | tuple[type, ...], expected: str, default: Sequence | None) -> list:
        values = cast(list, self._get(key, list, expected, default))
        if not all(isinstance(value, items) for value in values):
            raise ModelLoadError(f"{self._source}: tokenizer.ggml.{key} holds other types, expected {expected}")
        return values

    def strings(self, key: str) -> list[str]:
        return self._array(key, str, "an array of strings", None)

    def numbers(self, key: str, default: Sequence[float] | None) -> list[float]:
        return self._array(key, (int, float), "an array of numbers", default)

    def token_id(self, key: str, num_tokens: int) -> int | None:
        value = self._get(key, int, "a token id", -1)
        return cast(int, value) if 0 <= cast(int, value) < num_tokens else None


def _byte_level(vocab: dict[str, int], merges: list[str], pre: str, source: str) -> HfTokenizer:
    known = (*_GPT2, *_DIGITS_APART, *_LLAMA3)
    if pre not in known:
        raise ModelLoadError(
            f'{source} splits text by the pre-tokenizer "{pre}", expected one of {", ".join(known)}; use a folder with '
            "tokenizer.json instead"
        )
    if pre == "default":
        logging.getLogger(__name__).warning("%s names no pre-tokenizer; text is split as for GPT-2", source)
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise ModelLoadError(f"{source} has the merge {merge!r}, expected two tokens with a space between them")
        pairs.append((left, right))
    # Llama 3 takes a whole word that is in the vocabulary as it is, even if no sequence of merges makes it.
    tokenizer = HfTokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in _LLAMA3))
    if pre in _LLAMA3:
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre in _DIGITS_APART else []
        steps = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    vocab: dict[str, int], scores: list[float], types: list[int], space_prefix: bool, source: str
) -> HfTokenizer:
    if len(scores) != len(vocab):
        raise ModelLoadError(f"{source} lists {len(scores)} scores for {len(vocab)} tokens, expected as many")
    unknown = next((token for token, index in vocab.items() if types[index] == _UNKNOWN), None)
    merges = _merges(vocab, scores, types)
    tokenizer = HfTokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces = [normalizers.Prepend("▁")] if space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, best score first.

    SentencePiece merges the neighbours whose union has the best score. BPE merges the pair that is listed first, so a
    list by score makes the same merges. Of two ways to make one token the longer left part comes first. Tokens
    that never come out of merging (control, user-defined, bytes) have no part in it.
    """
    parts = {token for token, index in vocab.items() if types[index] == _NORMAL}
    merges = [
        (scores[vocab[token]], cut, token)
        for token in parts
        for cut in range(1, len(token))
        if token[:cut] in parts and token[cut:] in parts
    ]
    merges.sort(key=lambda merge: (-merge[0], vocab[merge[2]], -merge[1]))
    return [(token[:cut], token[cut:]) for _, cut, token in merges]


def _add_tokens(tokenizer: HfTokenizer, tokens: list[str], types: list[int], special_ids: dict[str, int]) -> None:
    """Marks the tokens that are matched whole in a text: control tokens (left out of decoded text) and user-defined."""
    control = {index for index, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)} | set(special_ids.values())
    own = [index for index, kind in enumerate(types) if kind == _USER_DEFINED and index not in control]
    tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in sorted(control)])
    tokenizer.add_tokens([AddedToken(tokens[i], normalized=False) for i in own])


def _chat_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {}
    for key, value in metadata.items():
        if isinstance(value, str) and (key == prefix or key.startswith(prefix + ".")):
            templates[key.removeprefix(prefix).removeprefix(".") or "default"] = value
    return templates
