"""`program_key`: what the compiled programs of a step depend on, found out without tracing them.

Whoever changes what a program computes changes one of these, and finds no program under the new key:

- the sources that programs are made from, and that nobody replaced a function of them in this process;
- the versions of Python and of the packages that trace, lower and compile;
- the device, its driver and, as a CPU is compiled for its instructions, the processor;
- jax's settings, the mesh in use and the variables of the environment that compilers read;
- what the programs are made from: the model without its weights, types and places of all arrays, and options.
"""

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax

import jpaged
from jpaged.fingerprint import UnseenError, describe, is_known, without_address

_BEGAN: Final = jpaged.BEGAN
_TICK_S: Final = 0.05  # a file system's clock may be behind by so much
_PACKAGES: Final = (
    *("jax", "jaxlib", "flax", "numpy", "ml_dtypes", "libtpu", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12"),
    *(f"jax-cuda{version}-{part}" for version in (12, 13) for part in ("plugin", "pjrt")),
)
# Settings of jax that change nothing but where its own cache lies and what it says.
_QUIET_SETTINGS: Final = (
    *("jax_compilation_cache", "jax_persistent_cache", "jax_enable_compilation_cache", "jax_raise_persistent_cache"),
    *("jax_log", "jax_debug_log", "jax_explain", "jax_traceback_filtering", "jax_pprint", "jax_transfer_guard"),
    *("jax_captured_constants", "jax_tracer_error", "jax_compiler_detailed_logging", "jax_platforms"),
)
# jax's own are read into its settings. Of the others, those that no compiler reads.
_COMPILERS_READ: Final = ("XLA_", "TF_", "TPU_", "LIBTPU_", "CUDA_", "NVIDIA_", "MOSAIC_", "PALLAS_", "ROCM_", "HIP_")
_NOT_READ: Final = ("XLA_PYTHON_CLIENT_", "TF_CPP_", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_", "NVIDIA_DRIVER_")


def program_key(parts: Any, device: Any) -> str:
    """A name for all that the programs of a step depend on, but which of them it is.

    Args:
      parts: what they are made from; see `describe`.
      device: the `jax.Device` that they run on.

    Raises:
      UnseenError: something that they depend on cannot be known without tracing them, and what.

    Example:
      >>> eight, again, nine = (program_key(("forward", size), jax.devices()[0]) for size in (8, 8, 9))
      >>> eight == again, eight == nine
      (True, False)
    """
    refuse_replaced_code()
    text = "\n".join([sources(), versions(), environment(os.environ), settings(), place(device), describe(parts)])
    return hashlib.sha256(text.encode()).hexdigest()


class _Sources(NamedTuple):
    """Files that programs are made from.

    Attributes:
      paths: of all of them.
      digest: of names and contents.
      modules: those of jpaged itself among them, without its name.
      imports: packages that they import.
    """

    paths: tuple[Path, ...]
    digest: str
    modules: frozenset[str]
    imports: frozenset[str]


@functools.cache
def _read_sources() -> _Sources:
    """Models and kernels whole, and of the rest what `jpaged.step` imports, or what that imports."""
    (root,) = jpaged.__path__
    found, imports, wanted = {}, set(), ["step"]
    while wanted:
        path = Path(root, f"{wanted.pop()}.py")
        if path not in found and path.is_file():
            found[path] = text = path.read_bytes()
            wanted += [name.decode() for name in re.findall(rb"^ *(?:from|import) jpaged\.(\w+)", text, re.MULTILINE)]
    if not found:
        raise UnseenError(f"the sources of jpaged, which are not files in {root}")
    modules = frozenset(path.stem for path in found)
    for folder in (*_paths("jpaged.models"), *_paths("jpaged.pallas_kernels")):
        for parent, names, files in os.walk(folder):
            names[:] = {*names} - {"__pycache__"}
            found.update((Path(parent, name), Path(parent, name).read_bytes()) for name in files)
    digest = hashlib.sha256()
    for name, text in sorted((f"{path.parent.name}/{path.name}", text) for path, text in found.items()):
        digest.update(f"{name} {len(text)}\n".encode())
        digest.update(text)
        imports.update(re.findall(rb"^ *(?:from|import) (\w+)", text, re.MULTILINE))
    return _Sources(tuple(found), digest.hexdigest(), modules, frozenset(word.decode() for word in imports))


def _paths(name: str) -> list[str]:
    return list(importlib.import_module(name).__path__)


def sources() -> str:
    """A name for the files that programs are made from.

    Raises:
      UnseenError: this process may have read another version of one of them.
    """
    read = _read_sources()
    for path in read.paths:
        if path.stat().st_ctime > _BEGAN - _TICK_S:
            raise UnseenError(f"{path}, which was changed after this process began")
    return read.digest


def refuse_replaced_code() -> None:
    """Raises:
    UnseenError: a module or a class that programs are made from holds a function of elsewhere, as after a patch.
    """
    made_from = {"models", "pallas_kernels", *_read_sources().modules}
    for name, module in [*sys.modules.items()]:
        if name.startswith("jpaged.") and name.split(".")[1] in made_from:
            for value in [*vars(module).values()]:
                _refuse_foreign(value, name)
                if isinstance(value, type) and value.__module__ == name:
                    for method in [*vars(value).values()]:
                        _refuse_foreign(method, f"{name}.{value.__name__}")


def _refuse_foreign(value: Any, where: str) -> None:
    value = getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))
    while callable(value):
        # What a decorator wraps lends it its name, not its code.
        is_function = isinstance(value, types.FunctionType)
        module = value.__globals__.get("__name__") if is_function else getattr(value, "__module__", None)
        package = module.partition(".")[0] if isinstance(module, str) else "jpaged"
        known = package.startswith("namedtuple_") or package in _read_sources().imports  # the library writes the first
        if package == "unittest" or not (known or is_known(str(module or "jpaged"))):
            raise UnseenError(f"{module}.{getattr(value, '__qualname__', '')}, which {where} holds")
        value = getattr(value, "__wrapped__", None)


@functools.cache
def versions() -> str:
    """Of Python and of what traces, lowers and compiles."""
    return f"{sys.version} {[(name, _version(name)) for name in _PACKAGES]}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(environ: Mapping[str, str]) -> str:
    """The variables that compilers read.

    Example:
      >>> environment({"XLA_FLAGS": "--xla_gpu_autotune_level=0", "HOME": "/", "XLA_PYTHON_CLIENT_PREALLOCATE": "1"})
      "[('XLA_FLAGS', '--xla_gpu_autotune_level=0')]"
    """
    read = [(k, v) for k, v in environ.items() if k.startswith(_COMPILERS_READ) and not k.startswith(_NOT_READ)]
    return repr(sorted(read))


def settings() -> str:
    """jax's, as they are in this thread, with the mesh in use."""
    config: Any = jax.config
    values = {name: getattr(config, name, None) for name in config.values if not name.startswith(_QUIET_SETTINGS)}
    return without_address(f"{sorted(values.items())!r} {jax.sharding.get_abstract_mesh()!r}")


def place(device: Any) -> str:
    """A device, its driver, and the processor beside it."""
    known = ("platform", "device_kind", "id", "compute_capability", "core_count", "num_cores", "coords")
    described = [(name, getattr(device, name, None)) for name in known]
    shared = Path("/tmp/nvidia-mps/control").exists()  # see pallas_kernels/layer.py
    return f"{described} {device.client.platform_version} {jax.process_count()} {shared} {_processor()}"


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    kept = dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    return f"{platform.machine()} {platform.processor()} {os.cpu_count()} {[*kept]}"
