import dataclasses
import json
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jpaged.errors import ModelLoadError
from jpaged.models import LlamaConfig, RopeScaling

from .paged import tiny_config

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
HF = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3_SCALING,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
LLAMA3 = RopeScaling(kind="llama3", factor=32.0, original_max_position_embeddings=8192)
MISTRAL = {  # version 0.1 of the 7B model
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GGUF = {
    "general.architecture": "llama",
    "llama.vocab_size": 49152,
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 64,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 5,
}


def test_llama_3_2_1b():
    config = LlamaConfig.from_hf(HF)
    assert config.num_parameters == 1_235_814_400  # what its model card rounds to 1.23B
    assert config.rope_scaling == LLAMA3
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert (config.bos_token_id, config.head_dim, config.tie_word_embeddings) == (128000, 64, True)


def test_defaults_are_those_of_transformers():
    keys = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = LlamaConfig.from_hf({key: HF[key] for key in keys})
    assert (config.num_key_value_heads, config.head_dim) == (32, 64)
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (1e-6, 10000.0, 2048)
    assert (config.tie_word_embeddings, config.attention_bias, config.rope_scaling) == (False, False, None)
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_scaling": None}, 500000.0, None),
        ({"rope_scaling": {"rope_type": "default"}}, 500000.0, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 500000.0, RopeScaling(kind="linear", factor=2.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, None),
        ({"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 7.0}}, 7.0, LLAMA3),
        ({"rope_parameters": {"rope_type": "default"}}, 500000.0, None),
    ],
)
def test_rope_keys_old_and_new(changes, theta, scaling):
    config = LlamaConfig.from_hf(HF | changes)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_mistral_with_and_without_a_window():
    config = LlamaConfig.from_hf(MISTRAL)
    assert (config.sliding_window, config.num_key_value_heads, config.num_parameters) == (4096, 8, 7_241_732_096)
    assert config == LlamaConfig.from_hf(MISTRAL | {"layer_types": ["sliding_attention"] * 32, "max_window_layers": 0})
    assert config == LlamaConfig.from_hf(MISTRAL | {"use_sliding_window": True})
    without = LlamaConfig.from_hf(MISTRAL | {"sliding_window": None, "layer_types": ["full_attention"] * 32})
    assert without == dataclasses.replace(config, sliding_window=None)
    assert (without.to_hf()["model_type"], config.to_hf()["model_type"]) == ("llama", "mistral")  # the same without one


def test_defaults_of_mistral_are_those_of_transformers():
    left_out = ("num_key_value_heads", "max_position_embeddings", "sliding_window")
    config = LlamaConfig.from_hf({key: value for key, value in MISTRAL.items() if key not in left_out})
    assert (config.num_key_value_heads, config.max_position_embeddings, config.sliding_window) == (8, 131072, 4096)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures of the config is ['LlamaForCausalLM']"),
        (
            {"layer_types": ["sliding_attention", "full_attention"] * 16},
            "layer_types of the config is 'full_attention'",
        ),
        ({"layer_types": ["full_attention"] * 32}, '"sliding_attention" for all, since sliding_window is 4096'),
        ({"layer_types": 5}, "layer_types of the config is 5"),
        ({"use_sliding_window": False}, "use_sliding_window of the config is False"),
        ({"max_window_layers": 28}, "max_window_layers of the config is 28"),
        ({"sliding_window": 0}, "sliding_window is 0, expected an integer above 0"),
        ({"sliding_window": [4096, None]}, "sliding_window is [4096, None]"),
        ({"attention_bias": True}, "attention_bias of the config is True"),
    ],
)
def test_refuses_windows_by_name(changes, message):
    with pytest.raises(ModelLoadError) as caught:
        LlamaConfig.from_hf(MISTRAL | changes)
    assert message in str(caught.value)


def test_no_bias_beside_a_window():
    with pytest.raises(ModelLoadError, match=r"attention_bias is True, expected false beside a sliding_window \(5\)"):
        tiny_config(sliding_window=5, attention_bias=True)


def test_end_ids_of_the_generation_config_join():
    config = LlamaConfig.from_hf(HF | {"eos_token_id": 128001}, {"eos_token_id": [128001, 128009], "temperature": 0.6})
    assert config.eos_token_ids == (128001, 128009)


