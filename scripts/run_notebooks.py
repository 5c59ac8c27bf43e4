"""Executes every notebook of `notebooks/`, which are jupytext text files (.md or .py), in fresh kernels.

    python scripts/run_notebooks.py [NAME...] [--out FOLDER]

A notebook runs in its own folder, as in Jupyter. The first cell that raises ends the run with its traceback. `--out`
keeps the executed .ipynb files.
"""

import argparse
import os
import sys
import time
from pathlib import Path

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def text_notebooks() -> list[Path]:
    """The files of `notebooks/` that have a jupytext header."""
    paths = sorted([*NOTEBOOKS.glob("*.md"), *NOTEBOOKS.glob("*.py")])
    return [path for path in paths if "jupytext:" in path.read_text(encoding="utf-8")[:2000]]


def execute(path: Path, out: Path | None, timeout_s: int) -> None:
    import jupytext
    import nbclient
    import nbformat

    notebook = jupytext.read(path)
    client = nbclient.NotebookClient(
        notebook, timeout=timeout_s, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    if out:
        out.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, out / f"{path.stem}.ipynb")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="stems of the notebooks to run; all if none is given")
    parser.add_argument("--out", type=Path, help="folder for the executed .ipynb files")
    parser.add_argument("--timeout", type=int, default=600, help="seconds a cell may take")
    args = parser.parse_args()
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # this environment's kernel, not one in the user's home
    paths = [path for path in text_notebooks() if not args.names or path.stem in args.names]
    missing = set(args.names) - {path.stem for path in paths}
    if missing:
        print(f"no such notebook in {NOTEBOOKS}: {', '.join(sorted(missing))}", file=sys.stderr)
        return 2
    for path in paths:
        start = time.monotonic()
        execute(path, args.out, args.timeout)
        print(f"{path.name}: ran in {time.monotonic() - start:.0f} s", flush=True)
    print(f"{len(paths)} notebooks ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
