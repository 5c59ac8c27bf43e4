import heapq
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.errors import ModelLoadError
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.tokenizer import Tokenizer
from tests.tiny_vocabs import BYTE_TOKENS, byte_alphabet, byte_level_metadata, sentencepiece_metadata


def pieces_of(metadata: dict[str, Any], text: str) -> list[str]:
    tokenizer = Tokenizer(gguf_vocabulary(metadata, "test.gguf"), "test.gguf")
    return [tokenizer.id_to_token(token_id) for token_id in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "hello 12's", ["hello", "Ġ", "1", "2", "'s"]),
        ("gpt-2", "hello 12's", ["hello", "Ġ", "12", "'s"]),
        ("default", "hello 12's", ["hello", "Ġ", "12", "'s"]),
        ("llama-bpe", "hello 12's", ["hello", "Ġ", "12", "'s"]),
        ("smollm", "two words<|im_end|>\n", ["two words", "<|im_end|>", "Ċ"]),
        ("smollm", "  wo é", ["Ġ", "Ġwo", "Ġ", "Ã©"]),
    ],
)
def test_byte_level_text_is_split_by_the_named_rule(pre: str, text: str, pieces: list[str]) -> None:
    changes = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}
    assert pieces_of(byte_level_metadata(**changes), text) == pieces


def test_llama3_takes_up_to_three_digits_and_any_case_of_contractions() -> None:
    alphabet = byte_alphabet()
    merged = ["12", "123", "45", "'L", "'LL", ".Ċ"]
    metadata = byte_level_metadata(
        **{
            "tokenizer.ggml.tokens": [*alphabet, *merged, "Ġhello"],
            "tokenizer.ggml.token_type": [1] * (256 + len(merged) + 1),
            "tokenizer.ggml.merges": ["1 2", "12 3", "4 5", "' L", "'L L", ". Ċ"],
            "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.add_bos_token": False,
        }
    )
    assert pieces_of(metadata, "12345") == ["123", "45"]
    assert pieces_of(metadata, "I'LL.\n") == ["I", "'LL", ".Ċ"]
    # A whole word of the vocabulary is taken although no merges lead to it.
    assert pieces_of(metadata, " hello") == ["Ġhello"]
    assert pieces_of(metadata | {"tokenizer.ggml.pre": "gpt-2"}, "12345") == ["123", "45"]
    assert pieces_of(metadata | {"tokenizer.ggml.pre": "gpt-2"}, "I'LL") == ["I", "'", "L", "L"]
    assert pieces_of(metadata | {"tokenizer.ggml.pre": "gpt-2"}, ".\n") == [".", "Ċ"]
    assert "Ġhello" not in pieces_of(metadata | {"tokenizer.ggml.pre": "gpt-2"}, " hello")


