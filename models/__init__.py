"""Models that are served through pages: the `PagedModel` protocol, a Llama, and how weights are read and written.

Names are resolved when they are first used, so `jpaged.models.config` can be had without jax.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jpaged.models.checkpoint import save_orbax
    from jpaged.models.config import LlamaConfig, RopeScaling
    from jpaged.models.export import export_safetensors
    from jpaged.models.gguf import iter_gguf_tensors
    from jpaged.models.llama import Llama
    from jpaged.models.load import load_config, load_model
    from jpaged.models.protocol import PagedModel
    from jpaged.models.quantised import quantise

__all__ = [
    "Llama",
    "LlamaConfig",
    "PagedModel",
    "RopeScaling",
    "export_safetensors",
    "iter_gguf_tensors",
    "load_config",
    "load_model",
    "quantise",
    "save_orbax",
]

_HOME = {
    "Llama": "llama",
    "LlamaConfig": "config",
    "PagedModel": "protocol",
    "RopeScaling": "config",
    "export_safetensors": "export",
    "iter_gguf_tensors": "gguf",
    "load_config": "load",
    "load_model": "load",
    "quantise": "quantised",
    "save_orbax": "checkpoint",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"jpaged.models.{_HOME[name]}"), name)
    raise AttributeError(f"module 'jpaged.models' has no attribute {name!r}; its public names are {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
