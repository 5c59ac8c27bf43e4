"""Well-known shapes against the parameter counts and KV bytes that are published for them."""

import pytest

from jpaged.errors import ConfigError
from jpaged.model_bytes import kv_bytes_per_page
from jpaged.model_shapes import MODEL_SHAPES, model_shape

PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "smollm2-135m": 134_515_008,
    "smollm2-135m-instruct": 134_515_008,
    "tinyllama-1.1b": 1_100_048_384,
}


def test_every_shape_has_the_published_number_of_parameters():
    assert {name: config.num_parameters for name, config in MODEL_SHAPES.items()} == PARAMETERS
    assert sorted(MODEL_SHAPES, key=str.lower) == sorted(name.lower() for name in MODEL_SHAPES)


def test_kv_of_a_token():
    # The PagedAttention paper: 800 KB a token for 40 layers of width 5120 in fp16.
    assert kv_bytes_per_page(MODEL_SHAPES["llama-2-13b"], 1, "float16") == 800 * 1024
    assert kv_bytes_per_page(MODEL_SHAPES["llama-3-8b"], 1, "bfloat16") == 128 * 1024
    assert MODEL_SHAPES["mistral-7b-v0.1"].sliding_window == 4096
    assert MODEL_SHAPES["mistral-7b-v0.3"].sliding_window is None


def test_case_does_not_matter_and_other_names_are_refused():
    assert model_shape("Llama-3-8B") is MODEL_SHAPES["llama-3-8b"]
    with pytest.raises(ConfigError, match=r"the model is 'gpt-5', expected one of llama-2-7b, .*tinyllama-1.1b"):
        model_shape("gpt-5")
