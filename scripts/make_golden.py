"""Make the golden values of tests/golden/ with Hugging Face transformers in float32: evidence from outside jpaged.

    pip install torch transformers gguf tokenizers safetensors numpy
    python scripts/make_golden.py smollm2 --gguf SmolLM2-135M-Instruct.Q4_1.gguf      a few minutes
    python scripts/make_golden.py tiny                                               a few seconds

`smollm2`: 64 greedy tokens for each of the 24 prompts of `golden_prompts.py` (end-of-sequence does not end them), by a
plain loop over transformers' own KV cache, batch 1, eager attention. The weights are the file's blocks, dequantised by
the `gguf` library and renamed here, without jpaged's loader; transformers' own GGUF loader must give the same weights
bit by bit. The tokens come from the `tokenizers` library, from the file's vocabulary and merges. At each position: the
five largest logits, the log-normaliser (log-probability = logit - log_normalizer) and the gap between the two largest;
at a few positions also the logits of 64 fixed vocabulary ids. As a measure of what float32 itself leaves open, the same
tokens are run once more as one whole sequence with the other attention of torch: `float32_noise` is the difference.

`tiny`: the random models of tests/golden/tiny_models.py, 24 greedy tokens for each of three prompts, and all logits at
the last position of the prompt and of the output.
"""

# pyright: reportMissingImports=false
import argparse
import copy
import datetime
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import golden_prompts
import numpy as np
import tokenizers
import torch
import transformers
from gguf import GGUFReader, dequantize

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.golden import tiny_models  # noqa: E402  (it lives beside the JSON that it explains)

GOLDEN = ROOT / "tests" / "golden"

OUTPUT_TOKENS = 64
TINY_OUTPUT_TOKENS = 24
TOP = 5
SAMPLE_POSITIONS = (0, 1, 31, 63)
SAMPLE_VOCAB = 64


