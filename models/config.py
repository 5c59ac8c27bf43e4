"""`LlamaConfig`: the shape of a Llama or a Mistral, from and to the names that checkpoints use. Imports no jax."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jpaged.errors import ModelLoadError


def _require(ok: bool, what: str, got: object, expected: str) -> None:
    if not ok:
        raise ModelLoadError(f"{what} is {got!r}, expected {expected}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    # An integer is finite, and may be too long for `math.isfinite`.
    return (_is_int(value) or (isinstance(value, float) and math.isfinite(value))) and value > 0  # type: ignore


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the rotary frequencies of a model with a stretched context differ from the plain ones.

    Attributes:
      kind: "linear" divides every frequency by `factor`. "llama3" divides the low frequencies by `factor`, keeps the
        high ones and blends in between. "factors" divides each frequency by its own entry of `factors` (GGUF files
        hold llama3 scaling in this form).
      factor: the stretch; unused by "factors".
      low_freq_factor, high_freq_factor: borders of the blend, in wavelengths per original context ("llama3").
      original_max_position_embeddings: tokens of the context before it was stretched ("llama3").
      factors: head_dim / 2 divisors ("factors").

    Raises:
      ModelLoadError: a value is out of range.

    Example:
      >>> RopeScaling(kind="linear", factor=2.0).factor
      2.0
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        kinds = ("linear", "llama3", "factors")
        _require(self.kind in kinds, "the rope scaling type", self.kind, f"one of {', '.join(kinds)}")
        _require(_is_positive(self.factor), "factor of the rope scaling", self.factor, "a number above 0")
        if self.kind == "llama3":
            low, high = self.low_freq_factor, self.high_freq_factor
            _require(_is_positive(low), "low_freq_factor", low, "a number above 0")
            _require(_is_positive(high) and high > low, "high_freq_factor", high, f"more than low_freq_factor ({low})")
            length = self.original_max_position_embeddings
            _require(_is_int(length) and length > 0, "original_max_position_embeddings", length, "an integer above 0")
        ok = all(_is_positive(f) for f in self.factors) and bool(self.factors) == (self.kind == "factors")
        _require(ok, "factors of the rope scaling", self.factors, 'numbers above 0 for "factors", else none')


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The shape of a Llama, or of a Mistral, which is one with a sliding window. Hashable.

    Field names are those of Hugging Face.

    Attributes:
      vocab_size: tokens of the vocabulary (V).
      hidden_size: width of the residual stream (E).
      intermediate_size: width of the MLP (F).
      num_hidden_layers: layers.
      num_attention_heads: query heads (Hq).
      num_key_value_heads: KV heads (Hkv), a divisor of Hq. `None`: Hq.
      head_dim: width of a head (D), even. `None`: E / Hq.
      rms_norm_eps: added to the mean square in the norms.
      rope_theta: base of the rotary frequencies.
      rope_scaling: how they are stretched, if at all.
      tie_word_embeddings: the output projection is the embedding table.
      attention_bias: the q, k, v and o projections have biases. Not together with a sliding window.
      sliding_window: in every layer, a token sees itself and the `sliding_window` - 1 tokens before it. `None`: all
        tokens before it.
      max_position_embeddings: tokens of the longest context.
      bos_token_id: id that begins a text, if there is one.
      eos_token_ids: ids that end a text.

    Raises:
      ModelLoadError: a field is out of range, or two contradict each other; the message names them.

    Example:
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
      ...                      num_attention_heads=4, num_key_value_heads=2)
      >>> config.head_dim, config.num_parameters
      (4, 4944)
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = None  # type: ignore
    head_dim: int = None  # type: ignore
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    sliding_window: int | None = None
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for name in (*sizes, "max_position_embeddings"):
            value = getattr(self, name)
            _require(_is_int(value) and value > 0, name, value, "an integer above 0")
        # A damaged count would be met as a list of millions of missing tensors.
        _require(self.num_hidden_layers <= 1000, "num_hidden_layers", self.num_hidden_layers, "at most 1000")
        heads = self.num_attention_heads
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", heads)
        if self.head_dim is None:
            whole = self.hidden_size % heads == 0
            expected = f"a multiple of num_attention_heads ({heads}) where head_dim is not given"
            _require(whole, "hidden_size", self.hidden_size, expected)
            object.__setattr__(self, "head_dim", self.hidden_size // heads)
        kv_heads, dim = self.num_key_value_heads, self.head_dim
        divides = _is_int(kv_heads) and kv_heads > 0 and heads % kv_heads == 0
        _require(divides, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
        _require(_is_int(dim) and dim > 0 and dim % 2 == 0, "head_dim", dim, "an even integer above 0")
        for name in ("rms_norm_eps", "rope_theta"):
            _require(_is_positive(getattr(self, name)), name, getattr(self, name), "a number above 0")
        for name in ("tie_word_embeddings", "attention_bias"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        if self.sliding_window is not None:
            window = self.sliding_window
            _require(_is_int(window) and window > 0, "sliding_window", window, "an integer above 0, or none")
            # No architecture of Hugging Face computes both, so it could not be saved.
            _require(not self.attention_bias, "attention_bias", True, f"false beside a sliding_window ({window})")
        ids = self.eos_token_ids if self.bos_token_id is None else (self.bos_token_id, *self.eos_token_ids)
        in_range = all(_is_int(token) and 0 <= token < self.vocab_size for token in ids)
        _require(in_range, "bos_token_id, eos_token_ids", ids, f"token ids below vocab_size ({self.vocab_size})")
        if self.rope_scaling is not None and self.rope_scaling.kind == "factors":
            count = len(self.rope_scaling.factors)
            _require(count == dim // 2, "the number of rope factors", count, f"head_dim / 2 ({dim // 2})")

    @property
    def num_parameters(self) -> int:
        """Weights of the model; a tied output projection counts once."""
        embed, heads, dim = self.hidden_size, self.num_attention_heads, self.head_dim
        qkv = (heads + 2 * self.num_key_value_heads) * dim
        bias = qkv + embed if self.attention_bias else 0
        layer = embed * (qkv + heads * dim + 3 * self.intermediate_size + 2) + bias
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_hidden_layers * layer + tables * self.vocab_size * embed + embed

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "LlamaConfig":
        """The config of a Hugging Face folder.

        Keys that do not change what the model computes (such as `torch_dtype`, `use_cache`, dropout rates) are passed
        over; those that would, and are not supported, are refused by name.

        Args:
          config: contents of config.json.
          generation: contents of generation_config.json; its end-of-sequence ids join those of `config`.

        Raises:
          ModelLoadError: another architecture, an unsupported feature, a missing or wrong field.
        """
        from jpaged.models.config_formats import fields_from_hf

        return cls(**fields_from_hf(config, generation or {}))

    def to_hf(self) -> dict[str, Any]:
        """Contents of a config.json that Hugging Face transformers (4 and 5) and `from_hf` read."""
        from jpaged.models.config_formats import hf_from_config

        return hf_from_config(self)

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        *,
        tensor_names: Collection[str],
        rope_factors: tuple[float, ...] | None = None,
    ) -> "LlamaConfig":
        """The config of a GGUF file.

        Args:
          metadata: the file's key-value pairs.
          tensor_names: names of its tensors: they tell whether embeddings are tied and projections have biases.
          rope_factors: the tensor `rope_freqs.weight`, if there is one: a divisor for each rotary frequency.

        Raises:
          ModelLoadError: another architecture, an unsupported feature, a missing or wrong field.
        """
        from jpaged.models.config_formats import fields_from_gguf

        return cls(**fields_from_gguf(metadata, tensor_names, rope_factors))
