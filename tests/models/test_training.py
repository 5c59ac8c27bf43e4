"""A tiny Llama learns, and what it learned comes out of the pages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jpaged.models import Llama

from .paged import PagedRunner, greedy_dense, tiny_config

# Two texts of 16 tokens that never repeat a token, so each has one continuation.
TEXTS = [list(range(3, 19)), list(range(40, 24, -1))]


def test_loss_falls_and_the_weights_serve():
    model = Llama(tiny_config(), rngs=nnx.Rngs(0))
    optimizer = optax.adamw(1e-2)
    graph, params = nnx.split(model)
    tokens = jnp.asarray(TEXTS, jnp.int32)

    def loss_of(params):
        logits = nnx.merge(graph, params).causal_logits(tokens[:, :-1], remat=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @jax.jit
    def train(params, state):
        loss, grads = jax.value_and_grad(loss_of)(params)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes f32 with weakly typed integers
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state, loss

    state = optimizer.init(params)
    losses = []
    for _ in range(60):
        params, state, loss = train(params, state)
        losses.append(float(loss))
    assert abs(losses[0] - np.log(48)) < 0.2  # fresh weights know nothing: uniform over 48 tokens
    assert losses[-1] < 0.1

    trained = nnx.merge(graph, params)
    runner = PagedRunner(trained, num_sequences=2)
    for sequence, text in enumerate(TEXTS):
        got = runner.greedy(text[:4], 12, sequence)
        assert got == text[4:]
        assert got == greedy_dense(trained, text[:4], 12)
