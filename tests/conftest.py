"""What holds for every test: the CPU unless GPU tests are asked for, strict dtype promotion, no hypothesis deadlines.

jpaged itself may be imported only inside of tests and fixtures: the import hook that checks shapes is installed after
this file is read.
"""

import os
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parent.parent

# Compiling makes the first example slow, so no example has a deadline.
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def _wants_gpu(config: pytest.Config) -> bool:
    words = (config.getoption("markexpr") or "").replace("(", " ").replace(")", " ").split()
    return any(word == "gpu" and before != "not" for before, word in zip(["", *words], words, strict=False))


def pytest_configure(config: pytest.Config) -> None:
    if not _wants_gpu(config):
        os.environ["JAX_PLATFORMS"] = "cpu"
    # Tests compile the same steps of the same models many times; processes that tests start share the cache.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))

    import jax

    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS"))
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "smollm2_path" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.model)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, from the user's cache, downloaded if it is not there."""
    from jpaged.fetch import fetch

    return fetch("smollm2-135m-instruct")
