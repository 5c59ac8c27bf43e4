"""Builds the wheel and the sdist and checks that they hold the whole package and nothing else.

    python scripts/check_wheel.py [--no-isolation]

The wheel must have one top-level package, `jpaged`, whose files are those of `jpaged/`, `models/` and
`pallas_kernels/`; it must install without its dependencies into an empty environment and import there, from a folder
that holds a foreign `models` package. Needs the `build` package. `--no-isolation` builds with the setuptools of this
environment.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = {"jpaged": "jpaged", "models": "jpaged/models", "pallas_kernels": "jpaged/pallas_kernels"}  # tree -> wheel
NOT_SHIPPED = {"__pycache__"}


def package_files(root: Path) -> dict[str, Path]:
    """The wheel's path of each file that the tree has for it."""
    files = {}
    for folder, home in FOLDERS.items():
        for parent, names, leaves in os.walk(root / folder):  # does not follow the two links
            names[:] = [name for name in names if name not in NOT_SHIPPED]
            for leaf in leaves:
                path = Path(parent, leaf)
                if path.suffix != ".pyc":
                    files[f"{home}/{path.relative_to(root / folder).as_posix()}"] = path
    return files


def wheel_faults(wheel: Path, root: Path) -> list[str]:
    """What is wrong with the wheel's list of files, one sentence each."""
    names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]
    faults = [f"{name} is in the wheel {count} times" for name, count in Counter(names).items() if count > 1]
    top = {name.split("/")[0] for name in names}
    if len(top) != 2 or "jpaged" not in top or not any(name.endswith(".dist-info") for name in top):
        faults.append(f"the wheel's top level is {sorted(top)}, expected jpaged and its .dist-info alone")
    got = {name for name in names if ".dist-info/" not in name}
    expected = set(package_files(root))
    faults += [
        f"{name} is missing from the wheel (packages, package-data in pyproject.toml)" for name in expected - got
    ]
    faults += [f"{name} is in the wheel and not in the tree" for name in got - expected if name.startswith("jpaged/")]
    return sorted(faults)


def sdist_faults(sdist: Path, root: Path) -> list[str]:
    """What the sdist lacks or holds twice."""
    with tarfile.open(sdist) as archive:
        names = Counter(name.partition("/")[2] for name in archive.getnames())
    expected = {path.relative_to(root).as_posix() for path in package_files(root).values()} | {"LICENSE", "README.md"}
    faults = [f"{name} is in the sdist {names[name]} times, expected once" for name in expected if names[name] != 1]
    links = [name for name in names if name.startswith(("jpaged/models/", "jpaged/pallas_kernels/"))]
    return sorted(faults + [f"{name} is in the sdist a second time, through a link" for name in links])


def copy_tree(target: Path) -> Path:
    """What a build reads, in a folder of its own, so that it leaves nothing in the checkout."""
    target.mkdir()
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, target / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    return target


def build(source: Path, out: Path, *options: str) -> Path:
    """Builds sdist and wheel of `source` into `out` and returns the wheel. The wheel is made from the sdist.

    Raises:
      RuntimeError: the build failed; the message is its output.
    """
    command = [sys.executable, "-m", "build", "--outdir", str(out), *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    (wheel,) = out.glob("*.whl")
    return wheel


def install_and_import(wheel: Path, folder: Path) -> str:
    """Installs the wheel alone into a new environment and imports it beside a foreign `models`; returns its version."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    foreign = folder / "work" / "models"
    foreign.mkdir(parents=True)
    (foreign / "__init__.py").write_text("mine = True\n")
    code = (
        "import models, jpaged, jpaged.config, jpaged.models.config as config; assert models.mine;"
        "assert 'site-packages' in jpaged.__file__ and 'site-packages' in config.__file__; print(jpaged.__version__)"
    )
    done = subprocess.run([python, "-c", code], cwd=foreign.parent, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-isolation", action="store_true", help="build with this environment's setuptools")
    options = ["--no-isolation"] if parser.parse_args().no_isolation else []
    with tempfile.TemporaryDirectory() as scratch:
        source = copy_tree(Path(scratch, "source"))
        wheel = build(source, Path(scratch, "dist"), *options)
        (sdist,) = wheel.parent.glob("*.tar.gz")
        faults = wheel_faults(wheel, ROOT) + sdist_faults(sdist, ROOT)
        print(f"{wheel.name}:")
        print("".join(f"  {name}\n" for name in sorted(zipfile.ZipFile(wheel).namelist())), end="")
        if faults:
            print(*faults, sep="\n", file=sys.stderr)
            return 1
        print(f"installs and imports alone: jpaged {install_and_import(wheel, Path(scratch))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
