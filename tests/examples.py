"""Examples in documents: where they are, and what they say when they run."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"

FENCE = re.compile(
    r"^(?:<!-- test: (?P<mark>[^\n]*) -->\n)?```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)


def fences(document: Path) -> list[re.Match[str]]:
    return list(FENCE.finditer(document.read_text(encoding="utf-8")))


def example(document: Path, mark: str, containing: str) -> str:
    (source,) = [match["body"] for match in fences(document) if match["mark"] == mark and containing in match["body"]]
    return source


def run(source: str, where: str) -> tuple[dict[str, Any], str]:
    """Runs an example; returns its names and what it printed."""
    names: dict[str, Any] = {"__name__": "example"}
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, where, "exec"), names)
    return names, printed.getvalue()
