"""What every script that prints figures has in common: tables for people, and a last line of JSON."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def _git(*arguments: str) -> str:
    root = Path(__file__).resolve().parent.parent
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _commit() -> str:
    """The commit measured; "-dirty" if files differ from it. JPAGED_COMMIT names it where there is no git checkout."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return os.environ.get("JPAGED_COMMIT", "unknown")
    return commit + ("-dirty" if _git("status", "--porcelain") else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def environment() -> dict[str, Any]:
    """Commit, date, device and versions: what a figure is worth nothing without."""
    import jax

    import jpaged

    device = jax.devices()[0]
    versions = {"jpaged": jpaged.__version__}
    for name in ("jax", "jaxlib", "flax", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    name = f"{_processor()}, {_cpu_count()} cores" if device.platform == "cpu" else device.device_kind
    return {
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": name,
        "platform": device.platform,
        "python": platform.python_version(),
        "versions": versions,
    }


def _cpu_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def print_table(title: str, columns: list[str], rows: list[list[object]]) -> None:
    """A table whose first column is text and whose others are figures."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=None if Console().is_terminal else 120).print(table)


def print_json(name: str, results: dict[str, Any]) -> None:
    """The last line of a script: one JSON object with the results and the environment."""
    print(json.dumps({"script": name, **environment(), "results": results}))
