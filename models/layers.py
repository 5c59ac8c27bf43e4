"""Layers of a Llama: norm, rotary frequencies, attention projections, gated MLP, and the block that joins them.

Kernels are stored [in, out] and fused: q, k and v in one, gate and up in one, so that a layer is four matrix products.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from jpaged.models.config import LlamaConfig
from jpaged.models.linear import Linear
from jpaged.pallas_kernels import (
    LayerWeights,
    Rope,
    add_rms_norm,
    after_attention,
    gated_product,
    layer_plan,
    split_product,
)

# qkv [*B, Hq + 2 Hkv, D], or f32 parts of it, -> (out [*B, Hq, D], the layer's pages or None)
Attend = Callable[[Array], tuple[Any, Any]]


def rotary_frequencies(config: LlamaConfig) -> np.ndarray:
    """Angle per position of each rotated pair, f32 [head_dim / 2], scaled as the config says.

    Reference:
      RoPE: https://arxiv.org/abs/2104.09864; linear scaling: https://arxiv.org/abs/2306.15595;
      "llama3" scaling: https://arxiv.org/abs/2407.21783

    Example:
      >>> config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
      ...                      num_attention_heads=2, rope_theta=100.0)
      >>> rotary_frequencies(config).tolist()
      [1.0, 0.10000000149011612]
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    plain = 1.0 / np.float32(config.rope_theta) ** exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "factors":
        return plain / np.asarray(scaling.factors, np.float32)
    if scaling.kind == "linear":
        return plain / np.float32(scaling.factor)
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)  # 1: high frequency, as it is; 0: low frequency, divided
    return ((1 - kept) * plain / scaling.factor + kept * plain).astype(np.float32)


def rotary_angles(config: LlamaConfig, positions: Int[Array, " T"]) -> Rope:
    """Cosines and sines for each position; in f32, since bf16 cannot tell large positions apart."""
    angles = positions.astype(jnp.float32)[:, None] * rotary_frequencies(config)
    return Rope(jnp.cos(angles), jnp.sin(angles))


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in f32.

    Reference:
      https://arxiv.org/abs/1910.07467
    """

    def __init__(self, size: int, eps: float, dtype: DTypeLike):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((size,), dtype))

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
        return self.add(x, None)[1]

    def add(
        self,
        x: Float[Array, "*B E"],
        delta: Float[Array, "..."] | None,
        *,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "*B E"], Float[Array, "*B E"]]:
        """x + delta, and its norm; see `add_rms_norm`."""
        return add_rms_norm(x, delta, self.scale[...], self.eps, implementation=implementation)


def is_plain(linear: Any) -> bool:
    """Whether a projection is a matrix product and nothing else."""
    return type(linear) is Linear and linear.bias is None


def product(linear: Any, x: Float[Array, "*B K"], *, in_parts: bool) -> Float[Array, "..."]:
    """linear(x), or f32 parts of it [P, *B, F] where that is better and `in_parts` says that they are wanted."""
    return split_product(x, linear.kernel[...]) if in_parts and is_plain(linear) else linear(x)


class Attention(nnx.Module):
    """Projections of grouped-query attention; how heads attend is handed in, so pages and training share them.

    Reference:
      https://arxiv.org/abs/2305.13245
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.heads = (heads, kv_heads, dim)
        options = {"bias": config.attention_bias, "rngs": rngs, "dtype": dtype}
        self.qkv = Linear(config.hidden_size, (heads + 2 * kv_heads) * dim, **options)
        self.o = Linear(heads * dim, config.hidden_size, **options)

    @jax.named_scope("attention")
    def __call__(
        self, x: Float[Array, "*B E"], attend: Attend, *, in_parts: bool = False
    ) -> tuple[Float[Array, "..."], Any]:
        """The output [*B, E], or with `in_parts` perhaps parts of it, as `attend` then gets parts, too."""
        out, kv_pages = self.attend(product(self.qkv, x, in_parts=in_parts), attend)
        return product(self.o, out, in_parts=in_parts), kv_pages

    def attend(self, qkv: Float[Array, "..."], attend: Attend) -> tuple[Float[Array, "*B A"], Any]:
        """What heads attend to, one after the other [*B, Hq * D], of the projection or parts of it."""
        heads, kv_heads, dim = self.heads
        out, kv_pages = attend(qkv.reshape(*qkv.shape[:-1], heads + 2 * kv_heads, dim))
        return out.reshape(*out.shape[:-2], heads * dim), kv_pages


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)).

    Reference:
      https://arxiv.org/abs/2002.05202
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, rngs=rngs, dtype=dtype)
        self.down = Linear(config.intermediate_size, config.hidden_size, rngs=rngs, dtype=dtype)

    @jax.named_scope("mlp")
    def __call__(self, x: Float[Array, "*B E"], *, in_parts: bool = False) -> Float[Array, "..."]:
        """The output [*B, E], or with `in_parts` perhaps parts of it."""
        if in_parts and is_plain(self.gate_up):
            gated = gated_product(x, self.gate_up.kernel[...])
        else:
            gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
            gated = jax.nn.silu(gate) * up
        return product(self.down, gated, in_parts=in_parts)


