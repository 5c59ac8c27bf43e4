"""The package as a whole: its links, its lazy names, what works without jax, and what the wheel holds."""

import ast
import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts import check_wheel

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = sorted(check_wheel.package_files(ROOT).items())

# What each module says when it is imported afresh, as the first of jpaged. One process for all: most of the time goes
# into libraries that they share.
WITHOUT_JAX = """
import importlib, json, sys, traceback
for name in ("jax", "jaxlib", "flax", "optax", "orbax"):
    sys.modules[name] = None
said = {}
for name in sys.argv[1:]:
    for ours in [ours for ours in sys.modules if ours.partition(".")[0] == "jpaged"]:
        del sys.modules[ours]
    try:
        importlib.import_module(name)
        said[name] = ""
    except Exception:
        said[name] = traceback.format_exc()
print(json.dumps(said))
"""


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", ["models", "pallas_kernels"])
def test_link_is_relative_and_leads_to_the_folder_beside_the_package(name):
    link = ROOT / "jpaged" / name
    assert link.is_symlink(), f"{link} is not a link: git checked it out as text, or a tool followed it"
    assert os.readlink(link) == f"../{name}"
    assert (link / "__init__.py").samefile(ROOT / name / "__init__.py")


def test_version_is_that_of_pyproject():
    import jpaged

    assert jpaged.__version__ == PYPROJECT["project"]["version"]


def test_all_is_sorted_and_every_name_resolves():
    import jpaged

    names = jpaged.__all__
    # Constants, then classes, then the rest: the order that ruff keeps.
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(jpaged, name) is not None
    assert set(names) <= set(dir(jpaged))


def test_type_checkers_see_the_names_that_are_exported():
    import jpaged

    tree = ast.parse((ROOT / "jpaged" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {
        alias.asname or alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(imported) == set(jpaged.__all__) - {"__version__"}
    for name, module in imported.items():
        assert module is not None
        if module == "jpaged":
            assert getattr(jpaged, name) is importlib.import_module(f"jpaged.{name}")
        else:
            assert getattr(jpaged, name) is getattr(importlib.import_module(module), name)


def test_names_keep_their_meaning_after_their_modules_were_imported():
    done = run_python(
        "import sys, jpaged.request, jpaged.fetch, jpaged;"
        "from jpaged import SamplingParams, errors;"
        "from jpaged.fetch import fetch;"
        "assert errors is sys.modules['jpaged.errors'] and callable(fetch);"
        "assert SamplingParams is jpaged.request.SamplingParams"
    )
    assert done.returncode == 0, done.stderr


def test_unknown_name_is_an_attribute_error_that_lists_the_names():
    import jpaged

    with pytest.raises(AttributeError, match=r"no attribute 'Lmm'.*LLM"):
        jpaged.Lmm  # noqa: B018


NEED_NO_JAX = (
    "jpaged",
    "jpaged.errors",
    "jpaged.config",
    "jpaged.request",
    "jpaged.page_allocator",
    "jpaged.step_plan",
    "jpaged.scheduler",
    "jpaged.models.config",
    "jpaged.tokenizer",
    "jpaged.fetch",
    "jpaged.wheel_models",
    "jpaged.gguf_file",
    "jpaged.stats",
    "jpaged.intake",
    "jpaged.output_builder",
    "jpaged.cli",
)


@pytest.fixture(scope="module")
def said_without_jax() -> dict[str, str]:
    done = run_python(WITHOUT_JAX, *NEED_NO_JAX, "jpaged.step")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NEED_NO_JAX)
def test_imports_without_jax(said_without_jax, name):
    assert said_without_jax[name] == "", f"{name} needs jax"


def test_the_block_on_jax_blocks(said_without_jax):
    assert "import of jax halted" in said_without_jax["jpaged.step"]


def test_pyproject_names_every_package_of_the_tree():
    packages = {str(Path(name).parent).replace("/", ".") for name, path in SOURCES if path.name == "__init__.py"}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == packages


def test_nobody_imports_models_or_pallas_kernels_as_top_level_modules():
    for folder in ("jpaged", "models", "pallas_kernels", "tests", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [node.module or ""]
                else:
                    continue
                for name in names:
                    assert name.split(".")[0] not in ("models", "pallas_kernels"), f"{path}: import jpaged.{name}"


@pytest.mark.parametrize("name", [name for name, path in SOURCES if path.suffix == ".py"])
def test_source_file_is_short_enough(name):
    limit = 500 if name.startswith("jpaged/pallas_kernels/") else 400
    lines = (ROOT / name).read_text(encoding="utf-8").count("\n")
    assert lines <= limit, f"{name} has {lines} lines, expected at most {limit}: split it"


def test_wheel_holds_the_package_and_nothing_else(tmp_path):
    pytest.importorskip("build")
    pytest.importorskip("setuptools", minversion="77")
    source = check_wheel.copy_tree(tmp_path / "source")
    wheel = check_wheel.build(source, tmp_path / "dist", "--no-isolation")
    (sdist,) = wheel.parent.glob("*.tar.gz")
    assert check_wheel.wheel_faults(wheel, ROOT) == []
    assert check_wheel.sdist_faults(sdist, ROOT) == []

    (source / "jpaged" / "forgotten.json").write_text("{}")
    (source / "models" / "new.py").write_text("")
    assert check_wheel.wheel_faults(wheel, source) == [
        "jpaged/forgotten.json is missing from the wheel (packages, package-data in pyproject.toml)",
        "jpaged/models/new.py is missing from the wheel (packages, package-data in pyproject.toml)",
    ]
