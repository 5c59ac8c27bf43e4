"""A folder with a random Llama of 259 tokens, 3 special ones and the bytes, and its tokenizer and template."""

import json
from pathlib import Path

from tests.tiny_vocabs import CHATML, byte_alphabet

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_tokenizer(folder: Path) -> Path:
    """The tokenizer alone. Bytes are ids 3 to 258; id 0 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    vocab = {token: index for index, token in enumerate([*SPECIAL, *byte_alphabet()])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHATML, "eos_token": SPECIAL[0]}), encoding="utf-8"
    )
    return folder


def write_model(folder: Path, max_position_embeddings: int = 256) -> Path:
    """The model too."""
    from jpaged.models import export_safetensors
    from tests.fakes import tiny_llama

    export_safetensors(tiny_llama(vocab_size=259, max_position_embeddings=max_position_embeddings), folder)
    return write_tokenizer(folder)


def ids(text: str) -> list[int]:
    """The token ids of a text."""
    alphabet = byte_alphabet()
    assert len(alphabet) == 256
    return [3 + byte for byte in text.encode()]
