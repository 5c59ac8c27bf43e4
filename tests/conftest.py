"""What holds for every test: the CPU unless GPU tests are asked for, strict dtype promotion, quick compiles, no
hypothesis deadlines.

jpaged itself may be imported only inside of tests and fixtures: the import hook that checks shapes is installed after
this file is read.
"""

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parent.parent
RUNS_LONG = pytest.StashKey[bool]()
COMPILED = pytest.StashKey["Compiled"]()

# Most tests compile programs that run for a moment, so XLA may spend little on them: no LLVM optimisation, and the
# older of its two code generators, which is itself the quicker one.
QUICK_COMPILE = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
# XLA reads XLA_FLAGS at each compile, not at the first alone. What was set once stays set.
READ_AGAIN = "--xla_flags_reset=true"

# Compiling makes the first example slow, so no example has a deadline. Nor is anything too slow on a busy machine.
LATE = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("dev", **LATE)
hypothesis.settings.register_profile("ci", **LATE, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


class Compiled:
    """A worker's folder of compiled programs, and the one that all workers take them from.

    jax writes its files in place, so workers that wrote to one folder could read half a file. What has been whole for a
    while gets its name in the others' folders by a link, which is there at once or not at all.

    Args:
      own: jax's folder.
      shared: of all workers.
    """

    SETTLED_S = 5.0  # a file is written in milliseconds, once it is there, unless the machine is very busy
    PAUSE_S = 1.0

    def __init__(self, own: Path, shared: Path) -> None:
        self._folders = own, shared
        for folder in self._folders:
            folder.mkdir(parents=True, exist_ok=True)
        self._due_s = 0.0

    def exchange(self) -> None:
        """Gives what is new, and takes what others have given, unless it did so a moment ago."""
        if time.time() < self._due_s:
            return
        self._due_s = time.time() + self.PAUSE_S
        own, shared = ({file.name for file in os.scandir(folder) if file.is_file()} for folder in self._folders)
        for names, source, target in ((own - shared, *self._folders), (shared - own, *reversed(self._folders))):
            for name in names:
                written = (source / name).stat()
                if written.st_size and time.time() - written.st_mtime > self.SETTLED_S:
                    with contextlib.suppress(FileExistsError):  # another worker was quicker
                        os.link(source / name, target / name)


def _wants_gpu(config: pytest.Config) -> bool:
    words = (config.getoption("markexpr") or "").replace("(", " ").replace(")", " ").split()
    return any(word == "gpu" and before != "not" for before, word in zip(["", *words], words, strict=False))


def _add_xla_flags(flags: str) -> None:
    theirs = os.environ.get("XLA_FLAGS", "")
    if flags not in theirs:
        os.environ["XLA_FLAGS"] = f"{flags} {theirs}".rstrip()  # the last one wins


def pytest_configure(config: pytest.Config) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if config.getoption("dist", "no") != "no" and not worker:
        return  # the workers of -n run the tests
    if not _wants_gpu(config):
        os.environ["JAX_PLATFORMS"] = "cpu"
        _add_xla_flags(READ_AGAIN)
    # Tests compile the same steps of the same models many times. Processes that tests start share the folder with
    # the one that starts them, and workers give each other what they have (`Compiled`).
    cache = ROOT / ".cache" / "jax"
    own = cache / (worker or "main")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        config.stash[COMPILED] = Compiled(own, cache / "all")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(own))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

    import jax

    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS"))
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    seconds = float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()  # nearly all that is made here lives on; looking through it takes more than a quarter of the time
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        if "smollm2_path" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.model)
    yield  # -m is applied
    # Files with tests that run long come first: they compile as users do, and none of `-n` workers ends alone with one.
    long = {item.path for item in items if any(map(item.get_closest_marker, ("model", "slow")))}
    for item in items:
        item.stash[RUNS_LONG] = item.path in long
    items.sort(key=lambda item: not item.stash[RUNS_LONG])


def pytest_collection_finish() -> None:
    gc.freeze()  # a million objects that live as long as the process: no collection need look at them again


@pytest.hookimpl(tryfirst=True)  # before the fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    if (compiled := item.config.stash.get(COMPILED, None)) is not None:
        compiled.exchange()
    if not item.stash[RUNS_LONG] and not _wants_gpu(item.config):
        _add_xla_flags(QUICK_COMPILE)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, from the user's cache, downloaded if it is not there."""
    from jpaged.fetch import fetch

    return fetch("smollm2-135m-instruct")
