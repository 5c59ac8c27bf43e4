"""Filling a Llama from a checkpoint: one parameter at a time, each tensor exactly once.

The host holds one parameter and one tensor at a time, the device one copy of the weights: a parameter's buffer is made
in the wanted dtype, filled piece by piece, sent to the device, quantised there if that is wanted, and dropped before
the next one is begun.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx
from jaxtyping import DTypeLike

from jpaged.errors import ModelLoadError
from jpaged.models.config import LlamaConfig
from jpaged.models.llama import Llama
from jpaged.models.parameter_map import EMBED, LM_HEAD, ParameterPath, Piece, is_quantisable, parameter_map, path_name
from jpaged.models.quantised import quantise, quantise_kernel

# Called with (bytes on the device so far, bytes in all) after each parameter.
Progress = Callable[[int, int], None]


@runtime_checkable
class TensorSource(Protocol):
    """A checkpoint whose tensors have Hugging Face names and shapes and can be read in any order."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor, a float array of any width."""
        ...


def float_dtype(dtype: DTypeLike) -> np.dtype:
    """The numpy dtype of weights.

    Raises:
      ModelLoadError: not a floating-point dtype of at least 16 bits.

    Example:
      >>> float_dtype("bfloat16").name
      'bfloat16'
    """
    names = ("float32", "bfloat16", "float16")
    try:
        name = jax.numpy.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in names:
        raise ModelLoadError(f"the dtype of weights is {name}, expected one of {', '.join(names)}")
    return jax.numpy.dtype(name)


def abstract_llama(config: LlamaConfig, dtype: DTypeLike, weights: str | None = None) -> Llama:
    """A Llama whose parameters have shapes and dtypes but no memory; `weights` as in `load_model`."""

    def make() -> Llama:
        model = Llama(config, rngs=nnx.Rngs(0), dtype=dtype)
        return model if weights is None else quantise(model, weights)

    return nnx.eval_shape(make)


def with_arrays(abstract: Llama, arrays: Mapping[ParameterPath, jax.Array]) -> Llama:
    """What `abstract_llama` gave, with these arrays as its parameters; nothing is copied."""
    graph, state = nnx.split(abstract)
    flat = [(path, variable.replace(arrays[path])) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def fill_llama(
    config: LlamaConfig,
    source: TensorSource,
    *,
    dtype: DTypeLike,
    weights: str | None = None,
    progress: Progress | None = None,
) -> Llama:
    """Reads a checkpoint into a new Llama.

    A tied model has no output projection of its own; checkpoints that hold `lm_head.weight` all the same must hold the
    embedding table there, and that is checked.

    Args:
      config: the shape that the checkpoint must have.
      source: its tensors.
      dtype: of the model; tensors are converted on the host.
      weights: the form of the layers' kernels, see `load_model`.
      progress: called with (bytes on the device, bytes in all) after each parameter.

    Raises:
      ModelLoadError: tensors are missing, unexpected or of the wrong shape; every one is named before any is read.
    """
    wanted = float_dtype(dtype)
    mapping = parameter_map(config)
    tied_head = config.tie_word_embeddings and LM_HEAD in source.shapes
    check_tensors(mapping, source.shapes, extra=(LM_HEAD,) if tied_head else ())
    if tied_head and not _equal(source, LM_HEAD, EMBED):
        raise ModelLoadError(
            f"{LM_HEAD} differs from {EMBED}, but the config says that they are tied; "
            'set "tie_word_embeddings" to false in config.json to use both'
        )
    model = abstract_llama(config, wanted, weights)
    total, arrays = num_bytes(model), {}
    for path, pieces in mapping.items():
        arrays |= place(path, _assemble(path, pieces, source, wanted), weights)
        if progress is not None:
            progress(sum(array.nbytes for array in arrays.values()), total)
    return with_arrays(model, arrays)


def num_bytes(model: Llama) -> int:
    """Bytes of the parameters of a model, abstract or not.

    Example:
      >>> config = LlamaConfig(vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
      ...                      num_attention_heads=2)
      >>> [num_bytes(abstract_llama(config, "bfloat16", weights)) for weights in (None, "int8")]
      [376, 376]
    """
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(model)))


def place(
    path: ParameterPath, parameter: np.ndarray | jax.Array, weights: str | None
) -> dict[ParameterPath, jax.Array]:
    """Sends a parameter to the device, unless it is there, and quantises a kernel there; gives what is kept, by path.

    Waits until all is there: else host buffers, and kernels that are not quantised yet, would pile up.
    """
    array = jax.device_put(parameter)
    if weights is None or not is_quantisable(path):
        return {path: jax.block_until_ready(array)}
    codes, scale = jax.block_until_ready(quantise_kernel(array, weights))
    return {path: codes, (*path[:-1], "scale"): scale}


def check_tensors(
    mapping: Mapping[ParameterPath, tuple[Piece, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    extra: Collection[str] = (),
) -> None:
    """Compares what a checkpoint has with what a model needs.

    Args:
      mapping: the model's parameters.
      shapes: the checkpoint's tensors.
      extra: tensors that may be there beside.

    Raises:
      ModelLoadError: names every tensor that is missing, unexpected or of the wrong shape.
    """
    needed = {piece.name: piece.shape for pieces in mapping.values() for piece in pieces}
    problems = []
    if missing := [name for name in needed if name not in shapes]:
        problems.append(f"missing: {', '.join(missing)}")
    if unexpected := [name for name in shapes if name not in needed and name not in extra]:
        problems.append(f"unexpected: {', '.join(unexpected)}")
    wrong = [
        f"{name} (got {list(shapes[name])}, expected {list(shape)})"
        for name, shape in needed.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    if wrong:
        problems.append(f"wrong shape: {', '.join(wrong)}")
    if problems:
        raise ModelLoadError(f"the checkpoint's tensors do not fit its config; {'; '.join(problems)}")


def _assemble(path: ParameterPath, pieces: tuple[Piece, ...], source: TensorSource, dtype: np.dtype) -> np.ndarray:
    """The host buffer of one parameter."""
    first = pieces[0]
    if len(pieces) == 1 and not first.transposed:
        return _read(path, first, source).astype(dtype, copy=False)
    rows = first.shape[1:] if first.transposed else first.shape[:-1]
    buffer = np.empty((*rows, pieces[-1].stop), dtype)
    for piece in pieces:
        tensor = _read(path, piece, source)
        buffer[..., piece.start : piece.stop] = tensor.T if piece.transposed else tensor
    return buffer


def _read(path: ParameterPath, piece: Piece, source: TensorSource) -> np.ndarray:
    tensor = source.read(piece.name)
    if tensor.shape != piece.shape or not jax.numpy.issubdtype(tensor.dtype, np.floating):
        raise ModelLoadError(
            f"{piece.name} for {path_name(path)} is {tensor.dtype}{list(tensor.shape)}, expected floating-point "
            f"numbers of shape {list(piece.shape)}"
        )
    return tensor


def _equal(source: TensorSource, a: str, b: str) -> bool:
    return source.shapes[a] == source.shapes[b] and np.array_equal(source.read(a), source.read(b))
