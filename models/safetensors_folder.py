"""A folder of safetensors, one file or sharded with an index, as a source of tensors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jpaged.errors import ModelLoadError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Buffers that old checkpoints hold beside the weights; they follow from the config.
_DERIVED = ".rotary_emb.inv_freq"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      ModelLoadError: no file, no JSON, or no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist; expected a JSON file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


class SafetensorsFolder:
    """The tensors of a folder; files are mapped, a tensor is read when it is asked for.

    Args:
      folder: has model.safetensors, or the shards that model.safetensors.index.json names, or one *.safetensors file.

    Attributes:
      shapes: shape of each tensor; `rotary_emb.inv_freq` buffers are left out.

    Raises:
      ModelLoadError: no such file, a truncated or foreign one, a tensor in two files, or an index that does not fit.
    """

    def __init__(self, folder: Path):
        self._files: dict[str, Any] = {}
        self._home: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        index = self._index(folder)
        for file in self._file_names(folder, index):
            self._add(folder / file, file)
        if index is not None:
            self._compare(folder / INDEX, index)

    def read(self, name: str) -> np.ndarray:
        """The tensor in the file's dtype.

        Raises:
          ModelLoadError: a dtype that numpy does not know.
        """
        file = self._home[name]
        try:
            return self._files[file].get_tensor(name)
        except (SafetensorError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"{name} of {file} cannot be read: {error}") from error

    @staticmethod
    def _index(folder: Path) -> dict[str, str] | None:
        if not (folder / INDEX).exists():
            return None
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ModelLoadError(f"{folder / INDEX} lacks the object weight_map from tensor names to file names")
        if foreign := sorted(file for file in set(weight_map.values()) if Path(file).name != file):
            raise ModelLoadError(f"{folder / INDEX} names files outside its folder: {', '.join(foreign)}")
        return weight_map

    @staticmethod
    def _file_names(folder: Path, index: dict[str, str] | None) -> list[str]:
        if index is not None:
            return sorted(set(index.values()))
        if (folder / SINGLE).exists():
            return [SINGLE]
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        if len(files) != 1:
            found = ", ".join(files) or "no safetensors file"
            raise ModelLoadError(f"{folder} has {found}, expected {SINGLE}, or shards with {INDEX}")
        return files

    def _add(self, path: Path, file: str) -> None:
        if not path.exists():
            raise ModelLoadError(f"{path} does not exist, but {INDEX} names it; is the download complete?")
        try:
            handle = safe_open(path, framework="numpy")
            self._files[file] = handle
            for name in handle.keys():  # noqa: SIM118 (it has no __iter__)
                if name in self._home:
                    raise ModelLoadError(f"{name} is both in {self._home[name]} and in {file}")
                self._home[name] = file
                if not name.endswith(_DERIVED):
                    self.shapes[name] = tuple(handle.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{path} is not a whole safetensors file ({error}); it may be truncated or of another format"
            ) from error

    def _compare(self, path: Path, index: dict[str, str]) -> None:
        if absent := sorted(name for name, file in index.items() if self._home.get(name) != file):
            raise ModelLoadError(f"{path} names tensors that its files do not hold: {', '.join(absent)}")
        if unlisted := sorted(name for name in self._home if name not in index):
            raise ModelLoadError(f"{path} does not list tensors that its files hold: {', '.join(unlisted)}")
