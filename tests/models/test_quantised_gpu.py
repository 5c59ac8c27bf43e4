"""Products with quantised weights on a GPU, and an engine that serves them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.models import Llama, quantise
from jpaged.models.linear import Linear
from jpaged.models.quantised import QuantisedLinear
from tests.engine_driver import GREEDY, PROMPTS, make_engine, serve, tokens_of
from tests.fakes import tiny_config
from tests.models.paged import dequantise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


@pytest.mark.parametrize("weights", ["int8", "fp8"])
@pytest.mark.parametrize("tokens", [1, 32, 300, 600])
def test_products_are_those_of_the_kernel_that_the_codes_stand_for(weights, tokens):
    small = QuantisedLinear(Linear(1024, 768, rngs=nnx.Rngs(0), dtype=jnp.bfloat16), weights)
    x = jax.random.normal(jax.random.key(1), (tokens, 1024), jnp.bfloat16)
    graph, state = nnx.split(small)
    got = np.asarray(jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x), np.float32)
    expected = np.asarray(x, np.float32) @ dequantise(small)
    np.testing.assert_allclose(got, expected, rtol=2e-2, atol=1e-2 * np.abs(expected).max())


def test_an_engine_repeats_its_answers():
    config = tiny_config(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    engine = make_engine(quantise(Llama(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16), "int8"), num_pages=65)
    requests = [(prompt, GREEDY) for prompt in PROMPTS]
    together = tokens_of(serve(engine, requests))
    assert all(len(tokens) == 12 for tokens in together)
    assert together == tokens_of(serve(engine, requests, cold=True))
