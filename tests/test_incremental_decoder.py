import functools
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models

from jpaged.errors import ModelLoadError, RequestError
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.incremental_decoder import DecodePlan, IncrementalDecoder
from jpaged.tokenizer import Tokenizer
from jpaged.vocabulary import Vocabulary
from tests.tiny_vocabs import byte_level_metadata, sentencepiece_metadata

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "words":
        vocab = {"<s>": 0, "a": 1, "b": 2, "": 3}
        return Tokenizer(Vocabulary(HfTokenizer(models.WordLevel(vocab, "a")), {}, ()), kind)
    metadata = {
        "byte_level": byte_level_metadata(),
        "sentencepiece": sentencepiece_metadata(),
        "sentencepiece_without_prefix": sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False}),
    }[kind]
    return Tokenizer(gguf_vocabulary(metadata, kind), kind)


KINDS = ("byte_level", "sentencepiece", "sentencepiece_without_prefix", "words")


def decode_in_steps(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
    return [*(decoder.add(token_id) for token_id in ids), decoder.finish()]


# Ids of one kind each, so that runs are common: special tokens, bytes that begin and continue characters, any token.
def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    size = tokenizer_of(kind).vocab_size
    some = [st.integers(0, size - 1), st.integers(0, 2)]
    if kind != "words":
        lead, tail = st.sampled_from([0xC3, 0xE4, 0xED, 0xF0, 0xF4]), st.integers(0x80, 0xBF)
        some += [st.integers(259, size - 1), *(byte.map(lambda value: value + 3) for byte in (lead, tail, tail))]
    return st.lists(st.one_of(some), max_size=40)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
@given(data=st.data())
def test_pieces_join_to_the_full_decode(kind: str, skip_special_tokens: bool, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(ids_of(kind))
    pieces = decode_in_steps(tokenizer, ids, skip_special_tokens)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_what_was_given_out_stays_true_whatever_comes_next(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids, continuation = data.draw(ids_of(kind)), data.draw(ids_of(kind))
    given_out = "".join(decode_in_steps(tokenizer, ids, True)[:-1])
    assert tokenizer.decode(ids + continuation).startswith(given_out)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "sentencepiece_without_prefix"])
@given(text=st.text(max_size=30))
@example(text="👩‍👩‍👧 naïve 漢字")
@example(text="  two leading spaces")
def test_text_comes_in_whole_characters_and_comes_back(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    pieces = decode_in_steps(tokenizer, tokenizer.encode(text, add_special_tokens=False), False)
    assert "".join(pieces) == (text if kind == "byte_level" else text.replace("▁", " "))
    assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in pieces)


def test_half_a_character_waits_for_its_other_half() -> None:
    tokenizer = tokenizer_of("byte_level")
    face = [byte + 3 for byte in "🤔".encode()]
    assert decode_in_steps(tokenizer, face, True) == ["", "", "", "🤔", ""]
    assert decode_in_steps(tokenizer, face[:3], True) == ["", "", "", REPLACEMENT]


def test_invalid_bytes_do_not_pile_up() -> None:
    tokenizer = tokenizer_of("byte_level")
    assert decode_in_steps(tokenizer, [0xFF + 3] * 3, True) == [REPLACEMENT] * 3 + [""]


def test_a_byte_run_is_judged_as_a_whole() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    run = [byte + 3 for byte in "é".encode()]
    letter = tokenizer.token_to_id("a")
    assert letter is not None
    assert decode_in_steps(tokenizer, [*run, letter], True) == ["", "", "éa", ""]
    assert decode_in_steps(tokenizer, [*run, 0xFF + 3, letter], True) == ["", "", "", REPLACEMENT * 3 + "a", ""]
    assert decode_in_steps(tokenizer, [run[0], 2, run[1]], True) == ["", "", "", "é"]  # </s> is left out
    assert decode_in_steps(tokenizer, [run[0], 2, run[1]], False)[1] == REPLACEMENT + "</s>"


def test_only_the_first_space_is_dropped() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    space, the = tokenizer.token_to_id("▁"), tokenizer.token_to_id("▁the")
    assert space is not None
    assert the is not None
    assert decode_in_steps(tokenizer, [1, space, the, the], True) == ["", "", " the", " the", ""]
    assert decode_in_steps(tokenizer, [1, the], False) == ["<s>", " the", ""]


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_an_id_outside_the_vocabulary_is_refused_and_leaves_no_trace(token_id: int) -> None:
    tokenizer = tokenizer_of("byte_level")
    decoder = IncrementalDecoder(tokenizer)
    assert decoder.add(0xC3 + 3) == ""
    with pytest.raises(RequestError, match="not in the vocabulary"):
        decoder.add(token_id)
    assert decoder.add(0xA9 + 3) == "é"


def test_a_finished_stream_takes_no_more() -> None:
    decoder = IncrementalDecoder(tokenizer_of("byte_level"))
    decoder.add(0xC3 + 3)
    assert decoder.finish() == REPLACEMENT
    assert decoder.finish() == ""
    with pytest.raises(ValueError, match="finish"):
        decoder.add(5)


PIECES = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]


@pytest.mark.parametrize(
    ("decoder", "plan"),
    [
        (decoders.ByteLevel(), DecodePlan("byte_level")),
        (decoders.Sequence([decoders.ByteLevel()]), DecodePlan("byte_level")),
        (decoders.Sequence(PIECES), DecodePlan("pieces", (("▁", " "),), True, (" ", 2))),
        (decoders.Sequence(PIECES[:3]), DecodePlan("pieces", (("▁", " "),), True)),
        (decoders.Fuse(), DecodePlan("pieces")),
    ],
)
def test_plans_are_read_from_decoders(decoder: Any, plan: DecodePlan) -> None:
    assert DecodePlan.from_state(decoder.__getstate__(), "here") == plan


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Metaspace(),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.ByteFallback()]),
    ],
)
def test_decoders_that_cannot_stream_are_refused(decoder: Any) -> None:
    state = decoder.__getstate__()
    with pytest.raises(ModelLoadError, match=json.loads(state)["type"]):
        DecodePlan.from_state(state, "here")