def test_sentencepiece_text_gets_a_space_byte_tokens_and_bos() -> None:
    assert pieces_of(sentencepiece_metadata(), "the") == ["<s>", "▁the"]
    assert pieces_of(sentencepiece_metadata(), " the") == ["<s>", "▁", "▁the"]
    assert pieces_of(sentencepiece_metadata(), "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert pieces_of(sentencepiece_metadata(), "<tool>a</s>a") == ["<s>", "<tool>", "▁a", "</s>", "▁a"]
    without = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    assert pieces_of(sentencepiece_metadata(**without), "the") == ["t", "he"]
    assert pieces_of(sentencepiece_metadata(**{"tokenizer.ggml.add_eos_token": True}), "a") == ["<s>", "▁a", "</s>"]


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's own rule: merge the neighbours whose union has the best score, the leftmost first."""
    symbols = list(text)
    while True:
        unions = [(-scores[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not unions:
            return symbols
        _, at = heapq.nsmallest(1, unions)[0]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@given(
    words=st.lists(st.text("ab▁", min_size=2, max_size=5), min_size=1, max_size=12, unique=True),
    text=st.text("ab ", max_size=12),
)
def test_merging_by_rank_is_merging_by_score(words: list[str], text: str) -> None:
    # Pieces that end in two ways to the same token at once are SentencePiece's to order: leave such vocabularies out.
    words = [word for word in words if sum(word[:cut] in words or cut == 1 for cut in range(1, len(word))) <= 1]
    pieces = [*words, "a", "b", "▁"]
    metadata = sentencepiece_metadata(
        **{
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *pieces],
            "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
            "tokenizer.ggml.add_bos_token": False,
        }
    )
    scores = {piece: -float(rank) for rank, piece in enumerate(pieces)}
    expected = merge_by_score("▁" + text.replace(" ", "▁") if text else "", scores)
    assert pieces_of(metadata, text) == expected


def test_special_tokens_and_ends_are_read() -> None:
    vocabulary = gguf_vocabulary(byte_level_metadata(), "test.gguf")
    assert vocabulary.special_ids == {"bos_token": 1, "eos_token": 2}
    assert vocabulary.eos_token_ids == (2,)
    assert (vocabulary.add_bos, vocabulary.add_eos) == (False, False)
    assert set(vocabulary.chat_templates) == {"default"}


def test_llama3_has_several_ends_and_begins_texts_with_bos() -> None:
    control = ["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    metadata = byte_level_metadata(
        **{
            "tokenizer.ggml.tokens": [*control, *byte_alphabet()],
            "tokenizer.ggml.token_type": [3] * 4 + [1] * 256,
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 3,
            "tokenizer.chat_template.tool_use": "with tools",
        }
    )
    vocabulary = gguf_vocabulary(metadata, "test.gguf")
    assert vocabulary.add_bos
    assert sorted(vocabulary.eos_token_ids) == [1, 2, 3]
    assert vocabulary.eos_token_ids[0] == 3
    assert vocabulary.chat_templates["tool_use"] == "with tools"
    assert gguf_vocabulary(metadata | {"tokenizer.ggml.eot_token_id": 7}, "x").eos_token_ids[:2] == (3, 7)


def test_a_file_without_pre_tokenizer_is_read_as_gpt2_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    metadata = byte_level_metadata(**{"tokenizer.ggml.add_bos_token": False})
    del metadata["tokenizer.ggml.pre"]
    assert pieces_of(metadata, "hello 12") == ["hello", "Ġ", "12"]
    assert "test.gguf names no pre-tokenizer" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, '"bert"'),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.pre": "qwen2"}, '"qwen2", expected one of default, gpt-2'),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "1 of them different"),
        ({"tokenizer.ggml.token_type": [1]}, "with 1 types"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "holds other types"),
        ({"tokenizer.ggml.tokens": 5}, "an array of strings"),
        ({"tokenizer.ggml.merges": ["hello"]}, "two tokens with a space"),
        ({"tokenizer.ggml.merges": ["h 漢"]}, "cannot be built"),
        ({"tokenizer.ggml.add_bos_token": 1}, "a boolean"),
        ({"tokenizer.ggml.eos_token_id": "two"}, "a token id"),
    ],
)
def test_what_cannot_be_read_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words) as caught:
        gguf_vocabulary(byte_level_metadata(**changes), "test.gguf")
    assert "test.gguf" in str(caught.value)


def test_scores_must_fit_the_tokens() -> None:
    with pytest.raises(ModelLoadError, match="3 scores"):
        gguf_vocabulary(sentencepiece_metadata(**{"tokenizer.ggml.scores": [0.0] * 3}), "test.gguf")


def test_ids_outside_the_vocabulary_and_empty_tokens_are_tolerated() -> None:
    metadata = byte_level_metadata(**{"tokenizer.ggml.padding_token_id": 10**6})
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "", ""]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 5, 5]
    vocabulary = gguf_vocabulary(metadata, "test.gguf")
    assert "pad_token" not in vocabulary.special_ids
    assert vocabulary.tokenizer.get_vocab_size() == len(metadata["tokenizer.ggml.tokens"])
