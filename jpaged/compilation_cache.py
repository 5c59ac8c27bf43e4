"""Compiled steps on disk: the second start of a program compiles nothing."""

import os
from pathlib import Path
from typing import Any

import jax

from jpaged.fetch import cache_folder


def enable_compilation_cache() -> Path | None:
    """Turns on jax's persistent compilation cache, unless the program has set it up itself.

    Returns:
      The folder in use; `None` if jax was told to keep none.
    """
    settings: Any = jax.config  # its attributes are made at run time, unknown to type checkers
    if not settings.jax_enable_compilation_cache:
        return None
    if settings.jax_compilation_cache_dir is None:
        settings.update("jax_compilation_cache_dir", os.fspath(cache_folder() / "jax"))
    return Path(settings.jax_compilation_cache_dir)
