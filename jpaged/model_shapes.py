"""`MODEL_SHAPES`: configs of well-known models, so that memory can be planned without their files. Imports no jax."""

from typing import Any, Final

from jpaged.errors import ConfigError
from jpaged.models.config import LlamaConfig, RopeScaling

_LLAMA_3_VOCABULARY: Final = 128256


def _llama3_rope(factor: float) -> RopeScaling:
    return RopeScaling(kind="llama3", factor=factor, low_freq_factor=1.0, original_max_position_embeddings=8192)


def _shape(vocab: int, width: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, **more},
    )


def _llama_3(*sizes: int, **more: Any) -> LlamaConfig:
    return _shape(_LLAMA_3_VOCABULARY, *sizes, **{"rope_theta": 500000.0, "max_position_embeddings": 131072, **more})


_SMOLLM2_135M: Final = _shape(
    49152, 576, 1536, 30, 9, 3, tie_word_embeddings=True, rope_theta=100000.0, max_position_embeddings=8192
)

# Keys in lower case. OPT-13B, the model of the PagedAttention paper's figures, is no Llama, but its K and V take what
# those of llama-2-13b take: 40 layers of 40 heads of 128.
MODEL_SHAPES: Final[dict[str, LlamaConfig]] = {
    "llama-2-7b": _shape(32000, 4096, 11008, 32, 32, 32, max_position_embeddings=4096),
    "llama-2-13b": _shape(32000, 5120, 13824, 40, 40, 40, max_position_embeddings=4096),
    "llama-2-70b": _shape(32000, 8192, 28672, 80, 64, 8, max_position_embeddings=4096),
    "llama-3-8b": _llama_3(4096, 14336, 32, 32, 8, max_position_embeddings=8192),
    "llama-3-70b": _llama_3(8192, 28672, 80, 64, 8, max_position_embeddings=8192),
    "llama-3.1-8b": _llama_3(4096, 14336, 32, 32, 8, rope_scaling=_llama3_rope(8.0)),
    "llama-3.1-70b": _llama_3(8192, 28672, 80, 64, 8, rope_scaling=_llama3_rope(8.0)),
    "llama-3.2-1b": _llama_3(2048, 8192, 16, 32, 8, tie_word_embeddings=True, rope_scaling=_llama3_rope(32.0)),
    "llama-3.2-3b": _llama_3(3072, 8192, 28, 24, 8, tie_word_embeddings=True, rope_scaling=_llama3_rope(32.0)),
    "mistral-7b-v0.1": _shape(32000, 4096, 14336, 32, 32, 8, sliding_window=4096, max_position_embeddings=32768),
    "mistral-7b-v0.3": _shape(32768, 4096, 14336, 32, 32, 8, rope_theta=1e6, max_position_embeddings=32768),
    "smollm2-135m": _SMOLLM2_135M,
    "smollm2-135m-instruct": _SMOLLM2_135M,
    "tinyllama-1.1b": _shape(32000, 2048, 5632, 22, 32, 4, max_position_embeddings=2048),
}


def model_shape(name: str) -> LlamaConfig:
    """The config of a well-known model; case does not matter.

    Raises:
      ConfigError: not one of `MODEL_SHAPES`.

    Example:
      >>> f"{model_shape('Llama-3-8B').num_parameters:,}"
      '8,030,261,248'
    """
    if (config := MODEL_SHAPES.get(name.lower())) is None:
        raise ConfigError(f"the model is {name!r}, expected one of {', '.join(MODEL_SHAPES)}")
    return config
