"""Writes the rendered parts of the docs: tables of measured figures, and the repository's address.

    python scripts/render_benchmarks.py            rewrite them
    python scripts/render_benchmarks.py --check    write nothing; name the files that are stale and exit with 1
    python scripts/bench_engine.py --json | python scripts/render_benchmarks.py --add NAME

docs/benchmarks/NAME.json is one record: the last line of a script, as `scripts/report.py` makes it. `--add` keeps the
last line of its standard input as such a record, then rewrites. A rendered part stands between two comments:

    <!-- rendered: engine -->
    (written by this script)
    <!-- end of rendered -->

Needs the standard library alone.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import render_memory, render_tpu
from scripts.cuda import tables as cuda_tables
from scripts.engine import tables
from scripts.markdown import table
from scripts.render_memory import source
from scripts.serving import tables as serving_tables
from scripts.speculation import tables as speculation_tables

ROOT = Path(__file__).resolve().parent.parent
# Where the project lives; docs/README.md says what to do after a change.
REPOSITORY = "https://github.com/jpaged/jpaged"

_PART = re.compile(r"<!-- rendered: (\S+) -->\n(.*?)<!-- end of rendered -->", re.DOTALL)
_MARK = re.compile(r"<!-- (?:rendered: \S+|end of rendered) -->")
_ADDRESS = re.compile(r'^REPOSITORY = ".*"$', re.MULTILINE)
_ENVELOPE = {"script": str, "commit": str, "date": str, "device": str, "python": str, "versions": dict, "results": dict}
_MIB = 1 << 20


@dataclass(frozen=True)
class Record:
    """One run of a script.

    Attributes:
      name: the file's stem.
      script: stem of the script in scripts/.
      commit, date, device, python, versions: where the figures come from.
      results: the figures.
    """

    name: str
    script: str
    commit: str
    date: str
    device: str
    python: str
    versions: Mapping[str, str]
    results: Mapping[str, Any]

    @classmethod
    def from_line(cls, name: str, line: str) -> "Record":
        """Reads the JSON that a script printed.

        Raises:
          ValueError: it is no such JSON, or lacks something; the message says what.
        """
        try:
            fields = json.loads(line)
        except ValueError:
            raise ValueError(f"{name}: got {line[:60]!r}, expected the JSON line that a script ends with") from None
        if not isinstance(fields, dict):
            raise ValueError(f"{name}: got a JSON {type(fields).__name__}, expected an object")
        wrong = [key for key, kind in _ENVELOPE.items() if not isinstance(fields.get(key), kind)]
        if wrong:
            raise ValueError(f"{name}: {', '.join(wrong)} missing or of the wrong kind; see scripts/report.py")
        return cls(name, **{key: fields[key] for key in _ENVELOPE})


def load_records(folder: Path) -> list[Record]:
    """All records of a folder, by script, device and name."""
    records = [Record.from_line(path.stem, path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    return sorted(records, key=lambda record: (record.script, record.device, record.name))


def engine_table(records: list[Record]) -> str:
    """Throughput of requests together and one by one."""
    columns = ["Hardware", "Model", "Requests", "One by one, tokens/s", "Together, tokens/s", "Ratio"]
    return table(
        [*columns, "Slots wasted at the peak", "Measured"],
        (
            [
                record.device,
                f"{r['model']}, {r['dtype']}",
                f"{t['requests']} of {t['tokens_each']} tokens",
                f"{t['one_by_one_tokens_per_s']:,.1f}",
                f"{t['together_tokens_per_s']:,.1f}",
                f"{t['speedup']:.2f}",
                f"{t['peak_wasted_fraction']:.1%}",
                source(record),
            ]
            for record in records
            if record.script == "bench_engine" and "together" in record.results
            for r, t in [(record.results, record.results["together"])]
        ),
        num_text=3,
    )


def step_table(records: list[Record]) -> str:
    """Where the time of a step goes, run-ahead off."""
    phases = ("plan", "pack", "dispatch", "wait", "update")
    return table(
        ["Hardware", *(f"{phase}, ms" for phase in phases), "Outside XLA", "Step shapes", "To compile them, s"],
        (
            [
                record.device,
                *(f"{t['ms_per_step'][f'{phase}_s']:.3f}" for phase in phases),
                f"{t['outside_xla_fraction']:.1%}",
                f"{len(r['step_shapes'])}",
                f"{r['compile_s']:.1f}",
            ]
            for record in records
            if record.script == "bench_engine" and "together" in record.results
            for r, t in [(record.results, record.results["together"])]
        ),
    )


def memory_table(records: list[Record]) -> str:
    """What the demo's requests held in pages, and what one reservation for each of them would have held."""
    columns = ["Hardware", "Requests at the peak", "Tokens they held", "In pages", "Wasted"]
    return table(
        [*columns, "One reservation each", "Wasted", "Output tokens/s", "Measured"],
        (
            [
                record.device,
                f"{r['running_at_peak']}",
                f"{r['tokens_at_peak']:,}",
                f"{r['paged_bytes'] / _MIB:,.1f} MiB",
                f"{r['paged_wasted_fraction']:.1%}",
                f"{r['contiguous_bytes'] / _MIB:,.1f} MiB",
                f"{r['contiguous_wasted_fraction']:.1%}",
                f"{r['tokens_per_second']:,.0f}",
                source(record),
            ]
            for record in records
            if record.script == "demo"
            for r in [record.results]
        ),
    )


