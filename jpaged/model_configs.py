"""`config_of`: the shape of a model by its name or from its files, without its weights. Imports no jax."""

from pathlib import Path

from jpaged.errors import FetchError
from jpaged.model_shapes import MODEL_SHAPES, model_shape
from jpaged.models.config import LlamaConfig


def config_of(model: str | Path) -> LlamaConfig:
    """The config of a well-known name, a config.json, a folder that has one, or a .gguf file.

    Raises:
      FetchError: nothing of the kind; nothing is downloaded.
      ModelLoadError: the file is damaged, or describes another architecture.

    Example:
      >>> config_of("llama-3.2-1b").num_hidden_layers
      16
    """
    if isinstance(model, str) and model.lower() in MODEL_SHAPES:
        return model_shape(model)
    path = Path(model).expanduser()
    if path.is_dir() or path.suffix == ".json":
        from jpaged.models.safetensors_folder import read_json

        return LlamaConfig.from_hf(read_json(path / "config.json" if path.is_dir() else path))
    if path.is_file():
        from jpaged.models.gguf import GGUFSource

        return GGUFSource(path).config
    raise FetchError(
        f"there is no model {str(model)!r}: expected one of {', '.join(MODEL_SHAPES)}, a config.json, a folder that "
        "has one, or a .gguf file; planning downloads nothing"
    )
