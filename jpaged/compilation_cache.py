"""Compiled programs on disk: the second start of a process compiles nothing, and does not trace its steps either."""

import logging
import os
from pathlib import Path
from typing import Any, Final

import jax

from jpaged.fetch import cache_folder

logger = logging.getLogger(__name__)

_JAX_MIN_SECONDS: Final = 1.0  # by default jax does not keep what compiled quicker


def enable_compilation_cache() -> Path | None:
    """Turns on jax's persistent compilation cache, unless the program has set it up itself.

    Returns:
      The folder in use; `None` if jax was told to keep none, or the folder cannot be made.
    """
    settings: Any = jax.config  # its attributes are made at run time, unknown to type checkers
    if not settings.jax_enable_compilation_cache:
        return None
    if settings.jax_compilation_cache_dir is not None:
        return Path(settings.jax_compilation_cache_dir)
    folder = cache_folder() / "jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("compiled steps are not kept: %s (set JPAGED_CACHE to a folder)", error)
        return None
    settings.update("jax_compilation_cache_dir", os.fspath(folder))
    if settings.jax_persistent_cache_min_compile_time_secs == _JAX_MIN_SECONDS:
        settings.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a step has many quick programs
    return folder


def programs_folder(cache: Path) -> Path | None:
    """Where the programs of steps are kept (`jpaged.program_store`) beside jax's cache; `None` if that is no folder.

    Example:
      >>> programs_folder(Path("/tmp/jax")).as_posix(), programs_folder(Path("gs://bucket/jax"))
      ('/tmp/jax/jpaged', None)
    """
    is_address = cache.parts[:1] and cache.parts[0].endswith(":") and len(cache.parts[0]) > len("C:")
    return None if is_address else cache / "jpaged"
