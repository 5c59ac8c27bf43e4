"""`LlamaConfig` in the terms of Hugging Face config.json and of GGUF metadata. Imports no jax."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from jpaged.errors import ModelLoadError
from jpaged.models.config import RopeScaling

if TYPE_CHECKING:
    from jpaged.models.config import LlamaConfig

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_bias",
    "sliding_window",
    "max_position_embeddings",
    "bos_token_id",
)
# What a config.json stands for where it lacks a key, as far as it is not what `LlamaConfig` has.
_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
# What `from_hf` refuses unless it has one of these values: each would change the result.
_REFUSED_UNLESS = {
    "hidden_act": (None, "silu", "swish"),
    "mlp_bias": (None, False),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "sliding_window_pattern": (None,),
}
# The same for one of the two architectures. A Llama of transformers knows of no window, a Mistral of no bias; both pass
# such a key over, but its author must have meant something.
_REFUSED_IN = {"llama": {"sliding_window": (None,)}, "mistral": {"attention_bias": (None, False)}}


_FLOATS = ("rms_norm_eps", "rope_theta")
_BOOLS = ("tie_word_embeddings", "attention_bias")


def _refuse(field: str, got: object, expected: str) -> ModelLoadError:
    return ModelLoadError(f"{field} of the config is {got!r}, expected {expected}; this model is not supported")


def fields_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LlamaConfig` for a config.json and a generation_config.json.

    Raises:
      ModelLoadError: another architecture, an unsupported feature, a missing field, or one of a wrong type.
    """
    if not isinstance(config, Mapping):
        raise ModelLoadError(f"the config is a {type(config).__name__}, expected a JSON object")
    kind = config.get("model_type")
    if kind not in ("llama", "mistral"):
        raise _refuse("model_type", kind, '"llama" or "mistral"')
    architectures, name = config.get("architectures"), f"{kind.capitalize()}ForCausalLM"
    if architectures not in (None, []) and not (isinstance(architectures, list) and name in architectures):
        raise _refuse("architectures", architectures, f'["{name}"]')
    if kind == "mistral":
        config = _MISTRAL_DEFAULTS | dict(config)
    for key, allowed in (_REFUSED_UNLESS | _REFUSED_IN[kind]).items():
        if config.get(key) not in allowed:
            raise _refuse(key, config[key], " or ".join(repr(a) for a in allowed if a is not None) or "none")
    missing = [key for key in _REQUIRED if config.get(key) is None]
    if missing:
        raise ModelLoadError(f"the config lacks {', '.join(missing)}; is this the config.json of a Llama?")
    _check_windows(config)
    fields = {key: config[key] for key in _REQUIRED}
    fields.update({key: config[key] for key in _OPTIONAL if config.get(key) is not None})
    fields["eos_token_ids"] = _unique([*_ids(config), *_ids(generation)])
    return _typed(fields | _rope_from_hf(config))


def _check_windows(config: Mapping[str, Any]) -> None:
    """Whether all layers see alike: keys that other architectures have for layers with and without a window.

    Raises:
      ModelLoadError: only some layers have a window, or the keys contradict each other.
    """
    window = config.get("sliding_window")
    kind = "full_attention" if window is None else "sliding_attention"
    types = config.get("layer_types")
    if types is not None and not (isinstance(types, list) and all(layer == kind for layer in types)):
        odd = next(layer for layer in types if layer != kind) if isinstance(types, list) else types
        raise _refuse("an entry of layer_types", odd, f'"{kind}" for all, since sliding_window is {window!r}')
    if window is not None and config.get("use_sliding_window") not in (None, True):
        raise _refuse("use_sliding_window", config["use_sliding_window"], f"true beside a sliding_window ({window!r})")
    if window is not None and config.get("max_window_layers") not in (None, 0):
        raise _refuse("max_window_layers", config["max_window_layers"], "0: all layers have the window, or none has")


