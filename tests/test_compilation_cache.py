"""Where compiled steps are kept, and when jpaged keeps its hands off."""

from pathlib import Path

import jax
import pytest

from jpaged.compilation_cache import enable_compilation_cache
from jpaged.config import CacheConfig, EngineConfig

DIR, ENABLED = "jax_compilation_cache_dir", "jax_enable_compilation_cache"
SECONDS = "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """Sets jax's options for one test and gives a function that reads the folder. `JPAGED_CACHE` is in `tmp_path`."""
    before = {name: getattr(jax.config, name) for name in (DIR, ENABLED, SECONDS)}
    monkeypatch.setenv("JPAGED_CACHE", str(tmp_path / "jpaged"))

    def set_to(folder: Path | None, enabled: bool = True):
        jax.config.update(DIR, None if folder is None else str(folder))
        jax.config.update(ENABLED, enabled)
        return lambda: getattr(jax.config, DIR)

    yield set_to
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_folder_lies_in_the_cache_of_jpaged(settings, tmp_path):
    folder = settings(None)
    assert enable_compilation_cache() == tmp_path / "jpaged" / "jax"
    assert folder() == str(tmp_path / "jpaged" / "jax")
    assert enable_compilation_cache() == tmp_path / "jpaged" / "jax"


def test_a_folder_that_the_program_set_stays(settings, tmp_path):
    folder = settings(tmp_path / "mine")
    assert enable_compilation_cache() == tmp_path / "mine"
    assert folder() == str(tmp_path / "mine")


@pytest.mark.parametrize("mine", [False, True])
def test_a_cache_that_was_turned_off_stays_off(settings, tmp_path, mine):
    folder = settings(tmp_path / "mine" if mine else None, enabled=False)
    before = folder()
    assert enable_compilation_cache() is None
    assert folder() == before
    assert not getattr(jax.config, ENABLED)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_engine_asks_for_it_as_it_was_told(settings, wanted, tmp_path):
    from jpaged.engine import Engine
    from tests.fakes import tiny_llama

    folder = settings(None)
    config = EngineConfig(cache=CacheConfig(page_size=8, num_pages=5), compilation_cache=wanted)
    Engine(tiny_llama(num_hidden_layers=1), config)
    assert folder() == (str(tmp_path / "jpaged" / "jax") if wanted else None)


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.0), (2.5, 2.5)])
@pytest.mark.parametrize("mine", [False, True])
def test_quick_programs_are_kept_too_unless_the_program_said_otherwise(settings, tmp_path, before, after, mine):
    jax.config.update(SECONDS, before)
    settings(tmp_path / "mine" if mine else None)
    enable_compilation_cache()
    assert getattr(jax.config, SECONDS) == (before if mine else after)


def test_a_cache_folder_that_cannot_be_made_is_told(settings, tmp_path, caplog):
    folder = settings(None)
    (tmp_path / "jpaged").write_text("a file where the folder should be")
    assert enable_compilation_cache() is None
    assert folder() is None
    assert "compiled steps are not kept" in caplog.text
