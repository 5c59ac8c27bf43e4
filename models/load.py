"""`load_model`: a Llama from a folder of safetensors, a GGUF file or an Orbax checkpoint."""

from pathlib import Path

from jaxtyping import DTypeLike

from jpaged.errors import ModelLoadError
from jpaged.models.checkpoint import is_orbax, restore_orbax
from jpaged.models.config import LlamaConfig
from jpaged.models.gguf import GGUFSource
from jpaged.models.llama import Llama
from jpaged.models.parameter_map import check_form
from jpaged.models.safetensors_folder import SafetensorsFolder, read_json
from jpaged.models.weights import Progress, fill_llama, float_dtype


def load_config(path: str | Path) -> LlamaConfig:
    """The config of a model without its weights.

    Args:
      path: as for `load_model`.

    Raises:
      ModelLoadError: nothing there, or not a Llama.

    Example:
      >>> import json, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     config = LlamaConfig(vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
      ...                          num_attention_heads=2)
      ...     _ = (Path(folder) / "config.json").write_text(json.dumps(config.to_hf()))
      ...     load_config(folder) == config
      True
    """
    path = Path(path)
    if path.is_file():
        return GGUFSource(path).config
    if not path.is_dir():
        raise ModelLoadError(f"{path} does not exist; expected a folder or a .gguf file")
    generation = path / "generation_config.json"
    return LlamaConfig.from_hf(read_json(path / "config.json"), read_json(generation) if generation.exists() else None)


def load_model(
    path: str | Path,
    *,
    dtype: DTypeLike = "float32",
    weights: str | None = None,
    progress: Progress | None = None,
) -> Llama:
    """Reads a Llama, tensor by tensor, straight into `dtype` or `weights`: never two copies of the weights.

    Args:
      path: a folder with config.json and safetensors (one file, or shards with an index); a .gguf file, whose blocks
        are dequantised; or a folder that `save_orbax` wrote.
      dtype: of the parameters: "float32", "bfloat16" or "float16".
      weights: "int8" or "fp8": the kernels of the layers are held so, with scales (`quantise`). `None`: in `dtype`.
      progress: called with (bytes loaded, bytes in all) as parameters arrive.

    Raises:
      ModelLoadError: nothing there, a format or model that is not supported, a truncated file, or tensors that do not
        fit the config (each one is named).
      ConfigError: `weights` is another form.

    Example:
      >>> load_model("no-such-folder")
      Traceback (most recent call last):
      ...
      jpaged.errors.ModelLoadError: no-such-folder does not exist; expected a folder or a .gguf file
    """
    dtype, path = float_dtype(dtype), Path(path)
    if weights is not None:
        check_form(weights)
    options = {"dtype": dtype, "weights": weights, "progress": progress}
    if path.is_file():
        source = GGUFSource(path)
        return fill_llama(source.config, source, **options)
    config = load_config(path)
    if is_orbax(path):
        return restore_orbax(path, config, **options)
    return fill_llama(config, SafetensorsFolder(path), **options)
