"""Small models and tokenizers for tests of what stands above them."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.models import Llama, LlamaConfig


def tiny_config(**changes) -> LlamaConfig:
    """A Llama of 2 layers, 4/2 heads of width 8, vocabulary 64, context 256."""
    values = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    return LlamaConfig(**{**values, **changes})


def tiny_llama(seed: int = 0, **changes) -> Llama:
    """A random `tiny_config` model in float32."""
    return Llama(tiny_config(**changes), rngs=nnx.Rngs(seed), dtype=jnp.float32)


def tpu_mesh(kind: str = "TPU v5 lite") -> jax.sharding.AbstractMesh:
    """A TPU that is described and not there, for `jax.sharding.use_abstract_mesh`."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    return jax.sharding.AbstractMesh((1,), ("x",), (jax.sharding.AxisType.Auto,), abstract_device=device)


def greedy_without_cache(model: Llama, prompt: list[int], num_tokens: int) -> list[int]:
    """The obviously right continuation: no pages, no cache, the whole text again for each token."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(dense_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def dense_logits(model: Llama, tokens: list[int], padded_length: int = 64) -> np.ndarray:
    """Logits f32[len(tokens), V] by dense causal attention. Padded behind, so that one program serves all lengths."""
    padded = tokens + [0] * (padded_length - len(tokens))
    return np.asarray(_causal_logits(model, jnp.array([padded], jnp.int32))[0, : len(tokens)])


@nnx.jit
def _causal_logits(model: Llama, tokens):
    return model.causal_logits(tokens)
