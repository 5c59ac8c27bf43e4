"""Made-up vocabularies are vocabularies; a model of random weights is served with one."""

import json

import pytest

from jpaged.cli.random_model import make_random_engine, random_tokenizer
from jpaged.config import CacheConfig, EngineConfig
from jpaged.errors import ConfigError
from tests.fakes import tiny_config


@pytest.fixture
def shape(tmp_path):
    """A config.json."""

    def write(vocab_size: int) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(tiny_config(vocab_size=vocab_size).to_hf()))
        return f"{path}"

    return write


def test_every_id_is_a_text_and_every_text_has_ids(shape) -> None:
    tokenizer = random_tokenizer(shape(1500))
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (1500, (1499,))
    words = [tokenizer.decode([token]) for token in range(256, 1499)]
    assert len(set(words)) == len(words)
    assert all(word[0] == " " and word[1:].isalpha() for word in words)
    text = "Grüße, \U0001f999!\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text.encode())
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}])
    with pytest.raises(ConfigError, match="has 256 tokens, expected at least 257"):
        random_tokenizer(shape(256))


def test_a_folder_keeps_its_own_tokenizer(tiny_folder) -> None:
    assert random_tokenizer(f"{tiny_folder}").vocab_size == 259


def test_an_engine_without_a_checkpoint(shape) -> None:
    config = EngineConfig(cache=CacheConfig(num_pages=9))
    engine = make_random_engine(model=shape(300), dtype=None, weights=None, config=config, progress=False)
    assert (engine.vocab_size, engine.dtype, engine.eos_token_ids) == (300, "float32", (299,))
