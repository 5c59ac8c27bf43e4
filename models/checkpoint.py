"""Saving and restoring a Llama by Orbax.

A folder holds config.json, as Hugging Face writes it, and params/, an Orbax checkpoint of the parameters by their
paths: {"layers/0/mlp/down/kernel": array, ...}.
"""

import json
from pathlib import Path

import jax
from flax import nnx
from jaxtyping import DTypeLike

from jpaged.errors import ModelLoadError
from jpaged.models.config import LlamaConfig
from jpaged.models.llama import Llama
from jpaged.models.parameter_map import path_name
from jpaged.models.weights import Progress, abstract_llama, llama_from_arrays

_PARAMS = "params"


def is_orbax(folder: Path) -> bool:
    """Whether `save_orbax` wrote this folder."""
    return (folder / _PARAMS / "_METADATA").exists()


def save_orbax(model: Llama, folder: str | Path) -> None:
    """Saves parameters and config; `load_model` reads them back, in any dtype.

    Put the tokenizer's tokenizer.json beside them to serve text from the folder.

    Args:
      model: what to save.
      folder: made if need be; an earlier checkpoint in it is replaced.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> from jpaged.models import Llama, LlamaConfig, load_model
      >>> config = LlamaConfig(vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
      ...                      num_attention_heads=2)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_orbax(Llama(config, rngs=nnx.Rngs(0)), folder)
      ...     load_model(folder).config == config
      True
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {path_name(path): variable[...] for path, variable in nnx.to_flat_state(nnx.state(model))}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / _PARAMS, arrays, force=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_hf(), indent=2) + "\n", encoding="utf-8")


def restore_orbax(folder: Path, config: LlamaConfig, *, dtype: DTypeLike, progress: Progress | None = None) -> Llama:
    """Restores what `save_orbax` wrote; arrays are converted as they are read, so there is one copy.

    Args:
      folder: what `save_orbax` was given.
      config: its config.
      dtype: of the model.
      progress: called once, when all is there.

    Raises:
      ModelLoadError: a damaged checkpoint, or parameters that do not fit the config (each one is named).
      MemoryError, jax.errors.JaxRuntimeError: host or device have too little memory.
    """
    import orbax.checkpoint as ocp

    path = folder.absolute() / _PARAMS
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = nnx.to_flat_state(nnx.state(abstract_llama(config, dtype)))
    wanted = {
        path_name(name): jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=sharding)
        for name, variable in state
    }
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            metadata = checkpointer.metadata(path).item_metadata
            if metadata is None:  # how Orbax says that it could not read it
                raise ValueError("no metadata of the parameters in it")
            saved = metadata.tree
            _check({name: tuple(saved[name].shape) for name in saved}, {name: w.shape for name, w in wanted.items()})
            arrays = checkpointer.restore(path, wanted)
        except (ModelLoadError, MemoryError, jax.errors.JaxRuntimeError):
            raise  # too little memory is not damage
        except Exception as error:  # of any class: Orbax, tensorstore and json each have their own for damaged files
            reason = (str(error).splitlines() or [""])[0].split(". ")[0]
            raise ModelLoadError(
                f"the Orbax checkpoint {path} cannot be read; it is damaged or not whole: copy or save it again "
                f"({type(error).__name__}: {reason})"
            ) from error
    if progress is not None:
        total = sum(array.nbytes for array in arrays.values())
        progress(total, total)
    return llama_from_arrays(config, dtype, {name: arrays[path_name(name)] for name, _ in state})


def _check(saved: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> None:
    problems = [f"{name} is missing" for name in wanted if name not in saved]
    problems += [f"{name} is unexpected" for name in saved if name not in wanted]
    problems += [
        f"{name} has shape {list(saved[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in saved and saved[name] != shape
    ]
    if problems:
        raise ModelLoadError(f"the checkpoint does not fit its config: {'; '.join(problems)}")
