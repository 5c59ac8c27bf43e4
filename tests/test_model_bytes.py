"""Bytes from a config against the arrays that the engine makes, and sizes in words."""

import jax
import pytest
from flax import nnx

from jpaged.errors import ConfigError
from jpaged.model_bytes import (
    KV_ITEMSIZES,
    WEIGHT_ITEMSIZES,
    format_bytes,
    kv_bytes_per_page,
    parse_bytes,
    sampler_bytes,
    weight_bytes,
)
from jpaged.models.parameter_map import WEIGHT_FORMS
from jpaged.models.weights import abstract_llama, num_bytes
from jpaged.pallas_kernels import PageSpec
from jpaged.pallas_kernels.pages import PAGE_DTYPES
from jpaged.sampler_state import sampler_state_bytes
from tests.fakes import tiny_config, tiny_llama


@pytest.mark.parametrize("dtype", PAGE_DTYPES)
@pytest.mark.parametrize("page_size", [8, 16, 128])
def test_pages_take_what_their_spec_says(dtype, page_size):
    config = tiny_config(head_dim=10, num_hidden_layers=3)
    specs = [PageSpec(2, page_size, config.num_key_value_heads, 10, dtype) for _ in range(3)]
    assert kv_bytes_per_page(config, page_size, dtype) == sum(spec.bytes_per_page for spec in specs)
    assert kv_bytes_per_page(config, page_size, dtype) == page_size * kv_bytes_per_page(config, 1, dtype)
    assert set(KV_ITEMSIZES) == set(PAGE_DTYPES)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
def test_weights_take_what_their_arrays_take(changes):
    arrays = jax.tree.leaves(nnx.state(tiny_llama(**changes)))
    assert weight_bytes(tiny_config(**changes), "float32") == sum(array.nbytes for array in arrays)
    assert weight_bytes(tiny_config(**changes), "bfloat16") * 2 == sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("weights", WEIGHT_FORMS)
@pytest.mark.parametrize("dtype", WEIGHT_ITEMSIZES)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "head_dim": 10}])
def test_quantised_weights_take_what_their_arrays_take(dtype, weights, changes):
    config = tiny_config(**changes)
    assert weight_bytes(config, dtype, weights) == num_bytes(abstract_llama(config, dtype, weights))


@pytest.mark.parametrize(("num_seqs", "vocab_size"), [(1, 8), (32, 49152)])
def test_the_samplers_state_takes_what_its_arrays_take(num_seqs, vocab_size):
    assert sampler_bytes(num_seqs, vocab_size) == sampler_state_bytes(num_seqs, vocab_size)


def test_other_dtypes_are_refused():
    with pytest.raises(ConfigError, match="dtype is 'int8', expected one of float32, bfloat16, float16"):
        weight_bytes(tiny_config(), "int8")
    with pytest.raises(ConfigError, match="weights is 'int4', expected one of int8, fp8, or None"):
        weight_bytes(tiny_config(), "bfloat16", "int4")
    with pytest.raises(ConfigError, match=r"of K and V is 'int4', expected one of .*float8_e4m3fn"):
        kv_bytes_per_page(tiny_config(), 16, "int4")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("141GB", 141 * 10**9),
        ("80GiB", 80 * 2**30),
        (" 1.5 tib ", 3 * 2**39),
        ("0.5kb", 500),
        ("7B", 7),
        ("123456789012345678", 123456789012345678),
        ("0.1GB", 10**8),
    ],
)
def test_sizes_in_words(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0GB", "0.4", "-1GB", "1e9", "80G", "80GBit", "٣GB", "nan", "1 000GB"])
def test_other_words_are_refused(text):
    with pytest.raises(ConfigError, match=r"the memory is .*powers of 1000.*powers of 1024"):
        parse_bytes(text)


def test_sizes_are_shown_in_both_units():
    assert format_bytes(80 * 2**30) == "85.90 GB (80.00 GiB)"
    assert format_bytes(819_200) == "819.20 KB (800.00 KiB)"