class Block(nnx.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)); the last sum is left to what follows, with its norm."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "*B E"],
        delta: Float[Array, "..."] | None,
        attend: Attend,
        *,
        in_parts: bool = False,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "*B E"], Float[Array, "..."], Any]:
        """The layer's input is x + delta, its output the sum of the first two results; the third are its pages.

        Args:
          in_parts: whether products may come in parts, which `attend` and the norms add up.
          implementation: of the norms.
        """
        x, normed = self.attention_norm.add(x, delta, implementation=implementation)
        out, kv_pages = self.attention(normed, attend, in_parts=in_parts)
        x, normed = self.mlp_norm.add(x, out, implementation=implementation)
        return x, self.mlp(normed, in_parts=in_parts), kv_pages


def weights_after(block: Block, following: Block | None) -> LayerWeights | None:
    """What `after_attention` needs of a layer and of the one that follows; `None` if they are not plain products."""
    products = [block.attention.o, block.mlp.gate_up, block.mlp.down]
    products += [] if following is None else [following.attention.qkv]
    if not all(is_plain(linear) for linear in products):
        return None
    o, gate_up, down, *qkv = (linear.kernel[...] for linear in products)
    scale = None if following is None else following.attention_norm.scale[...]
    return LayerWeights(o, block.mlp_norm.scale[...], gate_up, down, scale, *(qkv or [None]))


def run_in_kernels(
    blocks: Sequence[Block], x: Float[Array, "T E"], attends: Sequence[Attend]
) -> tuple[Float[Array, "T E"], Any, list[Any]] | None:
    """All layers, with one kernel from each attention to the next: for few tokens, where there is such a kernel.

    Returns:
      what the last `Block` would, and the pages of all; or `None` where each layer is better left to its `Block`.
    """
    layers = []
    for block, following in itertools.zip_longest(blocks, blocks[1:]):
        weights = weights_after(block, following)
        plan = None if weights is None else layer_plan(len(x), weights)
        if weights is None or plan is None:
            return None
        layers.append((block, weights, plan))
    qkv: Any = product(blocks[0].attention.qkv, blocks[0].attention_norm(x), in_parts=True)
    delta, written, arrivals = None, [], jnp.zeros(1, jnp.int32)
    for index, ((block, weights, plan), attend) in enumerate(zip(layers, attends, strict=True)):
        with jax.named_scope(f"layer_{index}"):
            with jax.named_scope("attention"):
                attended, kv_pages = block.attention.attend(qkv, attend)
            x, delta, qkv, arrivals = after_attention(x, attended, weights, arrivals, eps=block.mlp_norm.eps, plan=plan)
        written.append(kv_pages)
    return x, delta, written
