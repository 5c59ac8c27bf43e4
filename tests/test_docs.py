"""The documents: tables are fresh, links and names lead somewhere, commands exist, examples run."""

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts import check_wheel, render_benchmarks
from tests.examples import FENCE, README, ROOT, example, fences, run

NOTEBOOK = ROOT / "notebooks" / "quickstart.md"
LAYOUT = ROOT / "docs" / "layout.md"
DOCUMENTS = [
    README,
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.md")),
]
TOP = sorted(path.name for path in ROOT.iterdir() if path.name in ("jpaged", "models", "pallas_kernels", "tests"))
TOP += ["scripts", "docs", "notebooks", "deploy", ".ci", ".github"]

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(rf"(?:{'|'.join(map(re.escape, TOP))})/[\w./-]*(?:::\w+)?")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


def prose(document: Path) -> str:
    """The text without its fenced blocks."""
    return FENCE.sub("", document.read_text(encoding="utf-8"))


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives to the headings."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# --- links, paths, tests ----------------------------------------------------------------------------------------------
@each_document
def test_links_lead_somewhere(document: Path) -> None:
    for target in LINK.findall(prose(document)):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.is_relative_to(ROOT), f"{target} leaves the repository"
        assert found.exists(), f"{target} leads nowhere"
        assert not anchor or anchor in anchors(found), f"{target}: no such heading"


