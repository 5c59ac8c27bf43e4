"""Small vocabularies of both families, as the metadata of a GGUF file."""

from typing import Any

BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """How byte-level vocabularies spell the bytes 0 to 255."""
    hidden = iter(range(256, 512))
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [chr(byte) if byte in printable else chr(next(hidden)) for byte in range(256)]


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """Special tokens 0-2, bytes, a few merged tokens, and a user-defined token that is spelled with a space."""
    merged = ["he", "ll", "hell", "hello", "Ġw", "Ġwo", "12", "'s", "Ã©", "ðŁ"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), *merged, "two words"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (256 + len(merged)) + [4],
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2", "' s", "Ã ©", "ð Ł"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    } | changes


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """Like Llama 2's: <unk>, <s>, </s>, bytes, pieces by falling score. "é" and digits fall back to bytes."""
    pieces = ["▁t", "he", "▁the", "▁▁", "▁a", "in", "er", "▁", "e", "t", "a", "h", "i", "n", "r", "<", ">", "s"]
    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *pieces, "<tool>"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | changes
