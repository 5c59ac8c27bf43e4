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
from jpaged.models.parameter_map import ParameterPath, is_quantisable, path_name
from jpaged.models.quantised import refuse_quantised
from jpaged.models.weights import Progress, abstract_llama, num_bytes, place, with_arrays

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

    Raises:
      ConfigError: the model's weights are quantised.

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

    refuse_quantised(model, "saved")
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {path_name(path): variable[...] for path, variable in nnx.to_flat_state(nnx.state(model))}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / _PARAMS, arrays, force=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_hf(), indent=2) + "\n", encoding="utf-8")


def restore_orbax(
    folder: Path,
    config: LlamaConfig,
    *,
    dtype: DTypeLike,
    weights: str | None = None,
    progress: Progress | None = None,
) -> Llama:
    """Restores what `save_orbax` wrote; arrays are converted as they are read, so there is one copy.

    Args:
      folder: what `save_orbax` was given.
      config: its config.
      dtype: of the model.
      weights: the form of the layers' kernels, see `load_model`. They are then read one by one.
      progress: called with (bytes on the device, bytes in all) as arrays arrive.

    Raises:
      ModelLoadError: a damaged checkpoint, or parameters that do not fit the config (each one is named).
      MemoryError, jax.errors.JaxRuntimeError: host or device have too little memory.
    """
    import orbax.checkpoint as ocp

    path = folder.absolute() / _PARAMS
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    model = plain = abstract_llama(config, dtype)
    if weights is not None:
        model = abstract_llama(config, dtype, weights)
    state = nnx.to_flat_state(nnx.state(plain))
    wanted = {name: jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=sharding) for name, variable in state}
    # A kernel that is quantised comes by itself, so that the next one is not there yet; all others together.
    alone = [name for name in wanted if weights is not None and is_quantisable(name)]
    groups = [[name] for name in alone] + [[name for name in wanted if name not in set(alone)]]
    total = num_bytes(model)
    arrays: dict[ParameterPath, jax.Array] = {}
    with ocp.PyTreeCheckpointer() as checkpointer:
        try:
            metadata = checkpointer.metadata(path).item_metadata
            if metadata is None:  # how Orbax says that it could not read it
                raise ValueError("no metadata of the parameters in it")
            saved = metadata.tree
            shapes = {path_name(name): one.shape for name, one in wanted.items()}
            _check({name: tuple(saved[name].shape) for name in saved}, shapes)
            for group in groups:
                part = {path_name(name): wanted[name] for name in group}
                restore_args = ocp.checkpoint_utils.construct_restore_args(part)
                request = ocp.args.PyTreeRestore(item=part, restore_args=restore_args, partial_restore=True)
                restored = checkpointer.restore(path, args=request)
                for name in group:
                    arrays |= place(name, restored.pop(path_name(name)), weights)
                if progress is not None:
                    progress(sum(array.nbytes for array in arrays.values()), total)
        except (ModelLoadError, MemoryError, jax.errors.JaxRuntimeError):
            raise  # too little memory is not damage
        except Exception as error:  # of any class: Orbax, tensorstore and json each have their own for damaged files
            reason = (str(error).splitlines() or [""])[0].split(". ")[0]
            raise ModelLoadError(
                f"the Orbax checkpoint {path} cannot be read; it is damaged or not whole: copy or save it again "
                f"({type(error).__name__}: {reason})"
            ) from error
    return with_arrays(model, arrays)


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
