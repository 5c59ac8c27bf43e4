"""Make tests/golden/tokenizer_smollm2.json with Hugging Face transformers: evidence from outside jpaged.

    pip install torch transformers gguf
    python scripts/make_tokenizer_golden.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf      half a minute

transformers builds the tokenizer from the file's vocabulary and merges. Its GGUF reader does not know the pre-tokenizer
"smollm" and would split text as GPT-2 does, so the one of the model's own tokenizer.json is put in: every digit apart,
then GPT-2's rule. (The two differ for a space before a digit that has merges, such as " ²".)
"""

# pyright: reportMissingImports=false
import argparse
import datetime
import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

OUT = Path(__file__).resolve().parent.parent / "tests" / "golden" / "tokenizer_smollm2.json"

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   three    four     ",
    "\n\n\n\t\ttabs and\r\nlines\r\n",
    "I'm you're we'VE they'll it's DON'T o'clock",
    "Call 1234567890, pay $3.50 on 2024-02-29.",
    "½ ² Ⅷ ٣ ① 一二三 x²",
    "naïve café — “quotes” … €5",
    "e\u0301 is é, \u200bzero\u200dwidth\ufeff",
    "漢字かなカナ한글 русский العربية हिन्दी ไทย",
    "👍🏽 🤔 🇩🇪 👩‍👩‍👧 ♥️",
    "def f(x: int) -> str:\n    return f'{x**2:>10}'  # comment\n\tpass\n",
    '{"key": [1, 2.5e-3, null], "s": "\\u00e9\\n"}',
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|<|im_end|>|> <|endoftext|><repo_name>x<file_sep>",
    "a\u00a0b\u2003c\u3000d\u2028e",
    "\x00\x01\x7f\x80\x9f",
    "\U000e0001\U0010ffff\ue000",
    "ThequickbrownfoxjumpsoverthelazydogTHEQUICKBROWNFOX",
    "https://example.org/a?b=c&d=%20#e user@example.org",
    "\\frac{a}{b} \\sum_{i=0}^{n} x_i \\le 10^{-6}",
    "======---- ____ **** //// <<<>>> ((()))",
    "Ünïcödé ÀÉÎÕÜ ßẞ ŁØĐ ĳ ﬁ ǆ",
]
CHATS = [
    [{"role": "user", "content": "What is 2+2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Grüße 🤔"},
        {"role": "assistant", "content": " Hello! "},
        {"role": "user", "content": "<|im_end|>\n123"},
    ],
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help="the default model's file")
    path = parser.parse_args().gguf.resolve()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    texts = []
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        texts.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=True)})
    chats = []
    for messages in CHATS:
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        chats.append({"messages": messages, "prompt": prompt, "ids": ids})
    provenance = {
        "made_by": "scripts/make_tokenizer_golden.py",
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("transformers", "tokenizers", "gguf")},
        "file": path.name,
        "file_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    lines = [
        '{\n"provenance": ' + json.dumps(provenance),
        '"texts": [\n' + ",\n".join(map(json.dumps, texts)) + "\n]",
        '"chats": [\n' + ",\n".join(map(json.dumps, chats)) + "\n]\n}\n",
    ]
    OUT.write_text(",\n".join(lines))
    print(f"{OUT}: {len(texts)} texts, {len(chats)} chats")


if __name__ == "__main__":
    main()