def source_table(records: list[Record]) -> str:
    """Which file holds what, and where it was made."""
    columns = ["File", "Script", "Date", "Commit", "Hardware", "Python", "jax", "jaxlib", "flax"]
    return table(
        columns,
        (
            [
                f"[{record.name}.json]({record.name}.json)",
                f"`scripts/{record.script}.py`",
                record.date,
                f"`{record.commit}`",
                record.device,
                record.python,
                *(record.versions.get(name, "–") for name in ("jax", "jaxlib", "flax")),
            ]
            for record in records
        ),
        num_text=len(columns),
    )


def colab_badge(records: list[Record]) -> str:
    """The link that opens the first notebook on Colab."""
    page = REPOSITORY.replace("https://github.com", "https://colab.research.google.com/github")
    badge = "https://colab.research.google.com/assets/colab-badge.svg"
    return f"[![Open in Colab]({badge})]({page}/blob/main/notebooks/quickstart.ipynb)\n"


PARTS: Mapping[str, Callable[[list[Record]], str]] = {
    "engine": engine_table,
    "step": step_table,
    "memory": memory_table,
    "sources": source_table,
    "colab": colab_badge,
    **tables.PARTS,
    **render_memory.PARTS,
    **render_tpu.PARTS,
    **speculation_tables.PARTS,
    **cuda_tables.PARTS,
    **serving_tables.PARTS,
}


def rendered(text: str, records: list[Record]) -> str:
    """The text with its rendered parts, and its line `REPOSITORY = ...` if it has one, as they should be.

    Raises:
      ValueError: a part has an unknown name, or no end, or a record lacks a figure.
    """
    if len(_MARK.findall(text)) != 2 * len(_PART.findall(text)):
        raise ValueError("a rendered part has no beginning or no end")

    def write(match: re.Match[str]) -> str:
        name = match[1]
        if name not in PARTS:
            raise ValueError(f"no rendered part is called {name!r}, expected one of {', '.join(sorted(PARTS))}")
        try:
            return f"<!-- rendered: {name} -->\n{PARTS[name](records)}<!-- end of rendered -->"
        except KeyError as error:
            raise ValueError(f"the part {name!r} needs the figure {error}, which a record lacks") from error

    return _ADDRESS.sub(f'REPOSITORY = "{REPOSITORY}"', _PART.sub(write, text))


def documents(root: Path) -> list[Path]:
    """The files that have rendered parts."""
    pages = [page for part in ("benchmarks", "architecture") for page in sorted((root / "docs" / part).glob("*.md"))]
    return [root / "README.md", *pages, root / "notebooks" / "quickstart.md"]


def stale_documents(root: Path, *, write: bool) -> list[Path]:
    """Files whose rendered parts are not what they should be; `write` makes them so."""
    records = load_records(root / "docs" / "benchmarks")
    stale = []
    for path in documents(root):
        text = path.read_text(encoding="utf-8")
        try:
            wanted = rendered(text, records)
        except ValueError as error:
            raise ValueError(f"{path.relative_to(root)}: {error}") from None
        if wanted != text:
            stale.append(path)
            if write:
                path.write_text(wanted, encoding="utf-8")
    return stale


def add_record(root: Path, name: str, output: str) -> None:
    """Keeps the last line of a script's output as docs/benchmarks/NAME.json.

    Raises:
      ValueError: the name or the line is not what it should be.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        raise ValueError(f"the name is {name!r}, expected small letters, digits, dots and hyphens, such as engine-h200")
    lines = output.strip().splitlines()
    line = lines[-1] if lines else ""
    Record.from_line(name, line)
    path = root / "docs" / "benchmarks" / f"{name}.json"
    path.write_text(json.dumps(json.loads(line), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is stale")
    parser.add_argument("--add", metavar="NAME", help="keep the last line of standard input as NAME.json")
    args = parser.parse_args()
    if args.check and args.add:
        parser.error("--check writes nothing, --add does")
    try:
        if args.add:
            add_record(ROOT, args.add, sys.stdin.read())
        stale = stale_documents(ROOT, write=not args.check)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in stale:
        print(f"{'stale' if args.check else 'rewritten'}: {path.relative_to(ROOT)}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
