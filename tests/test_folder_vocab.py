import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HfTokenizer

from jpaged.errors import ModelLoadError
from jpaged.folder_vocab import folder_vocabulary
from jpaged.tokenizer import Tokenizer
from tests.tiny_vocabs import CHATML, byte_alphabet

SPECIAL = ["<s>", "</s>", "<|eot|>"]


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Like Llama 3's: byte-level, its post-processor adds BOS; ids 0-2 are special."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *byte_alphabet()])}
    tokenizer = HfTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": None})
    write(tmp_path, "config.json", {"eos_token_id": 1})
    write(tmp_path, "generation_config.json", {"eos_token_id": [2, 1]})
    return tmp_path


def test_text_is_encoded_whole_with_the_files_own_bos(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("a longer text") == [0, *(byte + 3 for byte in b"a longer text")]
    assert tokenizer.encode("a", add_special_tokens=False) == [ord("a") + 3]
    assert tokenizer.encode("</s>") == [0, 1]


@pytest.mark.parametrize(
    ("add_bos", "add_eos", "ids"),
    [(None, None, [0, 100]), (False, None, [100]), (True, True, [0, 100, 1]), (False, True, [100, 1])],
)
def test_flags_of_the_config_are_followed(
    folder: Path, add_bos: bool | None, add_eos: bool | None, ids: list[int]
) -> None:
    flags = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": add_bos, "add_eos_token": add_eos}
    write(folder, "tokenizer_config.json", flags)
    assert Tokenizer.from_folder(folder).encode("a") == ids


def test_ends_come_from_the_generation_config_then_the_config_then_the_tokenizer(folder: Path) -> None:
    assert folder_vocabulary(folder).eos_token_ids == (2, 1)
    write(folder, "generation_config.json", {"max_length": 9})
    assert folder_vocabulary(folder).eos_token_ids == (1,)
    write(folder, "config.json", {})
    assert folder_vocabulary(folder).eos_token_ids == (1,)
    write(folder, "tokenizer_config.json", {})
    assert folder_vocabulary(folder).eos_token_ids == ()


def test_special_tokens_come_from_either_file(folder: Path) -> None:
    assert folder_vocabulary(folder).special_ids == {"bos_token": 0, "eos_token": 1}
    write(folder, "tokenizer_config.json", {"eos_token": "<|eot|>"})
    write(folder, "special_tokens_map.json", {"eos_token": "</s>", "pad_token": {"content": "a"}, "unk_token": "gone"})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.special_tokens == {"eos_token": "<|eot|>", "pad_token": "a"}
    assert tokenizer.special_token_ids == {0, 1, 2, 100}


def test_tokens_of_the_config_that_are_missing_are_added(folder: Path) -> None:
    added = {"259": {"content": "<think>", "special": False}, "260": {"content": "<x>", "special": True}}
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": added})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<think><x>") == [0, 259, 260]
    assert tokenizer.decode([259, 260]) == "<think>"
    assert tokenizer.vocab_size == 261
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": {"300": {"content": "<think>"}}})
    with pytest.raises(ModelLoadError, match="has id 300"):
        Tokenizer.from_folder(folder)


def test_chat_templates_are_found_in_all_their_places(folder: Path) -> None:
    assert folder_vocabulary(folder).chat_templates == {}
    write(folder, "chat_template.json", {"chat_template": "json"})
    assert folder_vocabulary(folder).chat_templates == {"default": "json"}
    write(folder, "tokenizer_config.json", {"chat_template": "one"})
    assert folder_vocabulary(folder).chat_templates == {"default": "one"}
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    assert folder_vocabulary(folder).chat_templates == {"default": "one", "tool_use": "two"}
    write(folder, "chat_template.jinja", CHATML)
    (folder / "additional_chat_templates").mkdir()
    write(folder / "additional_chat_templates", "rag.jinja", "three")
    assert folder_vocabulary(folder).chat_templates == {"default": CHATML, "tool_use": "two", "rag": "three"}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer_config.json", "{", "cannot be read as JSON"),
        ("tokenizer_config.json", "[]", "holds a list"),
        ("tokenizer_config.json", {"bos_token": "<none>"}, "bos_token '<none>' is not in the vocabulary"),
        ("tokenizer_config.json", {"add_bos_token": "yes"}, "add_bos_token .* is 'yes'"),
        ("tokenizer_config.json", {"chat_template": [{"name": "x"}]}, "chat_template"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, "added_tokens_decoder"),
        ("chat_template.json", {}, "chat_template"),
        ("generation_config.json", {"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ],
)
def test_damaged_files_are_named(folder: Path, name: str, value: Any, words: str) -> None:
    write(folder, name, value)
    with pytest.raises(ModelLoadError, match=words) as caught:
        folder_vocabulary(folder)
    assert str(folder) in str(caught.value)


def test_a_folder_without_tokenizer_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json"):
        folder_vocabulary(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="transformers converts"):
        folder_vocabulary(tmp_path)