def _typed(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, each of its type: files may hold anything, and whole numbers where fractions are meant."""
    for name, value in fields.items():
        if name in _BOOLS:
            if not isinstance(value, bool):
                raise ModelLoadError(f"{name} is {value!r}, expected true or false")
        elif name in _FLOATS:
            fields[name] = _number(name, value)
        elif name not in ("eos_token_ids", "rope_scaling") and value is not None:
            _integer(name, value)
    return fields


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelLoadError(f"{name} is {value!r}, expected a number above 0")
    try:
        return float(value)
    except OverflowError:
        raise ModelLoadError(f"{name} is an integer of {int(value).bit_length()} bits, expected a number") from None


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelLoadError(f"{name} is {value!r}, expected an integer above 0")
    return value


def _positive(name: str, value: object) -> int:
    if (number := _integer(name, value)) <= 0:
        raise ModelLoadError(f"{name} is {value!r}, expected an integer above 0")
    return number


def _unique(ids: list[Any]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_integer("eos_token_id", token) for token in ids))


def _ids(config: Mapping[str, Any]) -> list[Any]:
    value = config.get("eos_token_id")
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _rope_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`: two keys up to transformers 4, one `rope_parameters` since 5."""
    key = "rope_scaling" if config.get("rope_parameters") is None else "rope_parameters"
    if not isinstance(config.get(key), Mapping | None):
        raise _refuse(key, config[key], "an object or null")
    scaling = dict(config.get(key) or {})
    theta = scaling.pop("rope_theta", config.get("rope_theta"))
    fields: dict[str, Any] = {} if theta is None else {"rope_theta": theta}
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise _refuse("partial_rotary_factor", scaling["partial_rotary_factor"], "1.0")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return fields
    keys = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "longrope": ("short_factor", "long_factor", "attention_factor"),
    }
    if not isinstance(kind, str) or kind not in keys:  # a list cannot be looked up
        raise _refuse("the rope type", kind, '"default", "linear" or "llama3"')
    missing = [key for key in keys[kind] if scaling.get(key) is None]
    if missing:
        raise ModelLoadError(f'rope scaling "{kind}" of the config lacks {", ".join(missing)}')
    if kind == "longrope":
        # The form in which `to_hf` writes explicit factors; two sets of factors, or a factor on the logits, are not
        # supported.
        if scaling["short_factor"] != scaling["long_factor"] or scaling["attention_factor"] != 1.0:
            raise _refuse("the rope type", kind, "equal short_factor and long_factor, and attention_factor 1.0")
        if not isinstance(scaling["long_factor"], list):
            raise _refuse("long_factor", scaling["long_factor"], "a list")
        factors = tuple(_number("an entry of long_factor", factor) for factor in scaling["long_factor"])
        return fields | {"rope_scaling": RopeScaling(kind="factors", factors=factors)}
    length = "original_max_position_embeddings"
    values: dict[str, Any] = {key: (_integer if key == length else _number)(key, scaling[key]) for key in keys[kind]}
    return fields | {"rope_scaling": RopeScaling(kind=kind, **values)}  # type: ignore  # one of `keys`


def hf_from_config(config: "LlamaConfig") -> dict[str, Any]:
    """Contents of config.json."""
    eos = list(config.eos_token_ids)
    kind, left_out = ("llama", "sliding_window") if config.sliding_window is None else ("mistral", "attention_bias")
    result: dict[str, Any] = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "hidden_act": "silu",
        "mlp_bias": False,
        **{key: getattr(config, key) for key in (*_REQUIRED, *_OPTIONAL, "rope_theta") if key != left_out},
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "rope_scaling": None,
    }
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "factors":
        result["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": list(scaling.factors),
            "long_factor": list(scaling.factors),
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": config.max_position_embeddings,
        }
    elif scaling is not None:
        result["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
                result["rope_scaling"][key] = getattr(scaling, key)
    return result


def fields_from_gguf(
    metadata: Mapping[str, Any], tensor_names: Collection[str], rope_factors: tuple[float, ...] | None
) -> dict[str, Any]:
    """The arguments of `LlamaConfig` for the key-value pairs of a GGUF file.

    Raises:
      ModelLoadError: another architecture, an unsupported feature, a missing field, or one of a wrong type.
    """
    if metadata.get("general.architecture") != "llama":
        raise _refuse("general.architecture", metadata.get("general.architecture"), '"llama"')

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"llama.{key}", default)

    for key in ("expert_count", "attention.sliding_window_pattern"):
        if get(key):
            raise _refuse(f"llama.{key}", get(key), "none")
    names = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_theta": "rope.freq_base",
        "max_position_embeddings": "context_length",
    }
    required = [key for key in names if key not in ("num_key_value_heads", "head_dim", "rope_theta")]
    missing = [f"llama.{names[key]}" for key in required if get(names[key]) is None]
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocab_size = get("vocab_size", len(tokens) if isinstance(tokens, list) else None)
    if vocab_size is None:
        missing.append("llama.vocab_size")
    if missing:
        raise ModelLoadError(f"the GGUF metadata lack {', '.join(missing)}")
    fields = {field: get(key) for field, key in names.items() if get(key) is not None}
    fields["sliding_window"] = get("attention.sliding_window") or None  # of every layer; some writers put 0 for none
    fields["vocab_size"] = vocab_size
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(get(key), list):
            raise _refuse(f"llama.{key}", get(key), "one number for all layers")
    width, heads = (_positive(f"llama.{names[key]}", fields[key]) for key in ("hidden_size", "num_attention_heads"))
    dim = fields.get("head_dim", width // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if get(key, dim) != dim:
            raise _refuse(f"llama.{key}", get(key), f"the width of a head ({dim})")
    fields["rope_scaling"] = _rope_scaling_from_gguf(get, rope_factors)
    fields["tie_word_embeddings"] = "output.weight" not in tensor_names
    fields["attention_bias"] = "blk.0.attn_q.bias" in tensor_names
    fields["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    # Instruct models end a turn by another token than a text.
    ids = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    fields["eos_token_ids"] = _unique([token for token in ids if token is not None])
    return _typed(fields)


def _rope_scaling_from_gguf(get: Any, rope_factors: tuple[float, ...] | None) -> RopeScaling | None:
    kind = get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise _refuse("llama.rope.scaling.type", kind, '"none" or "linear"')
    factor = get("rope.scale_linear", 1.0)  # the key of old files
    if kind == "linear":
        factor = get("rope.scaling.factor", factor)
    if rope_factors is not None:
        if factor != 1.0:
            raise _refuse("llama.rope.scaling.factor", factor, "1.0 beside the tensor rope_freqs.weight")
        return RopeScaling(kind="factors", factors=rope_factors)
    return None if factor == 1.0 else RopeScaling(kind="linear", factor=_number("llama.rope.scaling.factor", factor))
