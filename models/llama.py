"""`Llama`, which is also a Mistral: one set of parameters that serves through pages and trains."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Float32, Int, Int32

from jpaged.models.config import LlamaConfig
from jpaged.models.layers import Block, RMSNorm, rotary_angles, run_in_kernels
from jpaged.models.linear import Linear, normal
from jpaged.pallas_kernels import (
    KVPages,
    PagedMetadata,
    PageSpec,
    apply_rope,
    attend_and_write_qkv,
    norm_implementation,
    plan_attention,
)


class Llama(nnx.Module):
    """A Llama (2, 3, 3.1, 3.2, TinyLlama, SmolLM2) or a Mistral: a `PagedModel`, and a model to train.

    Parameters (L layers, fused kernels, all of one dtype; a tied model has no `lm_head`):
      embed [V, E]; norm/scale [E]; lm_head/kernel [E, V]; and in layers/i/:
      attention_norm/scale [E]; attention/qkv/kernel [E, (Hq + 2 Hkv) D], columns q, k, v; attention/o/kernel [Hq D, E];
      mlp_norm/scale [E]; mlp/gate_up/kernel [E, 2 F]; mlp/down/kernel [F, E];
      with attention_bias also attention/qkv/bias [(Hq + 2 Hkv) D] and attention/o/bias [E].

    Args:
      config: the shape.
      rngs: keys for fresh weights.
      dtype: of parameters and activations. Norms, rotary angles and logits are computed in f32. (On a GPU, products of
        f32 matrices may use tf32; `jax.default_matmul_precision("highest")` prevents it.)

    Reference:
      https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2407.21783; Mistral: https://arxiv.org/abs/2310.06825

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
      ...                      num_attention_heads=4, num_key_value_heads=2)
      >>> model = Llama(config, rngs=nnx.Rngs(0))
      >>> jax.eval_shape(model.causal_logits, jnp.ones((2, 5), jnp.int32)).shape
      (2, 5, 32)
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.config = config
        self.embed = nnx.Param(normal(rngs, (config.vocab_size, config.hidden_size), dtype))
        self.layers = nnx.List([Block(config, rngs=rngs, dtype=dtype) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, rngs=rngs, dtype=dtype)

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self.config.vocab_size

    @property
    def max_position(self) -> int:
        """Tokens of the longest sequence."""
        return self.config.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return self.config.eos_token_ids

    @property
    def sliding_window(self) -> int | None:
        """Positions that every layer sees at most, a token's own included; `None`: all before it."""
        return self.config.sliding_window

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of parameters and activations."""
        return self.embed[...].dtype

    def page_specs(self, *, num_pages: int, page_size: int, dtype: DTypeLike, implementation: str) -> list[PageSpec]:
        """The pages of each layer; all alike.

        Args:
          num_pages: pages in the pool, the null page included.
          page_size: token slots a page.
          dtype: stored dtype of K and V.
          implementation: attention back end.
        """
        config = self.config
        spec = PageSpec(
            num_pages, page_size, config.num_key_value_heads, config.head_dim, jnp.dtype(dtype), implementation
        )
        return [spec] * config.num_hidden_layers

    def __call__(
        self,
        tokens: Int32[Array, " T"],
        kv_pages: list[KVPages],
        meta: PagedMetadata,
        *,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "T E"], list[KVPages]]:
        """One step over flat ragged tokens: writes their K and V into the pages, gives their hidden states.

        Args:
          tokens: token ids of all rows, row after row.
          kv_pages: pages of each layer.
          meta: rows, positions and page table.
          implementation: attention back end; `None` picks one.
        """
        if meta.work is None:
            layer = (self.config.num_attention_heads, self.config.sliding_window)
            meta = plan_attention(meta, kv_pages[0].spec, layers=[layer])
        rope = rotary_angles(self.config, meta.positions)
        options = {"rope": rope, "sliding_window": self.config.sliding_window, "implementation": implementation}
        # A name is that of attention; a norm is not refused because its kernel does not take a shape.
        norms = "xla" if implementation == "xla" else None
        in_parts = norm_implementation(norms, self.dtype, self.config.hidden_size) == "mosaic_gpu"
        with jax.named_scope("embed"):
            x, delta = self.embed[...][tokens], None

        def attend(qkv, pages):
            return attend_and_write_qkv(qkv, pages, meta, dtype=self.dtype if qkv.ndim > 3 else None, **options)

        attends = [partial(attend, pages=pages) for pages in kv_pages]
        in_kernels = run_in_kernels(self.layers, x, attends) if in_parts else None
        if in_kernels is not None:
            x, delta, written = in_kernels
        else:
            written = []
            for index, (block, attend) in enumerate(zip(self.layers, attends, strict=True)):
                with jax.named_scope(f"layer_{index}"):
                    x, delta, pages = block(x, delta, attend, in_parts=in_parts, implementation=norms)
                written.append(pages)
        return self.norm.add(x, delta, implementation=norms)[1], written

    @jax.named_scope("logits")
    def logits(self, hidden: Float[Array, "*B E"]) -> Float32[Array, "*B V"]:
        """Scores of the next token, summed and returned in f32."""
        if self.lm_head is None:
            return jnp.einsum("...e,ve->...v", hidden, self.embed[...], preferred_element_type=jnp.float32)
        return jnp.matmul(hidden, self.lm_head.kernel[...], preferred_element_type=jnp.float32)

    def causal_logits(
        self, tokens: Int[Array, "B L"], *, segment_ids: Int[Array, "B L"] | None = None, remat: bool = False
    ) -> Float32[Array, "B L V"]:
        """Logits of whole sequences by dense causal attention: for training, and to check the paged path.

        A sliding window is a mask here: it saves no memory.

        Args:
          tokens: token ids.
          segment_ids: several texts in one row: a token sees the earlier tokens of its own segment, a run of equal ids,
            and positions count from the segment's start. Give padding an id of its own. `None`: a row is one text.
          remat: keep only each layer's input for the backward pass and compute the rest again: less memory, more work.
        """
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions, mask = jnp.broadcast_to(index, tokens.shape), None
        if segment_ids is not None:
            starts = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
            start = jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
            positions = index - start
            mask = (start[:, :, None] == start[:, None, :])[:, None]
        rope = rotary_angles(self.config, positions.reshape(-1))
        # Keys left and right of a query's own; within a segment, places in the row differ as positions do.
        window = None if self.config.sliding_window is None else (self.config.sliding_window - 1, 0)

        def rotate(x):
            return apply_rope(x.reshape(-1, *x.shape[2:]), rope).reshape(x.shape)

        def attend(qkv):
            heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
            q, k, v = jnp.split(qkv, [heads, heads + kv_heads], axis=-2)
            # It widens bf16 to f32 inside without saying so, which strict promotion refuses.
            with jax.numpy_dtype_promotion("standard"):
                out = jax.nn.dot_product_attention(
                    rotate(q), rotate(k), v, mask=mask, is_causal=True, local_window_size=window
                )
            return out, None

        def run(block, x):
            x, delta, _ = block(x, None, attend, implementation="xla")
            return x + delta

        run = nnx.remat(run) if remat else run
        x = self.embed[...][tokens]
        for block in self.layers:
            x = run(block, x)
        return self.logits(self.norm.add(x, None, implementation="xla")[1])
