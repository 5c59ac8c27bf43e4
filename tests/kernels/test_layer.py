"""`after_attention_xla` is what a `Block` and the next one's norm and projection compute."""

import jax
import numpy as np

from jpaged.models.layers import weights_after
from jpaged.pallas_kernels.layer import after_attention_xla
from tests.models.paged import random_llama


def test_is_the_rest_of_a_layer():
    first, second = random_llama().layers
    x, attended = jax.random.normal(jax.random.key(0), (2, 3, 32))
    # A layer whose attention gives what is handed in, whatever it is asked.
    out, delta, _ = first(x, None, lambda qkv: (attended.reshape(3, 4, 8), None), implementation="xla")
    stream, normed = second.attention_norm.add(out, delta, implementation="xla")
    got = after_attention_xla(x, attended, weights_after(first, second), first.mlp_norm.eps)
    np.testing.assert_array_equal(got[0], stream)
    np.testing.assert_array_equal(got[2], second.attention.qkv(normed))
    last = after_attention_xla(x, attended, weights_after(first, None), first.mlp_norm.eps)
    np.testing.assert_array_equal(last[0], out)
    np.testing.assert_array_equal(last[1], delta)


def test_layers_with_a_bias_are_left_alone():
    first, second = random_llama(attention_bias=True).layers
    assert weights_after(first, second) is None
