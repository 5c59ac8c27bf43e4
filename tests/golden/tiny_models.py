"""Small random Llamas and Mistrals, one for each branch, that two sides can rebuild from a config and a seed.

The recipe, which needs numpy alone: one `numpy.random.default_rng(seed)` draws `standard_normal` float32 values for
each tensor in the sorted order of its Hugging Face name; the values are scaled by the kind of tensor (`_scale`), and
norm weights are shifted by one. `digest` tells whether two sides made the same weights.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

Config = Mapping[str, Any]

_BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# A Mistral is a Llama with a sliding window on every layer.
_MISTRAL = {
    **{key: value for key, value in _BASE.items() if key != "attention_bias"},
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
}
_LEFT_OUT = ("num_key_value_heads", "rope_theta", "tie_word_embeddings", "attention_bias", "rms_norm_eps")

# name -> config of Hugging Face. Seeds are the places in this table.
VARIANTS: dict[str, dict[str, Any]] = {
    "mha": {**_BASE, "num_key_value_heads": 4},
    "gqa": {**_BASE},
    "mqa": {**_BASE, "num_key_value_heads": 1},
    "defaults": {key: value for key, value in _BASE.items() if key not in _LEFT_OUT},
    "head_dim": {**_BASE, "hidden_size": 48, "head_dim": 16},
    "odd_heads": {**_BASE, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8},
    "tied": {**_BASE, "tie_word_embeddings": True},
    "bias": {**_BASE, "attention_bias": True},
    "rope_theta": {**_BASE, "rope_theta": 500.0, "rms_norm_eps": 1e-2},
    "linear": {**_BASE, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "linear_old_key": {**_BASE, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "llama3": {**_BASE, "head_dim": 16, "rope_scaling": _LLAMA3},
    "rope_parameters": {
        **{key: value for key, value in _BASE.items() if key != "rope_theta"},
        "rope_parameters": {**_LLAMA3, "rope_theta": 5000.0, "factor": 4.0},
    },
    "llama32_like": {
        **_BASE,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "head_dim": 16,
        "rope_theta": 500000.0,
        "rope_scaling": {**_LLAMA3, "factor": 32.0},
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "eos_token_id": [2, 3, 4],
        "initializer_range": 0.02,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "torch_dtype": "float32",
        "use_cache": True,
    },
    "bias_mqa_linear_tied": {
        **_BASE,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_theta": 20000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "mistral": {**_MISTRAL, "sliding_window": 5, "head_dim": 16},
    "mistral_page": {**_MISTRAL, "sliding_window": 8, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "mistral_defaults": {
        key: value for key, value in _MISTRAL.items() if key not in ("num_key_value_heads", "rms_norm_eps")
    }
    | {"num_attention_heads": 16, "hidden_size": 64},  # 8 KV heads and a window of 4,096 by default
}


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape [out, in] of every tensor of the checkpoint, by name."""
    embed, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or (8 if config["model_type"] == "mistral" else heads)
    head_dim = config.get("head_dim") or embed // heads
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], embed),
        "model.norm.weight": (embed,),
    }
    if not config.get("tie_word_embeddings", False):
        tensors["lm_head.weight"] = (config["vocab_size"], embed)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        q_dim, kv_dim = heads * head_dim, kv_heads * head_dim
        for name, rows, columns in (
            ("q", q_dim, embed),
            ("k", kv_dim, embed),
            ("v", kv_dim, embed),
            ("o", embed, q_dim),
        ):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = (rows, columns)
            if config.get("attention_bias", False):
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        tensors[f"{prefix}mlp.gate_proj.weight"] = (ffn, embed)
        tensors[f"{prefix}mlp.up_proj.weight"] = (ffn, embed)
        tensors[f"{prefix}mlp.down_proj.weight"] = (embed, ffn)
        tensors[f"{prefix}input_layernorm.weight"] = (embed,)
        tensors[f"{prefix}post_attention_layernorm.weight"] = (embed,)
    return dict(sorted(tensors.items()))


def _scale(name: str, shape: tuple[int, ...]) -> float:
    """Large enough that attention looks at some tokens more than at others, and that logits are far apart."""
    if name.endswith("norm.weight"):
        return 0.2
    if name.endswith(".bias"):
        return 0.15
    gain = {"q_proj": 1.4, "k_proj": 1.4, "lm_head": 2.5, "embed_tokens": 1.0}.get(name.split(".")[-2], 1.0)
    return gain / shape[-1] ** 0.5


def weights(config: Config, seed: int) -> dict[str, np.ndarray]:
    """Hugging Face name -> float32 values, the same for everyone who has the config and the seed."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes(config).items():
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(_scale(name, shape))
        made[name] = values + np.float32(1.0) if name.endswith("norm.weight") else values
    return made


def prompts(seed: int, vocab_size: int) -> list[list[int]]:
    """Three prompts: one token, 17 tokens, and 90 tokens (beyond the original context of the scaled rotary tables)."""
    rng = np.random.default_rng(10_000 + seed)
    return [rng.integers(0, vocab_size, size=length).tolist() for length in (1, 17, 90)]


def digest(tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names and little-endian float32 values, in the order of the names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(np.ascontiguousarray(tensors[name], dtype="<f4").tobytes())
    return total.hexdigest()
