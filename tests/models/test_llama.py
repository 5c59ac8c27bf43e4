import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.models import PagedModel, RopeScaling

from .paged import DenseRunner, PagedRunner, greedy_dense, random_llama

# Every branch of the model, in few compilations.
VARIANTS = {
    "grouped, tied": {},
    "multi-query, explicit head_dim, linear, sliding window": {
        "sliding_window": 5,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_scaling": RopeScaling(kind="linear", factor=4.0),
    },
    "multi-head, untied, bias, llama3": {
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rope_scaling": RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=16),
    },
}
# Activations are of order 1 after the norms and logits of order 0.1 to 1. f32 sums of at most 48 terms in another order
# differ by some 1e-6, over two layers.
TOLERANCE = 2e-5


@pytest.mark.parametrize("name", VARIANTS)
def test_paged_equals_causal(name):
    """Whole prefill, chunks, decode, and all three in one step give the logits of dense attention."""
    model = random_llama(**VARIANTS[name])
    dense, runner = DenseRunner(model), PagedRunner(model, num_sequences=3)
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 48, size=n).tolist() for n in (13, 21, 9)]
    got = {s: [] for s in range(3)}
    # Chunks end in the middle of pages (8 tokens) and at their borders.
    for ends in ((12, 5, 0), (13, 16, 8), (13, 21, 9)):
        chunks = {s: texts[s][runner.lengths[s] : end] for s, end in enumerate(ends) if end > runner.lengths[s]}
        for s, logits in runner.step(chunks).items():
            got[s].append(logits)
    for s in range(3):
        np.testing.assert_allclose(np.concatenate(got[s]), dense(texts[s]), rtol=0, atol=TOLERANCE)


def test_a_sliding_window_sees_that_many_tokens():
    """One layer, so that the last logits depend on the last 5 tokens and on no other."""
    model = random_llama(num_hidden_layers=1, sliding_window=5)
    dense = DenseRunner(model)
    text = np.random.default_rng(2).integers(0, 48, size=32)
    last = dense(text.tolist())[-1]
    for place in range(32):
        changed = dense([*text[:place], (text[place] + 7) % 48, *text[place + 1 :]])[-1]
        assert np.array_equal(changed, last) == (place < 32 - 5), place


def test_greedy_tokens_through_pages_equal_dense_ones():
    model = random_llama(seed=3)
    assert PagedRunner(model, num_sequences=1).greedy([5, 6, 7], 16) == greedy_dense(model, [5, 6, 7], 16)


def test_is_a_paged_model():
    model = random_llama()
    assert isinstance(model, PagedModel)
    assert (model.vocab_size, model.max_position, model.eos_token_ids) == (48, 64, (2,))
    assert (model.sliding_window, random_llama(sliding_window=5).sliding_window) == (None, 5)
    (spec, other) = model.page_specs(num_pages=4, page_size=16, dtype="bfloat16", implementation="xla")
    assert spec == other
    assert (spec.num_kv_heads, spec.head_dim, spec.dtype.name) == (2, 8, "bfloat16")


@pytest.mark.parametrize("name", VARIANTS)
def test_counts_its_parameters(name):
    model = random_llama(**VARIANTS[name])
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model))) == model.config.num_parameters


def test_bfloat16_stays_near_float32():
    """Parameters and hidden states are bf16, logits f32. bf16 is off by 2**-9 relative."""
    model = random_llama()
    low = random_llama(dtype=jnp.bfloat16)
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(low))} == {"bfloat16"}
    text = list(range(16))
    runner = PagedRunner(low, num_sequences=1)
    logits = runner.step({0: text})[0]
    assert logits.dtype == np.float32
    assert DenseRunner(low)(text).dtype == np.float32
    np.testing.assert_allclose(logits, DenseRunner(model)(text), rtol=0, atol=0.15)


def test_packed_segments_equal_separate_texts():
    """With a sliding window that is shorter than a text; the default model's golden test packs texts without one."""
    model = random_llama(sliding_window=3)
    texts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    packed = jnp.asarray([texts[0] + texts[1] + [0, 0]], jnp.int32)
    segment_ids = jnp.asarray([[1] * 5 + [2] * 3 + [0] * 2], jnp.int32)
    graph, params = nnx.split(model)
    packed_logits = jax.jit(lambda params: nnx.merge(graph, params).causal_logits(packed, segment_ids=segment_ids))
    logits = np.asarray(packed_logits(params)[0])
    dense = DenseRunner(model)
    np.testing.assert_allclose(logits[:5], dense(texts[0]), rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(logits[5:8], dense(texts[1]), rtol=0, atol=TOLERANCE)
    assert np.isfinite(logits).all()


def test_remat_changes_memory_and_not_gradients():
    graph, params = nnx.split(random_llama())
    tokens = jnp.arange(16, dtype=jnp.int32)[None]

    def loss(params, remat):
        return jnp.sum(nnx.merge(graph, params).causal_logits(tokens, remat=remat) ** 2)

    grads = [jax.jit(jax.grad(loss), static_argnums=1)(params, remat) for remat in (False, True)]
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(a).max()))
    texts = [str(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(params, remat)) for remat in (False, True)]
    assert ["checkpoint" in text or "remat" in text for text in texts] == [False, True]