def test_whole_numbers_stand_for_fractions():
    config = LlamaConfig.from_hf(HF | {"rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 2}})
    assert (config.rope_theta, config.rope_scaling) == (10000.0, RopeScaling(kind="linear", factor=2.0))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"eos_token_ids": ()},
        {"eos_token_ids": (3, 4), "bos_token_id": 1, "attention_bias": True, "head_dim": 16},
        {"sliding_window": 5},
        {"rope_scaling": RopeScaling(kind="linear", factor=3.0)},
        {"rope_scaling": RopeScaling(kind="llama3", factor=8.0, low_freq_factor=0.5, high_freq_factor=3.0)},
        {"rope_scaling": RopeScaling(kind="factors", factors=(1.0, 1.5, 2.0, 2.5))},
    ],
)
def test_to_hf_and_back(changes):
    config = tiny_config(**changes)
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2"}, 'model_type of the config is \'qwen2\', expected "llama" or "mistral"'),
        ({"model_type": ["llama"]}, "model_type of the config is ['llama']"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types of the config is 'sliding_attention'"),
        ({"sliding_window_pattern": 6}, "sliding_window_pattern"),
        ({"model_type": None}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act of the config is 'gelu', expected 'silu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type of the config is 'yarn'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope type of the config is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor of the rope scaling is 0.0"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        (
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [2.0],
                    "attention_factor": 1.0,
                }
            },
            "longrope",
        ),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"hidden_size": "2048"}, "hidden_size is '2048', expected an integer above 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor is '2'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 200_000}, "num_hidden_layers is 200000, expected at most 1000"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5, expected a divisor of num_attention_heads"),
        ({"head_dim": 63}, "head_dim is 63, expected an even integer"),
        ({"head_dim": None, "hidden_size": 2049}, "hidden_size is 2049, expected a multiple"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": 128256}, "token ids below vocab_size"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"eos_token_id": [[2]]}, "eos_token_id is [2]"),
        ({"architectures": 7}, "architectures of the config is 7"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "the rope type of the config is ['linear']"),
        ({"rope_theta": 10**400}, "rope_theta is an integer of 1329 bits"),
    ],
)
def test_refuses_by_name(changes, message):
    with pytest.raises(ModelLoadError) as caught:
        LlamaConfig.from_hf(HF | changes)
    assert message in str(caught.value)


def test_a_config_is_hashable_and_frozen():
    config = tiny_config(rope_scaling=RopeScaling(kind="linear", factor=2.0))
    assert hash(config) == hash(tiny_config(rope_scaling=RopeScaling(kind="linear", factor=2.0)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 3  # type: ignore


def test_wrong_number_of_rope_factors():
    with pytest.raises(ModelLoadError, match=r"number of rope factors is 3, expected head_dim / 2 \(4\)"):
        tiny_config(rope_scaling=RopeScaling(kind="factors", factors=(1.0, 2.0, 3.0)))


def test_gguf_smollm2():
    config = LlamaConfig.from_gguf(GGUF, tensor_names=["token_embd.weight"])
    assert config.num_parameters == 134_515_008
    assert (config.tie_word_embeddings, config.attention_bias, config.head_dim) == (True, False, 64)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 5))


def test_gguf_tensors_tell_of_biases_and_of_an_output_projection():
    config = LlamaConfig.from_gguf(GGUF, tensor_names=["output.weight", "blk.0.attn_q.bias"])
    assert (config.tie_word_embeddings, config.attention_bias) == (False, True)


def test_gguf_vocabulary_counts_where_its_size_is_not_given():
    metadata = {key: value for key, value in GGUF.items() if key != "llama.vocab_size"}
    assert LlamaConfig.from_gguf(metadata | {"tokenizer.ggml.tokens": ["a"] * 7}, tensor_names=[]).vocab_size == 7


@pytest.mark.parametrize(("value", "window"), [(4096, 4096), (0, None), (None, None)])
def test_gguf_sliding_window(value, window):
    config = LlamaConfig.from_gguf(GGUF | {"llama.attention.sliding_window": value}, tensor_names=[])
    assert config.sliding_window == window