# --- files ------------------------------------------------------------------------------------------------------------
def to_json(value: Any, depth: int, indent: str = "") -> str:
    """JSON whose containers are spread over lines down to `depth`; deeper ones, and lists of numbers, take one line."""
    numbers_only = isinstance(value, list) and not any(isinstance(item, dict | list | str) for item in value)
    if depth == 0 or not isinstance(value, dict | list) or numbers_only:
        return json.dumps(value, separators=(",", ":"))
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(key)}: {to_json(item, depth - 1, inner)}" for key, item in value.items()]
    else:
        parts = [inner + to_json(item, depth - 1, inner) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n" + ",\n".join(parts) + f"\n{indent}{closing}"


def provenance(command: str, **more: Any) -> dict[str, Any]:
    packages = ("torch", "transformers", "gguf", "tokenizers", "numpy")
    return {
        "made_by": f"scripts/make_golden.py {command}",
        "date": datetime.date.today().isoformat(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "dtype": "float32",
        "attention": "eager",
        **more,
    }


def numbers(values: Any) -> Any:
    """A tensor or array as nested lists, rounded to what float32 can hold of values of this size."""
    return np.round(np.asarray(values, np.float64), 6).tolist()


# --- the model, from GGUF ---------------------------------------------------------------------------------------------
def rows_to_hf(matrix: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a q or k projection from the order of llama.cpp to that of Hugging Face.

    A head of the file holds rotary pairs side by side, x0 y0 x1 y1 ..; Hugging Face rotates halves, x0 x1 .. y0 y1 ..
    """
    half = matrix.shape[0] // num_heads // 2
    order = [head * 2 * half + 2 * i + part for head in range(num_heads) for part in (0, 1) for i in range(half)]
    return matrix[order]


_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_gguf(reader: GGUFReader) -> Any:
    """A Llama of transformers with the file's weights in float32; every tensor is used exactly once."""

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    config = transformers.LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=field("llama.rope.dimension_count"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings="output.weight" not in {tensor.name for tensor in reader.tensors},
        attn_implementation="eager",
    )
    state = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{_TENSORS[parts[2]]}.weight"
            if parts[2] in ("attn_q", "attn_k"):
                values = rows_to_hf(values, heads if parts[2] == "attn_q" else kv_heads)
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}[parts[0]]
            name += ".weight"
        state[name] = torch.from_numpy(np.ascontiguousarray(values))
    return build(config, state)


def build(config: transformers.PretrainedConfig, state: Mapping[str, torch.Tensor]) -> Any:
    """The model of transformers that the config names, with these weights."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    allowed = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - allowed:
        raise SystemExit(f"tensors do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


def check_weights(model: Any, path: Path) -> None:
    """transformers' own reading of the file must be equal bit by bit."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ours, other = model.state_dict(), theirs.state_dict()
    different = [name for name in ours | other if not torch.equal(ours[name], other[name])]
    if different or theirs.config.rope_parameters != model.config.rope_parameters:
        raise SystemExit(f"transformers' own GGUF loader disagrees: {different[:3]}, {theirs.config.rope_parameters}")


# --- the tokens -------------------------------------------------------------------------------------------------------
def load_tokenizer(reader: GGUFReader) -> tokenizers.Tokenizer:
    """Byte-level BPE as SmolLM2 publishes it: every digit alone, then the pattern of GPT-2, no token at the start.

    transformers' own conversion of this file leaves the splitting of digits out, which moves a border where white space
    stands before a digit; the prompt "whitespace" shows it.
    """
    if reader.fields["tokenizer.ggml.pre"].contents() != "smollm":
        raise SystemExit("expected the pre-tokenizer 'smollm'")
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(line.split(" ")) for line in reader.fields["tokenizer.ggml.merges"].contents()]
    bpe = tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, merges)
    tokenizer = tokenizers.Tokenizer(bpe)
    split = tokenizers.pre_tokenizers
    steps = [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = split.Sequence(steps)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


# --- greedy continuation ----------------------------------------------------------------------------------------------
@torch.inference_mode()
def greedy(model: Any, prompt: list[int], steps: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and the logits [steps, V] that each was chosen from."""
    cache = transformers.DynamicCache(config=model.config)
    tokens, rows, feed = [], [], prompt
    for _ in range(steps):
        out = model(torch.tensor([feed]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        rows.append(out.logits[0, -1].float())
        feed = [int(rows[-1].argmax())]
        tokens += feed
    return tokens, torch.stack(rows)


@torch.inference_mode()
def whole(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Logits [steps, V] of the same tokens, computed as one sequence, without a cache, with torch's fused attention."""
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([prompt + tokens[:-1]])
    logits = model(ids, use_cache=False, logits_to_keep=len(tokens)).logits[0]
    model.set_attn_implementation("eager")
    return logits


def record(logits: torch.Tensor, sample_ids: list[int]) -> dict[str, Any]:
    top = logits.topk(TOP, dim=-1)
    return {
        "gaps": numbers(top.values[:, 0] - top.values[:, 1]),
        "log_normalizer": numbers(logits.double().logsumexp(-1)),
        "top_ids": top.indices.tolist(),
        "top_logits": numbers(top.values),
        "sample_logits": numbers(logits[list(SAMPLE_POSITIONS)][:, sample_ids]),
    }


def make_smollm2(path: Path, out: Path) -> None:
    reader = GGUFReader(path)
    model, tokenizer = load_gguf(reader), load_tokenizer(reader)
    check_weights(model, path)
    template = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    sample_ids = sorted(np.random.default_rng(0).choice(model.config.vocab_size, SAMPLE_VOCAB, replace=False).tolist())

    entries, noise, gaps = [], [], []
    for prompt in golden_prompts.PROMPTS:
        text = prompt.text
        if text is None:
            text = template.apply_chat_template(list(prompt.messages or ()), tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text).ids
        if tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise SystemExit(f"{prompt.name}: the tokens do not give the text back")
        tokens, logits = greedy(model, ids, OUTPUT_TOKENS)
        again = whole(model, ids, tokens)
        noise.append(float((again - logits).abs().max()))
        if again.argmax(-1).tolist() != tokens:
            print(f"{prompt.name}: a near-tie, the whole sequence prefers another token")
        entry: dict[str, Any] = {"name": prompt.name, "kind": prompt.kind, "text": text}
        if prompt.messages is not None:
            entry["messages"] = list(prompt.messages)
        entry |= {"token_ids": ids, "output_text": tokenizer.decode(tokens, skip_special_tokens=False)}
        entry |= {"output_token_ids": tokens, **record(logits, sample_ids)}
        entries.append(entry)
        gaps += [[gap, prompt.name, position] for position, gap in enumerate(entry["gaps"])]
        least = min(entry["gaps"])
        print(f"{prompt.name}: {len(ids)} + {len(tokens)} tokens, gap {least:.6f}, noise {noise[-1]:.1e}", flush=True)

    data = {
        "provenance": provenance(
            f"smollm2 --gguf {path.name}",
            gguf={"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
            license="the weights are SmolLM2-135M-Instruct, Apache-2.0",
            float32_noise=max(noise),
        ),
        "sample_ids": sample_ids,
        "sample_positions": list(SAMPLE_POSITIONS),
        "smallest_gaps": sorted(gaps)[:8],
        "score": score(model, tokenizer),
        "prompts": entries,
    }
    out.write_text(to_json(data, depth=3) + "\n")
    print(json.dumps({"file": out.name, "float32_noise": max(noise), "smallest_gaps": sorted(gaps)[:4]}))


@torch.inference_mode()
def score(model: Any, tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """Log-probability of each token of one text but the first, and the perplexity exp(-mean)."""
    ids = tokenizer.encode(golden_prompts.SCORED_TEXT).ids
    logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    each = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return {
        "text": golden_prompts.SCORED_TEXT,
        "token_ids": ids,
        "logprobs": [None, *numbers(each)],
        "mean_logprob": float(each.mean()),
        "perplexity": float(torch.exp(-each.mean())),
    }


# --- tiny models ------------------------------------------------------------------------------------------------------
def build_tiny(name: str) -> tuple[dict[str, np.ndarray], Any]:
    """A model of tests/golden/tiny_models.py: its weights, and transformers' model of them."""
    config = copy.deepcopy(tiny_models.VARIANTS[name])  # transformers edits the dicts
    tensors = tiny_models.weights(config, list(tiny_models.VARIANTS).index(name))
    hf_config = transformers.AutoConfig.for_model(**config)
    return tensors, build(hf_config, {key: torch.from_numpy(value) for key, value in tensors.items()})


def make_tiny(out: Path) -> None:
    entries = []
    for seed, (name, config) in enumerate(tiny_models.VARIANTS.items()):
        tensors, model = build_tiny(name)
        runs = []
        for prompt in tiny_models.prompts(seed, config["vocab_size"]):
            tokens, logits = greedy(model, prompt, TINY_OUTPUT_TOKENS)
            top = logits.topk(2, dim=-1).values
            runs.append(
                {
                    "token_ids": prompt,
                    "output_token_ids": tokens,
                    "smallest_gap": float((top[:, 0] - top[:, 1]).min()),
                    "log_normalizer": numbers(logits.double().logsumexp(-1)),
                    "chosen_logits": numbers(logits.max(-1).values),
                    "first_logits": numbers(logits[0]),
                    "last_logits": numbers(logits[-1]),
                }
            )
        digest = tiny_models.digest(tensors)
        entries.append({"name": name, "seed": seed, "config": config, "sha256": digest, "runs": runs})
        distinct = len({token for run in runs for token in run["output_token_ids"]})
        gap = min(run["smallest_gap"] for run in runs)
        print(f"{name}: {distinct} distinct tokens, gap {gap:.5f}, {model.config.rope_parameters}")
    out.write_text(to_json({"provenance": provenance("tiny"), "models": entries}, depth=5) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make golden values with Hugging Face transformers.")
    parser.add_argument("--threads", type=int, default=1, help="of torch; more than free cores is far slower")
    commands = parser.add_subparsers(dest="command", required=True)
    smollm2 = commands.add_parser("smollm2", help="golden values of the default model")
    smollm2.add_argument("--gguf", type=Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    smollm2.add_argument("--out", type=Path, default=GOLDEN / "smollm2.json")
    tiny = commands.add_parser("tiny", help="golden values of the small random models")
    tiny.add_argument("--out", type=Path, default=GOLDEN / "tiny.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.command == "smollm2":
        make_smollm2(args.gguf, args.out)
    else:
        make_tiny(args.out)


if __name__ == "__main__":
    main()
