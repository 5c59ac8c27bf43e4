"""`measure_cold_start`: seconds from the start of a process until an engine of its own answered its first request."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jpaged.errors import ConfigError
from scripts.engine.peers import Yardstick

READY: Final = "ready "
_SCRIPT: Final = Path(__file__).resolve().parents[1] / "bench_engine.py"


def measure_cold_start(arguments: Sequence[str], cache: str, *, timeout_s: float) -> float:
    """A process that fills an empty compilation cache. Must run before this process has jax take the device.

    Args:
      arguments: of `bench_engine.py`, so that the processes make the same engine.
      cache: an empty folder.
      timeout_s: for the process.

    Raises:
      ConfigError: the process failed; the message has its last lines.
    """
    environ = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return _seconds_until_ready(arguments, environ, timeout_s)


def compare_start(start: Mapping[str, Any], yardstick: Yardstick) -> dict[str, Any]:
    """The same, beside the peers' figures."""
    compared = {kind: yardstick.compare(start[f"{kind}_s"], f"start {kind}") for kind in ("cold", "warm")}
    return {**start, **{kind: found for kind, found in compared.items() if found}}


def _seconds_until_ready(arguments: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> float:
    start = time.time()  # the processes share this clock
    command = [sys.executable, "-u", os.fspath(_SCRIPT), *arguments, "--until-ready"]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"an engine was not ready after {timeout_s:.0f} s; measure fewer workloads") from None
    if done.returncode != 0:
        raise ConfigError(f"an engine did not start:\n{done.stderr.strip()[-2000:]}")
    ready = [line.removeprefix(READY) for line in done.stdout.splitlines() if line.startswith(READY)]
    return float(ready[-1]) - start
