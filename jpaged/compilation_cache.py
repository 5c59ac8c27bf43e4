"""Compiled steps on disk: the second start of a program compiles nothing."""

import os
from pathlib import Path

import jax

from jpaged.fetch import cache_folder


def enable_compilation_cache() -> Path | None:
    """Turns on jax's persistent compilation cache, unless the program has set it up itself.

    Returns:
      The folder in use; `None` if jax was told to keep none.
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", os.fspath(cache_folder() / "jax"))
    return Path(jax.config.jax_compilation_cache_dir)
