"""An engine whose weights are quantised: the same answers in any company, and more pages."""

import pytest
from flax import nnx

from jpaged.config import CacheConfig, SchedulerConfig
from jpaged.errors import ConfigError
from jpaged.kv_cache import plan_pool
from jpaged.models import quantise
from jpaged.models.weights import num_bytes
from tests.engine_driver import GREEDY, PROMPTS, make_engine, serve, tokens_of
from tests.fakes import greedy_without_cache, tiny_llama
from tests.test_kv_cache import FakeDevice


@pytest.fixture(scope="module")
def model():
    return quantise(tiny_llama(num_hidden_layers=1), "int8")


@pytest.fixture(scope="module")
def engine(model):
    return make_engine(model, token_buckets=(32,))


def answers(engine, *, at_once: bool) -> list[list[int]]:
    return tokens_of(serve(engine, [(prompt, GREEDY) for prompt in PROMPTS], at_once=at_once, cold=True))


def test_together_as_alone_as_without_pages(engine, model):
    expected = [greedy_without_cache(model, prompt, 12) for prompt in PROMPTS]
    assert answers(engine, at_once=True) == answers(engine, at_once=False) == expected
    assert engine.dtype == "float32"  # K and V are stored as activations are


def test_new_weights_come_as_they_were_trained(engine, model):
    compiled = engine.stats().num_compilations
    other = tiny_llama(seed=1, num_hidden_layers=1)
    engine.update_weights(other)
    expected = quantise(other, "int8")
    assert answers(engine, at_once=True) == [greedy_without_cache(expected, prompt, 12) for prompt in PROMPTS]
    engine.update_weights(nnx.state(model))  # quantised already
    assert answers(engine, at_once=True) == [greedy_without_cache(model, prompt, 12) for prompt in PROMPTS]
    assert engine.stats().num_compilations == compiled
    with pytest.raises(ConfigError, match=r"kernel.*expected int8\[64, 32\]"):
        engine.update_weights(tiny_llama(num_hidden_layers=1, num_key_value_heads=1))


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_what_the_weights_save_goes_to_the_pages(weights):
    plain = tiny_llama(hidden_size=64, intermediate_size=256)
    small = quantise(plain, weights)

    def num_pages(model) -> int:
        device = FakeDevice(limit=2_000_000, used=num_bytes(model))
        options = {"dtype": "float32", "implementation": "xla", "device": device}
        return plan_pool(model, CacheConfig(page_size=8), SchedulerConfig(), **options).num_pages

    per_page = 2 * 8 * 2 * 2 * 16 * 4
    saved = num_bytes(plain) - num_bytes(small)
    assert saved > 0.6 * num_bytes(plain)
    assert num_pages(small) - num_pages(plain) == pytest.approx(saved / per_page, abs=1)
