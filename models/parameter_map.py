"""Which checkpoint tensor goes into which part of which parameter. Imports no jax.

Checkpoints hold one matrix [out, in] for each projection; a Llama holds fused kernels [in, out]. Names on the left are
those of Hugging Face, which are the only ones that readers and writers exchange; `gguf.py` translates its own.

    model.embed_tokens.weight                     embed
    model.layers.i.input_layernorm.weight         layers/i/attention_norm/scale
    model.layers.i.self_attn.{q,k,v}_proj.weight  layers/i/attention/qkv/kernel, columns [0, Hq D), then Hkv D, Hkv D
    model.layers.i.self_attn.o_proj.weight        layers/i/attention/o/kernel
    model.layers.i.post_attention_layernorm.weight layers/i/mlp_norm/scale
    model.layers.i.mlp.{gate,up}_proj.weight      layers/i/mlp/gate_up/kernel, columns [0, F), [F, 2 F)
    model.layers.i.mlp.down_proj.weight           layers/i/mlp/down/kernel
    model.norm.weight                             norm/scale
    lm_head.weight                                lm_head/kernel, unless tied
"""

from dataclasses import dataclass
from typing import Any

from jpaged.errors import ConfigError
from jpaged.models.config import LlamaConfig

# Names of attributes and places in lists, as flax gives them.
ParameterPath = tuple[Any, ...]

# Forms in which the kernels of the layers may be held, in place of a float dtype (`jpaged.models.quantised`).
WEIGHT_FORMS = ("int8", "fp8")

LM_HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor and its place in a parameter.

    Attributes:
      name: Hugging Face name.
      shape: its shape in the checkpoint.
      start: first column of the parameter that it fills.
      transposed: a matrix that is stored [out, in] and wanted [in, out].
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0
    transposed: bool = False

    @property
    def stop(self) -> int:
        """One past the last column that it fills."""
        return self.start + (self.shape[0] if self.transposed else self.shape[-1])


def parameter_map(config: LlamaConfig) -> dict[ParameterPath, tuple[Piece, ...]]:
    """Every parameter of a Llama and the checkpoint tensors that fill it, in order of their columns.

    Example:
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
      ...                      num_attention_heads=4, num_key_value_heads=2)
      >>> for piece in parameter_map(config)["layers", 0, "attention", "qkv", "kernel"]:
      ...     print(piece.name, piece.shape, piece.start, piece.stop)
      model.layers.0.self_attn.q_proj.weight (16, 16) 0 16
      model.layers.0.self_attn.k_proj.weight (8, 16) 16 24
      model.layers.0.self_attn.v_proj.weight (8, 16) 24 32
    """
    embed, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim

    def plain(name: str, *shape: int) -> tuple[Piece, ...]:
        return (Piece(name, shape),)

    def kernel(prefix: str, inputs: int, **outputs: int) -> tuple[Piece, ...]:
        pieces, start = [], 0
        for name, size in outputs.items():
            pieces.append(Piece(f"{prefix}{name}.weight", (size, inputs), start, transposed=True))
            start += size
        return tuple(pieces)

    def bias(prefix: str, **outputs: int) -> tuple[Piece, ...]:
        pieces, start = [], 0
        for name, size in outputs.items():
            pieces.append(Piece(f"{prefix}{name}.bias", (size,), start))
            start += size
        return tuple(pieces)

    result: dict[ParameterPath, tuple[Piece, ...]] = {("embed",): plain(EMBED, config.vocab_size, embed)}
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        layer = {
            ("attention_norm", "scale"): plain(f"{prefix}input_layernorm.weight", embed),
            ("attention", "qkv", "kernel"): kernel(attention, embed, q_proj=q, k_proj=kv, v_proj=kv),
            ("attention", "o", "kernel"): kernel(attention, q, o_proj=embed),
            ("mlp_norm", "scale"): plain(f"{prefix}post_attention_layernorm.weight", embed),
            ("mlp", "gate_up", "kernel"): kernel(mlp, embed, gate_proj=inner, up_proj=inner),
            ("mlp", "down", "kernel"): kernel(mlp, inner, down_proj=embed),
        }
        if config.attention_bias:
            layer["attention", "qkv", "bias"] = bias(attention, q_proj=q, k_proj=kv, v_proj=kv)
            layer["attention", "o", "bias"] = bias(attention, o_proj=embed)
        result |= {("layers", i, *path): pieces for path, pieces in layer.items()}
    result["norm", "scale"] = plain("model.norm.weight", embed)
    if not config.tie_word_embeddings:
        result["lm_head", "kernel"] = kernel("", embed, lm_head=config.vocab_size)
    return result


def is_quantisable(path: ParameterPath) -> bool:
    """Whether a parameter is one of the four kernels of a layer.

    Example:
      >>> is_quantisable(("layers", 0, "mlp", "down", "kernel")), is_quantisable(("lm_head", "kernel"))
      (True, False)
    """
    return path[0] == "layers" and path[-1] == "kernel"


def check_form(weights: object) -> None:
    """Refuses unknown forms of weights.

    Raises:
      ConfigError: not one of `WEIGHT_FORMS`.
    """
    if weights not in WEIGHT_FORMS:
        raise ConfigError(f"weights is {weights!r:.80}, expected one of {', '.join(WEIGHT_FORMS)}, or None")


def path_name(path: ParameterPath) -> str:
    """A parameter's path as it is written in messages and checkpoints: layers/0/mlp/down/kernel."""
    return "/".join(map(str, path))