@pytest.mark.parametrize(
    ("changes", "factors", "scaling"),
    [
        ({}, (1.0,) * 16 + (8.0,) * 16, RopeScaling(kind="factors", factors=(1.0,) * 16 + (8.0,) * 16)),
        ({"llama.rope.scaling.type": "none"}, None, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            None,
            RopeScaling(kind="linear", factor=4.0),
        ),
        ({"llama.rope.scale_linear": 2.0}, None, RopeScaling(kind="linear", factor=2.0)),
    ],
)
def test_gguf_rope_scaling(changes, factors, scaling):
    config = LlamaConfig.from_gguf(GGUF | changes, tensor_names=[], rope_factors=factors)
    assert config.rope_scaling == scaling


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "qwen2"}, "general.architecture of the config is 'qwen2'"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.attention.sliding_window": -1}, "sliding_window is -1"),
        ({"llama.attention.sliding_window_pattern": [True, False]}, "llama.attention.sliding_window_pattern"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type"),
        ({"llama.rope.dimension_count": 32}, "llama.rope.dimension_count"),
        ({"llama.attention.value_length": 32}, "llama.attention.value_length"),
        ({"llama.attention.head_count_kv": [3, 1]}, "llama.attention.head_count_kv"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0, expected an integer above 0"),
        ({"llama.attention.head_count": "x"}, "llama.attention.head_count is 'x', expected an integer above 0"),
        ({"llama.embedding_length": 576.0}, "llama.embedding_length is 576.0, expected an integer above 0"),
        ({"tokenizer.ggml.eos_token_id": [2]}, "eos_token_id is [2]"),
        ({"llama.vocab_size": None, "tokenizer.ggml.tokens": 5}, "lack llama.vocab_size"),
        ({"llama.block_count": None}, "lack llama.block_count"),
        ({"llama.vocab_size": None}, "lack llama.vocab_size"),
    ],
)
def test_gguf_refuses_by_name(changes, message):
    with pytest.raises(ModelLoadError) as caught:
        LlamaConfig.from_gguf(GGUF | changes, tensor_names=[])
    assert message in str(caught.value)


def test_gguf_rope_factors_and_linear_scaling_exclude_each_other():
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight"):
        LlamaConfig.from_gguf(GGUF | {"llama.rope.scale_linear": 2.0}, tensor_names=[], rope_factors=(1.0,) * 32)


ODD = st.sampled_from(
    [None, -1, 0, 1, 0.5, "x", "", [], [None], [[]], {}, {"x": []}, 1e400, float("nan"), 10**400, True]
)
FULL_HF = HF | {"rope_parameters": None, "quantization_config": None, "sliding_window": None, "layer_types": None}
FULL_MISTRAL = FULL_HF | MISTRAL | {"use_sliding_window": True, "max_window_layers": 0}
FULL_GGUF = GGUF | {
    "llama.attention.key_length": 64,
    "llama.attention.value_length": 64,
    "llama.expert_count": 0,
    "llama.attention.sliding_window": 0,
    "llama.rope.scaling.type": "linear",
    "llama.rope.scaling.factor": 2.0,
    "llama.rope.scale_linear": 1.0,
    "tokenizer.ggml.tokens": ["a"] * 7,
    "tokenizer.ggml.eom_token_id": 6,
}


@given(
    st.sampled_from([FULL_HF, FULL_MISTRAL]),
    st.dictionaries(st.sampled_from(sorted(FULL_MISTRAL)), ODD, max_size=3),
    ODD,
)
@example(FULL_HF, {}, None)
@example(FULL_MISTRAL, {}, None)
def test_odd_values_of_a_hf_config_are_read_or_refused(config, changes, eos):
    with suppress(ModelLoadError):
        LlamaConfig.from_hf(config | changes, {"eos_token_id": eos})


@given(
    st.sampled_from(["rope_scaling", "rope_parameters"]),
    st.sampled_from(["linear", "llama3", "longrope"]),
    st.dictionaries(
        st.sampled_from(
            [*LLAMA3_SCALING, "type", "rope_theta", "partial_rotary_factor", "short_factor", "long_factor"]
        ),
        ODD,
        max_size=3,
    ),
)
def test_odd_values_of_rope_scaling_are_read_or_refused(key, kind, changes):
    factors = {"short_factor": [1.0] * 32, "long_factor": [1.0] * 32, "attention_factor": 1.0}
    with suppress(ModelLoadError):
        LlamaConfig.from_hf(FULL_HF | {key: LLAMA3_SCALING | factors | {"rope_type": kind} | changes})


@given(
    st.dictionaries(st.sampled_from(sorted(FULL_GGUF)), ODD, max_size=3),
    st.none() | st.just((1.0,) * 32),
)
def test_odd_values_of_gguf_metadata_are_read_or_refused(changes, factors):
    with suppress(ModelLoadError):
        LlamaConfig.from_gguf(FULL_GGUF | changes, tensor_names=[], rope_factors=factors)
