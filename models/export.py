"""Writing a Llama as a Hugging Face folder: config.json and safetensors."""

import json
import math
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jpaged.errors import ConfigError
from jpaged.models.llama import Llama
from jpaged.models.parameter_map import ParameterPath, Piece, parameter_map
from jpaged.models.quantised import refuse_quantised
from jpaged.models.safetensors_folder import INDEX, SINGLE

_DEFAULT_SHARD_BYTES = 5 * 10**9


def export_safetensors(model: Llama, folder: str | Path, *, max_shard_bytes: int = _DEFAULT_SHARD_BYTES) -> None:
    """Writes what Hugging Face transformers and `load_model` read.

    The host holds one shard at a time. Earlier safetensors in the folder are removed; a tied output projection is not
    written.

    Args:
      model: what to write; its dtype is kept.
      folder: made if need be.
      max_shard_bytes: tensors are spread over several files, with an index, where they take more than this.

    Raises:
      ConfigError: `max_shard_bytes` is not above 0, or the model's weights are quantised.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> from jpaged.models import Llama, LlamaConfig, load_model
      >>> config = LlamaConfig(vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
      ...                      num_attention_heads=2)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     export_safetensors(Llama(config, rngs=nnx.Rngs(0)), folder)
      ...     load_model(folder).config == config
      True
    """
    if max_shard_bytes <= 0:
        raise ConfigError(f"max_shard_bytes is {max_shard_bytes}, expected a number of bytes above 0")
    refuse_quantised(model, "exported")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / SINGLE, folder / INDEX, *folder.glob("model-*-of-*.safetensors")):
        old.unlink(missing_ok=True)
    parameters = dict(nnx.to_flat_state(nnx.state(model)))
    shards = _shards(model, max_shard_bytes)
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for file, shard in zip(files, shards, strict=True):
        tensors = {piece.name: _cut(parameters[path][...], piece) for path, piece in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if count > 1:
        weight_map = {piece.name: file for file, shard in zip(files, shards, strict=True) for _, piece in shard}
        size = model.config.num_parameters * model.dtype.itemsize
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config = model.config.to_hf() | {"torch_dtype": model.dtype.name}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _shards(model: Llama, max_shard_bytes: int) -> list[list[tuple[ParameterPath, Piece]]]:
    """Checkpoint tensors in order, cut into runs of at most `max_shard_bytes`; a larger tensor is a run of its own."""
    shards: list[list[tuple[ParameterPath, Piece]]] = []
    used = 0
    for path, pieces in parameter_map(model.config).items():
        for piece in pieces:
            size = math.prod(piece.shape) * model.dtype.itemsize
            if not shards or used + size > max_shard_bytes:
                shards.append([])
                used = 0
            shards[-1].append((path, piece))
            used += size
    return shards


def _cut(parameter: jax.Array, piece: Piece) -> np.ndarray:
    """The checkpoint tensor that a part of a parameter is; cut on the device, so only that part crosses."""
    part = parameter[..., piece.start : piece.stop]
    return np.ascontiguousarray(part.T if piece.transposed else part)
