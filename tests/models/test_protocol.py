"""A model written outside of the package, not a Llama, is served through the pages."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.models import PagedModel
from jpaged.pallas_kernels import PageSpec, attend_and_write, plan_attention

from .paged import DenseRunner, PagedRunner


class LayerNormModel(nnx.Module):
    """Two layers with learned positions, layer norms with biases, one head shape a layer, and no rotary angles."""

    vocab_size, max_position = 40, 32
    shapes = ((2, 1, 8), (2, 2, 16))  # query heads, KV heads, head_dim

    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(self.vocab_size, 16, rngs=rngs)
        self.positions = nnx.Embed(self.max_position, 16, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(16, rngs=rngs) for _ in self.shapes])
        self.qkv = nnx.List([nnx.Linear(16, (q + 2 * kv) * d, rngs=rngs) for q, kv, d in self.shapes])
        self.out = nnx.List([nnx.Linear(q * d, 16, rngs=rngs) for q, _, d in self.shapes])

    def page_specs(self, *, num_pages, page_size, dtype, implementation):
        return [PageSpec(num_pages, page_size, kv, d, dtype, implementation) for _, kv, d in self.shapes]

    def hidden(self, tokens, positions, attend):
        x = self.tokens(tokens) + self.positions(positions)
        for i, (q_heads, kv_heads, dim) in enumerate(self.shapes):
            qkv = self.qkv[i](self.norms[i](x)).reshape(*tokens.shape, q_heads + 2 * kv_heads, dim)
            out = attend(i, *jnp.split(qkv, [q_heads, q_heads + kv_heads], axis=-2))
            x = x + self.out[i](out.reshape(*tokens.shape, q_heads * dim))
        return x

    def __call__(self, tokens, kv_pages, meta, *, implementation=None):
        kv_pages = list(kv_pages)
        meta = plan_attention(meta, kv_pages[0].spec)

        def attend(i, q, k, v):
            out, kv_pages[i] = attend_and_write(q, k, v, kv_pages[i], meta, implementation=implementation)
            return out

        return self.hidden(tokens, meta.positions, attend), kv_pages

    def logits(self, hidden):
        return self.tokens.attend(hidden)

    def causal_logits(self, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def attend(i, q, k, v):
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)

        return self.logits(self.hidden(tokens, positions, attend))


def test_a_foreign_model_is_a_paged_model_and_serves():
    model = LayerNormModel(nnx.Rngs(params=3))
    assert isinstance(model, PagedModel)
    text = np.random.default_rng(0).integers(0, 40, 24).tolist()
    runner = PagedRunner(model, num_sequences=2)
    logits = [runner.step({1: part})[1] for part in (text[:10], text[10:22], text[22:23], text[23:])]
    np.testing.assert_allclose(np.concatenate(logits), DenseRunner(model)(text), rtol=0, atol=2e-5)


def test_what_lacks_a_member_is_no_paged_model():
    assert not isinstance(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), PagedModel)
    model = LayerNormModel(nnx.Rngs(0))
    assert np.ndim(model.vocab_size) == 0