def defined_names(path: Path) -> set[str]:
    """Functions, classes and variables at the top of a module."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@each_document
def test_paths_and_tests_that_are_named_exist(document: Path) -> None:
    for quoted in re.findall(r"`([^`\n]+)`", prose(document)):
        if not PATH.fullmatch(quoted):
            continue
        path, _, test = quoted.partition("::")
        found = ROOT / path
        assert found.exists(), f"`{path}` does not exist"
        assert not test or test in defined_names(found), f"`{quoted}`: no such test"


FOREIGN = {"output_to_operand_aliasing", "TF_CPP_VMODULE", "hlo_pass_pipeline", "nvptx_compiler"}  # of jax and XLA


@pytest.fixture(scope="module")
def names_in_the_code() -> set[str]:
    """All words of sources and tests, and what their files are called."""
    folders = ("jpaged", "models", "pallas_kernels", "scripts", "tests")
    sources = [path for name in folders for path in (ROOT / name).rglob("*.py") if path != Path(__file__)]
    return set(re.findall(r"[A-Za-z_]\w*", "\n".join(f"{path.stem} {path.read_text('utf-8')}" for path in sources)))


@pytest.mark.parametrize("document", [README, *sorted((ROOT / "docs" / "architecture").glob("*.md"))], ids=name_of)
def test_names_that_are_quoted_are_in_the_code(document: Path, names_in_the_code: set[str]) -> None:
    for quoted in re.findall(r"`([^`\n]+)`", prose(document)):
        for name in re.findall(r"\b[A-Za-z_]\w*(?:_|(?<=[a-z])[A-Z])\w*", quoted):  # with a _ or a hump in it
            assert name in names_in_the_code | FOREIGN, f"`{quoted}`: nothing is called {name}"


def test_every_architecture_page_names_tests_and_files_and_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = sorted((ROOT / "docs" / "architecture").glob("*.md"))
    assert [int(page.name[:2]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert f"(architecture/{page.name})" in index
        assert "::test_" in text, f"{page.name} names no test"
        if not page.name.startswith("01"):
            before = text.split("\nFiles: ")[0]
            assert before.count("\n\n") == 2, f"{page.name}: a title, a review, what it is about; then its files"


def test_the_tree_on_the_layout_page_is_the_tree() -> None:
    (block,) = [match["body"] for match in fences(LAYOUT) if match["body"].startswith("jpaged/ ")]
    listed: dict[str, str] = {}
    folder = ""
    for line in block.splitlines():
        name, _, comment = line.strip().partition("  ")
        inside = line.startswith("  ")
        folder = folder if inside else name
        if "->" not in name:
            listed[f"{folder}{name}" if inside else name] = comment.strip()
    assert [name for name in listed if not (ROOT / name).exists()] == []
    assert [name for name, comment in listed.items() if not comment] == []

    (folders,) = [match["body"] for match in fences(README) if match["body"].startswith("jpaged/ ")]
    assert [name for name in (line.split()[0] for line in folders.splitlines()) if not (ROOT / name).is_dir()] == []

    as_one = [ROOT / "jpaged" / name for name in ("cli", "server")]  # folders that have a line for all their files
    sources = {
        path
        for path in check_wheel.package_files(ROOT).values()
        if not any(path.is_relative_to(folder) for folder in as_one)
    }
    sources |= {path for path in (ROOT / "scripts").iterdir() if path.is_file() and path.suffix != ".pyc"}
    assert sorted({name_of(path) for path in sources} - set(listed)) == [], "give them a line in docs/layout.md"


# --- commands ---------------------------------------------------------------------------------------------------------
def commands(document: Path) -> list[list[str]]:
    """Shell commands in fenced blocks without a language, and in quotes in the text."""
    lines = [line for match in fences(document) if match["kind"] == "" for line in match["body"].splitlines()]
    lines += re.findall(r"`([^`\n]+)`", prose(document))
    found = []
    for line in lines:
        if re.match(
            r"\s*(jpaged|make|bash|pip|python|\.venv/bin/python|jupytext|CI_ONLY=\S+|JAX_PLATFORMS=\S+) ", line
        ):
            for command in re.split(r"\s[|<>]\s", line.strip()):
                found.append(shlex.split(command, comments=True))
    return found


def options_of(name: str) -> set[str]:
    import typer

    from jpaged.cli import app

    command = typer.main.get_command(app)
    command = command.commands[name] if name else command  # type: ignore[attr-defined]
    names = [name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)]
    return {name for name in names if name.startswith("-")}


def cli_commands() -> set[str]:
    from jpaged.cli import app

    return {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]


@each_document
def test_commands_that_are_shown_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command in commands(document):
        shown = shlex.join(command)
        words = [word for word in command if "=" not in word]
        flags = {word.partition("=")[0] for word in command if word.startswith("-") and word != "-"}
        if command[0] == "make":
            assert set(words[1:]) <= targets, f"`{shown}`: the Makefile has {sorted(targets)}"
        elif command[0] == "jpaged":
            name = next((word for word in words[1:] if not word.startswith("-")), "")
            if name.isupper():  # a placeholder
                name = ""
            assert not name or name in cli_commands(), f"`{shown}`: the commands are {sorted(cli_commands())}"
            known = options_of(name) | options_of("") | {"--help", "-h"}
            assert flags <= known, f"`{shown}`: no such option"
        elif script := next((word for word in words if word.startswith("scripts/")), None):
            assert (ROOT / script).exists(), f"`{shown}`: no such script"
            source = (ROOT / script).read_text(encoding="utf-8")
            assert all(f'"{flag}"' in source for flag in flags), f"`{shown}`: no such option"
        for named in re.findall(r"(?:\.|jpaged)\[([\w,-]+)\]", shown) if "install" in command else ():  # not of others
            assert set(named.split(",")) <= set(extras), f"`{shown}`: no such extra"


def test_the_command_line_page_has_every_command_and_every_option() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^## jpaged (\w+)$", text, re.MULTILINE)) == cli_commands()
    shared = text.split("## Options that several commands share")[1].split("\n## ")[0]
    for name in cli_commands():
        own = text.split(f"## jpaged {name}\n")[1].split("\n## ")[0]
        rows = re.findall(r"^\| (`-.*?) \|", own, re.MULTILINE)
        rows += [row for row, users in re.findall(r"^\| (`-.*?) \| (.*?) \|", shared, re.MULTILINE) if name in users]
        named = {word for row in rows for word in re.findall(r"`(--?[\w-]+)", row)}
        named |= set(re.findall(r"`(--json)` prints", own))
        assert named == options_of(name) - {"--help", "-h"}, f"jpaged {name}"


# --- examples ---------------------------------------------------------------------------------------------------------
PYTHON = [
    pytest.param(match["body"], match["mark"], id=f"{name_of(document)}:{index}")
    for document in DOCUMENTS
    for index, match in enumerate(fences(document))
    if match["kind"] == "python"
]


@pytest.mark.parametrize(("source", "mark"), PYTHON)
def test_python_examples_compile(source: str, mark: str | None) -> None:
    compile(source, "an example", "exec")
    assert mark in (None, "run", "run with the default model")


def test_the_reinforcement_learning_example_learns() -> None:
    names, _ = run(example(ROOT / "docs" / "models.md", "run", "improve"), "docs/models.md")
    rewards = names["mean_rewards"]
    assert rewards[0] < 0.2  # a fresh policy says each of 32 tokens alike
    assert rewards[-1] > 0.5


def test_the_example_of_a_model_of_ones_own_serves() -> None:
    _, printed = run(example(ROOT / "docs" / "models.md", "run", "class Tiny"), "docs/models.md")
    assert [len(tokens) for tokens in ast.literal_eval(printed)] == [5, 5]


# --- rendered parts ---------------------------------------------------------------------------------------------------
ENGINE_RESULTS = {
    "model": "m",
    "dtype": "float32",
    "step_shapes": ["T1 S1 P8", "T32 S32 P8"],
    "compile_s": 9.5,
    "together": {
        "requests": 32,
        "tokens_each": 128,
        "together_tokens_per_s": 1234.5,
        "one_by_one_tokens_per_s": 300.0,
        "speedup": 4.123,
        "outside_xla_fraction": 0.05,
        "ms_per_step": {"plan_s": 0.1, "pack_s": 0.2, "dispatch_s": 1.0, "wait_s": 20.0, "update_s": 0.3},
        "peak_wasted_fraction": 0.0312,
    },
}
ENVELOPE = {
    "script": "bench_engine",
    "commit": "abc123",
    "date": "2026-01-02",
    "device": "a|b, 2 cores",
    "platform": "cpu",
    "python": "3.11.9",
    "versions": {"jax": "0.10.2"},
}


def test_rendered_parts_are_fresh() -> None:
    stale = [name_of(path) for path in render_benchmarks.stale_documents(ROOT, write=False)]
    assert stale == [], "run `python scripts/render_benchmarks.py`"


def test_records_are_what_the_scripts_print() -> None:
    for record in render_benchmarks.load_records(ROOT / "docs" / "benchmarks"):
        assert (ROOT / "scripts" / f"{record.script}.py").exists(), record.name


def small_tree(root: Path) -> Path:
    (root / "docs" / "benchmarks").mkdir(parents=True)
    (root / "notebooks").mkdir()
    (root / "README.md").write_text("Before\n\n<!-- rendered: engine -->\n<!-- end of rendered -->\nAfter\n")
    (root / "notebooks" / "quickstart.md").write_text('```python\nREPOSITORY = "https://elsewhere"\n```\n')
    return root


def test_a_table_without_figures_says_so_and_gets_them(tmp_path: Path) -> None:
    root = small_tree(tmp_path)
    readme, notebook = root / "README.md", root / "notebooks" / "quickstart.md"
    assert render_benchmarks.stale_documents(root, write=True) == [readme, notebook]
    assert "| not measured yet | – |" in readme.read_text()
    assert f'REPOSITORY = "{render_benchmarks.REPOSITORY}"' in notebook.read_text()
    assert render_benchmarks.stale_documents(root, write=False) == []

    line = json.dumps({**ENVELOPE, "results": ENGINE_RESULTS})
    render_benchmarks.add_record(root, "engine-cpu", f"a table\n{line}\n")
    before = readme.read_text()
    assert render_benchmarks.stale_documents(root, write=False) == [readme]
    assert readme.read_text() == before, "a check writes nothing"
    render_benchmarks.stale_documents(root, write=True)
    row = "| a\\|b, 2 cores | m, float32 | 32 of 128 tokens | 300.0 | 1,234.5 | 4.12 | 3.1% | 2026-01-02, `abc123` |"
    assert row in readme.read_text()
    assert readme.read_text().startswith("Before\n\n<!-- rendered")
    assert readme.read_text().endswith("-->\nAfter\n")


@pytest.mark.parametrize("part", sorted(render_benchmarks.PARTS))
def test_every_part_renders_with_and_without_records(part: str) -> None:
    demo = {"running_at_peak": 8, "tokens_at_peak": 1000, "paged_bytes": 2**20, "paged_wasted_fraction": 0.1}
    demo |= {"contiguous_bytes": 2**25, "contiguous_wasted_fraction": 0.9, "tokens_per_second": 50.0}
    lines = [{**ENVELOPE, "results": ENGINE_RESULTS}, {**ENVELOPE, "script": "demo", "results": demo}]
    records = [render_benchmarks.Record.from_line(f"r{i}", json.dumps(line)) for i, line in enumerate(lines)]
    for given in ([], records):
        text = render_benchmarks.PARTS[part](given)
        assert text.endswith("\n")
        assert len({line.count(" | ") for line in text.splitlines()}) == 1, "rows of different lengths"
        assert "\n\n" not in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- rendered: engine -->\n", "no beginning or no end"),
        ("<!-- end of rendered -->\n", "no beginning or no end"),
        ("<!-- rendered: engines -->\n<!-- end of rendered -->\n", "'engines'.*engine"),
    ],
)
def test_wrong_marks_are_named(text: str, words: str, tmp_path: Path) -> None:
    root = small_tree(tmp_path)
    (root / "README.md").write_text(text)
    with pytest.raises(ValueError, match=f"README.md: .*{words}"):
        render_benchmarks.stale_documents(root, write=True)
    assert (root / "README.md").read_text() == text


@pytest.mark.parametrize(
    ("name", "output", "words"),
    [
        ("Engine", "{}", "the name is 'Engine'"),
        ("engine", "", "expected the JSON line"),
        ("engine", "[1]", "expected an object"),
        ("engine", '{"script": "bench_engine"}', "commit, date, .* missing"),
    ],
)
def test_what_is_no_record_is_refused(name: str, output: str, words: str, tmp_path: Path) -> None:
    root = small_tree(tmp_path)
    with pytest.raises(ValueError, match=words):
        render_benchmarks.add_record(root, name, output)
    assert list((root / "docs" / "benchmarks").iterdir()) == []


def test_a_record_that_lacks_a_figure_is_named(tmp_path: Path) -> None:
    root = small_tree(tmp_path)
    render_benchmarks.add_record(root, "engine", json.dumps({**ENVELOPE, "results": {"model": "m", "together": {}}}))
    with pytest.raises(ValueError, match=r"README.md: .*'dtype'"):
        render_benchmarks.stale_documents(root, write=True)


def test_the_renderer_needs_the_standard_library_alone() -> None:
    command = [sys.executable, "-S", "scripts/render_benchmarks.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    assert done.stderr == ""


def test_the_table_of_quantised_weights_is_its_record() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    record = json.loads((ROOT / "docs" / "benchmarks" / "weights-cpu.json").read_text(encoding="utf-8"))
    results = dict(record["results"]["weights"])
    rows = [f"| {record['results']['dtype']} | {results.pop('none')['perplexity']:.3f} | – | – | – | – |"]
    for name, r in results.items():
        rise = f"{r['rise_percent']:.2f} ± {r['error_percent']:.2f}"
        shares = [f"{100 * r[key]:.1f}" for key in ("agreement", "lowest_agreement", "prefix")]
        rows.append(f"| {name} | {r['perplexity']:.3f} | {rise} | {' | '.join(shares)} |")
    assert "\n".join(rows) in text
    assert f"Measured {record['date']} on one {record['device']}, commit `{record['commit']}`" in text


# --- the notebook -----------------------------------------------------------------------------------------------------
def test_both_forms_of_the_notebook_are_one() -> None:
    jupytext = pytest.importorskip("jupytext")
    text = jupytext.read(NOTEBOOK)
    notebook = json.loads(NOTEBOOK.with_suffix(".ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert cells == [(cell.cell_type, cell.source) for cell in text.cells], (
        "run `jupytext --to ipynb --update notebooks/quickstart.md`"
    )
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


def test_the_repository_has_one_address() -> None:
    home = render_benchmarks.REPOSITORY.removeprefix("https://github.com/")
    for document in DOCUMENTS:
        for owner in re.findall(
            r"(?:github\.com|colab\.research\.google\.com/github)/([\w.-]+/[\w.-]+)", document.read_text()
        ):
            assert owner == home, f"{name_of(document)} names {owner}; see docs/README.md"
