"""`ProgramStore`: compiled programs on disk, under keys that are known before anything is traced."""

import contextlib
import hashlib
import importlib
import logging
import os
import pickle
import time
import uuid
import zlib
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Final

import jax
from jax.experimental import serialize_executable

from jpaged.fingerprint import UnseenError
from jpaged.program_key import program_key

logger = logging.getLogger(__name__)

MAX_BYTES: Final = 4 << 30
_SUFFIX, _PARTIAL = ".program", ".partial"
_MAGIC: Final = b"jpaged program 1\n"
_DIGEST_BYTES: Final = 32
_LEFT_BEHIND_S: Final = 3600.0


def open_store(folder: Path, parts: Any, sharding: Any) -> "ProgramStore | None":
    """The store of the programs that are made from `parts` on one device; `None` where there can be none.

    Args:
      folder: of the files.
      parts: see `program_key`.
      sharding: of an array that they take, of one device.
    """
    devices = list(sharding.device_set)
    if len(devices) != 1:
        return None
    _find_kernel_library(devices[0].platform)
    try:
        key = program_key(parts, devices[0])
    except (UnseenError, OSError) as error:
        logger.info("steps are traced at each start, as their code is not known: %s", error)
        return None
    return ProgramStore(folder, key, devices[0])


def _find_kernel_library(platform: str) -> None:
    """Sets the variable by which kernels of Mosaic GPU find the library that launches them.

    An import does it, which comes with lowering, and where all programs are kept nothing is lowered. The variable is
    part of the key, so it is set before.
    """
    if platform == "gpu":
        with contextlib.suppress(ImportError):  # this jax has no such kernels
            importlib.import_module("jax.experimental.mosaic.gpu")


class ProgramStore:
    """Keeps programs that were compiled, and gives them to later processes.

    What is damaged, or cannot be read or written, is as if it were not there; the log says so once. Processes may share
    a folder: a file appears whole or not at all. What was used longest ago goes first.

    A folder is trusted: whoever may write to it may have this process run what he likes.

    Args:
      folder: made with the first program.
      key: stands for all that the programs depend on; see `program_key`.
      device: the `jax.Device` that they run on.
      max_bytes: of all programs in the folder.

    Example:
      >>> import tempfile
      >>> store = ProgramStore(Path(tempfile.mkdtemp()), "0", jax.devices()[0])
      >>> store.save("double", jax.jit(lambda x: 2 * x).lower(1.0).compile())
      >>> float(store.load("double")(4.0)), store.load("triple")
      (8.0, None)
    """

    def __init__(self, folder: Path, key: str, device: Any, *, max_bytes: int = MAX_BYTES):
        self._folder, self._key, self._device, self._max_bytes = folder, key, device, max_bytes
        self._said: set[str] = set()

    def load(self, name: Hashable) -> Callable | None:
        """A program, ready to be called; `None` if it is not there."""
        path = self._path(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say("compiled programs cannot be read: %s", error)
            return None
        try:
            executable = _unpack(data, self._device)
        except Exception as error:  # whatever a file holds, the program can be compiled again
            self._say("a compiled program is damaged, it is compiled again: %s", f"{path}: {error!r:.200}")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return executable

    def save(self, name: Hashable, executable: Any) -> None:
        """Keeps a program. It must have been compiled in this process: one that was loaded need not be whole."""
        try:
            data = _pack(executable)
        except Exception as error:  # not every program of every back end can be taken down
            self._say("compiled programs are not kept: %s", f"{error!r:.200}")
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room(len(data))
            partial = self._folder / f"{uuid.uuid4().hex}{_PARTIAL}"
            try:
                partial.write_bytes(data)
                os.replace(partial, self._path(name))
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        except OSError as error:
            self._say("compiled programs are not kept: %s", error)

    def _path(self, name: Hashable) -> Path:
        return self._folder / (hashlib.sha256(f"{self._key} {name!r}".encode()).hexdigest() + _SUFFIX)

    def _make_room(self, needed: int) -> None:
        """Deletes what was used longest ago, and what writers that were killed left behind.

        What another process may still be writing is neither counted nor deleted: it counts once it is whole.
        """
        files, now = [], time.time()
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process deletes, too
                if path.suffix == _SUFFIX:
                    files.append((path.stat().st_mtime, path.stat().st_size, path))
                elif path.suffix == _PARTIAL and now - path.stat().st_mtime > _LEFT_BEHIND_S:
                    path.unlink()
        total = needed + sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total > self._max_bytes:
                path.unlink(missing_ok=True)
                total -= size

    def _say(self, message: str, error: Any) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning(message, error)


def _pack(executable: Any) -> bytes:
    body = zlib.compress(pickle.dumps(serialize_executable.serialize(executable)), 1)
    return _MAGIC + hashlib.sha256(body).digest() + body


def _unpack(data: bytes, device: Any) -> jax.stages.Compiled:
    start = len(_MAGIC)
    digest, body = data[start : start + _DIGEST_BYTES], data[start + _DIGEST_BYTES :]
    if data[:start] != _MAGIC or hashlib.sha256(body).digest() != digest:
        raise ValueError("its checksum is wrong")
    parts = pickle.loads(zlib.decompress(body))
    return serialize_executable.deserialize_and_load(*parts, backend=device.client, execution_devices=[device])
