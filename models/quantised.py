"""Quantised weights: kernels of 8 bits, with a scale for each output channel; activations keep theirs.

    kernel [in, out] ── absmax of each column / largest code ──► scale f32 [out]
           └─────────── / scale, rounded, transposed ───────────► codes int8 | e4m3 [out, in]

The four products of each layer are quantised, which are nearly all of a large model; the embedding table, the output
projection and the norms stay as they are.

What is computed is always x @ codes * scale with x as it is, in one of three ways:

- *In pieces*, int8 codes and 16-bit activations, few tokens. A token's activations become two int8 numbers each, 15
  bits of its largest one: bfloat16 is nearer to those that are below a 250th of it, and farther from the others. Both
  pieces meet the codes in one product that reads the weights once, a byte each.
- *Widened*, other dtypes, few tokens. Codes are converted to the dtype of x where they are multiplied.
- *Dequantised*, many tokens. Codes and scales become a kernel first, which takes little of a long product.

docs/design/0009-quantised-weights.md says why.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int8, Num

from jpaged.errors import ConfigError
from jpaged.models.linear import Linear
from jpaged.models.llama import Llama
from jpaged.models.parameter_map import check_form

# Dtype of the codes, and the largest of them; int8's -128 is left out, so that codes are symmetric.
_CODES: Final = {"int8": (jnp.int8, 127), "fp8": (jnp.float8_e4m3fn, 448)}
# Steps of more tokens take longer than dequantising their kernels.
FEW_TOKENS_IN_PIECES: Final = 512
FEW_TOKENS_WIDENED: Final = 256
_PIECE: Final = 254  # low pieces in a high one
_PRODUCTS: Final = (("attention", "qkv"), ("attention", "o"), ("mlp", "gate_up"), ("mlp", "down"))


class Frozen(nnx.Variable):
    """Part of a model that no optimiser changes: codes, and the scales that give them their meaning."""


class QuantisedLinear(nnx.Module):
    """x @ (kernel.T * scale) (+ bias): a `Linear` whose kernel is codes int8 or e4m3 [out, in], with scales f32 [out].

    Args:
      linear: what is quantised.
      weights: "int8" or "fp8".
    """

    def __init__(self, linear: Linear, weights: str):
        codes, scale = quantise_kernel(linear.kernel[...], weights)
        self.kernel, self.scale = Frozen(codes), Frozen(scale)
        self.bias = linear.bias

    def __call__(self, x: Float[Array, "*B in"]) -> Float[Array, "*B out"]:
        y = _product(x.reshape(-1, x.shape[-1]), self.kernel[...], self.scale[...])
        y = y.reshape(*x.shape[:-1], y.shape[-1])
        return y if self.bias is None else y + self.bias[...]


@jax.custom_jvp
def _product(x, codes, scale):
    # Pieces have more bits than 16-bit activations have, but less than float32.
    in_integers = codes.dtype == jnp.int8 and x.dtype.itemsize == 2
    if len(x) > (FEW_TOKENS_IN_PIECES if in_integers else FEW_TOKENS_WIDENED):
        return _dot(x, (codes.astype(jnp.float32) * scale[:, None]).astype(x.dtype), x.dtype)
    return (in_pieces if in_integers else _widened)(x, codes, scale)


@_product.defjvp
def _refuse(primals, tangents):
    raise ConfigError(
        f"a model with {_form(primals[1].dtype)} weights cannot be trained: codes have no derivative; train the model "
        "that it was quantised from, and give its weights to Engine.update_weights, which quantises them"
    )


def _widened(x, codes, scale):
    # A scale is of an output channel, so it may as well multiply the sum: then codes go into the product as they are.
    y = _dot(x, codes.astype(x.dtype), jnp.float32)
    return (y * scale).astype(x.dtype)


def in_pieces(
    x: Float[Array, "T in"], codes: Int8[Array, "out in"], scale: Float32[Array, " out"]
) -> Float[Array, "T out"]:
    """x @ codes.T * scale, x as two int8 pieces: off by a 64,516th of a token's largest activation at most, each.

    Reference:
      splitting what is multiplied into pieces whose sums are exact: https://arxiv.org/abs/2306.11975
    """
    wide = x.astype(jnp.float32)
    top = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    step = jnp.where(top == 0, 1, top) / 127  # what is not finite stays so: a broken row must be seen
    high = jnp.round(wide / step)
    low = jnp.round((wide / step - high) * _PIECE)  # what rounding left is half a step at most: 127 at most
    sums = _dot(jnp.concatenate([high, low]).astype(jnp.int8), codes, jnp.int32)
    # Else XLA takes the conversion into the product, and back out of it as a pass of its own if cuBLAS is faster.
    sums = jax.lax.optimization_barrier(sums).astype(jnp.float32)
    y = sums[: len(x)] + sums[len(x) :] / _PIECE
    return (y * step * scale).astype(x.dtype)


def _dot(x, codes, dtype):
    return jax.lax.dot_general(x, codes, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def quantise_kernel(
    kernel: Float[Array, "in out"], weights: str
) -> tuple[Num[Array, "out in"], Float32[Array, " out"]]:
    """Codes [out, in] and scales of a kernel; a column's largest magnitude becomes the largest code.

    Args:
      kernel: [in, out], of any float dtype.
      weights: "int8" or "fp8".

    Raises:
      ConfigError: another form.

    Example:
      >>> codes, scale = quantise_kernel(jnp.array([[0.5, -127.0], [-2.0, 64.4]]), "int8")
      >>> codes.tolist(), [round(float(one), 4) for one in scale]
      ([[32, -127], [-127, 64]], [0.0157, 1.0])
    """
    check_form(weights)
    return _quantise(kernel, weights)


@jax.jit(static_argnames="weights")
def _quantise(kernel, weights):
    dtype, largest = _CODES[weights]
    wide = kernel.astype(jnp.float32)
    # A column of zeros has codes of 0 whatever its scale is; one that is not finite has such a scale.
    top = jnp.max(jnp.abs(wide), axis=0)
    scale = jnp.where(top == 0, largest, top) / largest
    codes = wide / scale
    codes = (jnp.round(codes) if dtype == jnp.int8 else codes).astype(dtype)
    return codes.T, scale  # with the inputs of a channel in a row, as Hopper's 8-bit products want them


def quantise(model: Llama, weights: str) -> Llama:
    """A Llama that computes with quantised weights; what is not quantised is shared with `model`.

    Args:
      model: is not changed.
      weights: "int8" or "fp8".

    Raises:
      ConfigError: another form, or the model's weights are quantised already.

    Reference:
      int8 with a scale for each channel: https://arxiv.org/abs/2206.01861; e4m3: https://arxiv.org/abs/2209.05433

    Example:
      >>> from jpaged.models import LlamaConfig
      >>> config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
      ...                      num_attention_heads=2)
      >>> small = quantise(Llama(config, rngs=nnx.Rngs(0)), "int8")
      >>> small.layers[0].mlp.down.kernel[...].dtype.name, small.embed[...].dtype.name
      ('int8', 'float32')
    """
    check_form(weights)
    refuse_quantised(model, "quantised again")
    result = nnx.merge(*nnx.split(model))
    for block in result.layers:
        for part, name in _PRODUCTS:
            module = getattr(block, part)
            setattr(module, name, QuantisedLinear(getattr(module, name), weights))
    return result


def quantised_as(present: Any, weights: Any) -> Any:
    """`weights` with those of its kernels quantised that are quantised in `present`.

    Args:
      present: `nnx.State` of a model, quantised or not.
      weights: `nnx.State` of the same model, before it was quantised; or already as `present`, then nothing is done.

    Raises:
      ConfigError: they are quantised in another form.

    Example:
      >>> from jpaged.models import LlamaConfig
      >>> config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
      ...                      num_attention_heads=2)
      >>> model = Llama(config, rngs=nnx.Rngs(0))
      >>> present = nnx.state(quantise(model, "fp8"))
      >>> jax.tree.structure(quantised_as(present, nnx.state(model))) == jax.tree.structure(present)
      True
    """
    frozen = {path: variable for path, variable in nnx.to_flat_state(present) if isinstance(variable, Frozen)}
    if not frozen:
        return weights
    result = []
    for path, variable in nnx.to_flat_state(weights):
        like = frozen.get(path)
        if like is not None and isinstance(variable, Frozen) and variable[...].dtype != like[...].dtype:
            have, got = _form(like[...].dtype), variable[...].dtype
            raise ConfigError(
                f"the new weights are quantised to {got}, the present ones to {have!r}; expected the same"
            )
        if like is None or path[-1] != "kernel" or variable[...].dtype == like[...].dtype:
            result.append((path, variable))
            continue
        scale = (*path[:-1], "scale")
        codes, scales = quantise_kernel(jnp.asarray(variable[...]), _form(like[...].dtype))
        result += [(path, like.replace(codes)), (scale, frozen[scale].replace(scales))]
    return nnx.from_flat_state(result)


def form_of(model: nnx.Module) -> str | None:
    """The form of a model's kernels, "int8" or "fp8"; `None`: none of its weights are quantised."""
    codes = [leaf for leaf in jax.tree.leaves(nnx.state(model, Frozen)) if leaf.ndim == 2]
    return _form(codes[0].dtype) if codes else None


def refuse_quantised(model: nnx.Module, what: str) -> None:
    """Refuses what only makes sense with the weights that a model was quantised from.

    Raises:
      ConfigError: the model's weights are quantised.
    """
    if (form := form_of(model)) is not None:
        raise ConfigError(
            f"the model's weights are {form} already, and cannot be {what}; take the model they came from"
        )


def _form(dtype: np.dtype) -> str:
    return next(form for form, (codes, _) in _CODES.items() if codes == dtype)
