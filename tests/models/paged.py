"""Serving a model through pages by hand, for tests: no scheduler, no engine."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.models import Llama, LlamaConfig
from jpaged.models.quantised import QuantisedLinear
from jpaged.models.weights import abstract_llama, with_arrays
from jpaged.pallas_kernels import PagedMetadata, make_pages


def tiny_config(**changes) -> LlamaConfig:
    """A Llama of two layers that compiles in no time; grouped-query attention, tied."""
    fields = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 64,
        "eos_token_ids": (2,),
    }
    return LlamaConfig(**(fields | changes))


def random_llama(seed: int = 0, dtype=np.float32, **changes) -> Llama:
    """A Llama with weights, norms and biases included, that are large enough for every part to matter."""
    config = tiny_config(**changes)
    rng = np.random.default_rng(seed)
    abstract, arrays = abstract_llama(config, dtype), {}
    for path, variable in nnx.to_flat_state(nnx.state(abstract)):
        values = 0.2 * rng.standard_normal(variable.shape) + (path[-1] == "scale")
        arrays[path] = jnp.asarray(values.astype(dtype))
    return with_arrays(abstract, arrays)


def dequantise(linear: QuantisedLinear) -> np.ndarray:
    """The kernel f32[in, out] that its codes stand for."""
    return np.asarray(linear.kernel[...].T.astype(jnp.float32) * linear.scale[...])


class PagedRunner:
    """Feeds chunks of sequences to a model; sequence s owns pages that are scattered over the pool.

    Every step is padded to `num_tokens` tokens and to one row more than there are sequences, so it compiles once.
    """

    def __init__(
        self, model, *, num_sequences: int, num_tokens: int = 32, page_size: int = 8, pages_per_sequence: int = 4
    ):
        specs = model.page_specs(
            num_pages=1 + num_sequences * pages_per_sequence,
            page_size=page_size,
            dtype=jnp.dtype(jnp.float32),
            implementation="xla",
        )
        self.pages = [make_pages(spec) for spec in specs]
        self.page_size = page_size
        self.page_ids = np.random.default_rng(0).permutation(num_sequences * pages_per_sequence) + 1
        self.page_ids = self.page_ids.reshape(num_sequences, pages_per_sequence).astype(np.int32)
        self.lengths = [0] * num_sequences
        self.num_tokens = num_tokens
        graph, self.params = nnx.split(model)
        self.run = jax.jit(lambda params, tokens, pages, meta: nnx.merge(graph, params)(tokens, pages, meta))
        self.logits = jax.jit(lambda params, hidden: nnx.merge(graph, params).logits(hidden))

    def step(self, chunks: dict[int, list[int]]) -> dict[int, np.ndarray]:
        """Appends tokens to sequences; gives the logits [tokens, V] after each."""
        rows = sorted(chunks, key=lambda s: len(chunks[s]) > 1)  # decode rows first
        q_lens = [len(chunks[s]) for s in rows]
        positions = [self.lengths[s] + i for s in rows for i in range(len(chunks[s]))]
        owners = [s for s in rows for _ in chunks[s]]
        slots = [
            self.page_ids[s, p // self.page_size] * self.page_size + p % self.page_size
            for s, p in zip(owners, positions, strict=True)
        ]
        for s in rows:
            self.lengths[s] += len(chunks[s])
        ends = np.cumsum(q_lens)
        page_table = np.zeros((len(self.lengths) + 1, self.page_ids.shape[1]), np.int32)
        page_table[: len(rows)] = self.page_ids[rows]
        kv_lens = [self.lengths[s] for s in rows]
        meta = PagedMetadata(
            page_table=jnp.asarray(page_table),
            kv_lens=_padded(kv_lens, len(page_table)),
            cu_q_lens=_padded([0, *ends], len(page_table) + 1, ends[-1]),
            positions=_padded(positions, self.num_tokens),
            slot_mapping=_padded(slots, self.num_tokens),
            num_decode=jnp.asarray(np.int32(q_lens.count(1))),
            num_seqs=jnp.asarray(np.int32(len(rows))),
        )
        tokens = _padded([token for s in rows for token in chunks[s]], self.num_tokens)
        hidden, self.pages = self.run(self.params, tokens, self.pages, meta)
        logits = np.asarray(self.logits(self.params, hidden))
        return {s: logits[end - n : end] for s, n, end in zip(rows, q_lens, ends, strict=True)}

    def greedy(self, prompt: list[int], count: int, sequence: int = 0) -> list[int]:
        """Prefills a prompt, then decodes `count` tokens."""
        output, tokens = [], prompt
        for _ in range(count):
            token = int(self.step({sequence: tokens})[sequence][-1].argmax())
            output.append(token)
            tokens = [token]
        return output


def _padded(values: list[int], length: int, filler: int = 0) -> jax.Array:
    assert len(values) <= length
    return jnp.asarray(np.array([*values, *[filler] * (length - len(values))], np.int32))


def greedy_dense(model, prompt: list[int], count: int) -> list[int]:
    """The same by dense causal attention over the whole sequence."""
    causal = DenseRunner(model)
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(causal(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


class DenseRunner:
    """Logits [tokens, V] of a text by dense causal attention, padded at its end so that it compiles once."""

    def __init__(self, model, length: int = 32):
        graph, self.params = nnx.split(model)
        self.run = jax.jit(lambda params, tokens: nnx.merge(graph, params).causal_logits(tokens))
        self.length = length

    def __call__(self, tokens: list[int]) -> np.ndarray:
        return np.asarray(self.run(self.params, _padded(tokens, self.length)[None])[0, : len(tokens)])
