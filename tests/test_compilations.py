"""Programs that are compiled side by side: all of them, in the caller's contexts, and errors as they were raised."""

import gc
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jpaged.compilations import compile_side_by_side, num_compile_threads
from jpaged.program_store import ProgramStore


class Lowered:
    """A program that compiles once its turn has come."""

    def __init__(self, name: str, gate: threading.Event, begun: list[str], error: Exception | None = None) -> None:
        self.name, self.gate, self.begun, self.error = name, gate, begun, error

    def compile(self):
        self.begun.append(self.name)
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return lambda: self.name


def test_they_are_compiled_at_the_same_time_and_given_as_they_end():
    gates, begun = {name: threading.Event() for name in "abc"}, []
    done = compile_side_by_side("abc", lambda name: Lowered(name, gates[name], begun), num_threads=3)
    gates["b"].set()
    first = next(done)
    assert (first.key, first.executable()) == ("b", "b")
    assert first.seconds > 0
    gates["a"].set()
    assert next(done).key == "a"  # b did not wait for a, nor a for c
    gates["c"].set()
    assert [one.key for one in done] == ["c"]
    assert sorted(begun) == ["a", "b", "c"]


def test_garbage_is_not_collected_while_a_program_is_traced():
    open_gate, collecting = threading.Event(), []
    open_gate.set()

    def lower(name: str) -> Lowered:
        collecting.append(gc.isenabled())
        if name == "b":
            raise ValueError(name)
        return Lowered(name, open_gate, [])

    with pytest.raises(ValueError, match="b"):
        list(compile_side_by_side("ab", lower, num_threads=1))
    assert collecting == [False, False]
    assert gc.isenabled()


def test_an_error_comes_out_whole_and_the_rest_is_dropped():
    gate, begun, error = threading.Event(), [], ValueError("no such layout")
    gate.set()
    errors = {"b": error}
    done = compile_side_by_side("abcd", lambda name: Lowered(name, gate, begun, errors.get(name)), num_threads=1)
    with pytest.raises(ValueError, match="no such layout") as caught:
        list(done)
    assert caught.value is error
    assert any(entry.name == "compile" for entry in caught.traceback)


def test_an_error_while_lowering_comes_out_too():
    def lower(name):
        raise KeyError(name)

    with pytest.raises(KeyError, match="a"):
        list(compile_side_by_side("abc", lower))


def test_an_interrupt_leaves_at_once():
    gate, begun = threading.Event(), []

    def lower(name):
        if name == "c":
            raise KeyboardInterrupt  # as from the keyboard, while the first is compiled
        return Lowered(name, gate, begun)

    with pytest.raises(KeyboardInterrupt):
        list(compile_side_by_side("abc", lower, num_threads=1))
    assert "b" not in begun
    gate.set()


def test_programs_of_jax_see_the_contexts_of_the_caller():
    with jax.numpy_dtype_promotion("standard"):
        program = jax.jit(lambda x: x + jnp.ones(3, jnp.int32))
        (done,) = compile_side_by_side([3], lambda n: program.lower(jnp.zeros(n)))
    assert done.executable(jnp.zeros(3)).tolist() == [1.0, 1.0, 1.0]
    assert num_compile_threads() >= 1


class Kept(dict):
    """A store in memory."""

    def load(self, name):
        return self.get(name)

    def save(self, name, executable):
        self[name] = executable


def test_what_was_kept_is_not_lowered_and_what_was_compiled_is_kept():
    store, lowered = Kept(b=lambda: "kept"), []
    programs = {name: jax.jit(lambda x, n=n: x + n) for n, name in enumerate("abc")}

    def lower(name):
        lowered.append(name)
        return programs[name].lower(1.0)

    done = {one.key: one for one in compile_side_by_side("abc", lower, store=store)}
    assert lowered == ["a", "c"]
    assert {key: one.kept for key, one in done.items()} == {"a": False, "b": True, "c": False}
    assert done["b"].executable() == "kept"
    assert done["b"].seconds > 0
    assert {key: store[key] is done[key].executable for key in "ac"} == {"a": True, "c": True}
    assert all(one.kept for one in compile_side_by_side("abc", lower, store=store))
    assert lowered == ["a", "c"]


def test_an_error_while_reading_comes_out_and_the_rest_is_dropped():
    class Broken(Kept):
        def load(self, name):
            raise OSError(name)

    with pytest.raises(OSError, match="a"):
        list(compile_side_by_side("abc", lambda name: pytest.fail("is lowered"), store=Broken()))


@pytest.fixture
def jax_cache(tmp_path):
    """jax's own cache in a folder of the test, however little time a program took."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache"
    before = [getattr(jax.config, name) for name in names]
    try:
        for name, value in zip(names, (str(tmp_path / "jax"), 0.0, True), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.name.endswith("-atime"))  # jax's marks of reading


def test_what_jax_has_in_its_cache_is_kept_whole(jax_cache, tmp_path):
    """Of a program that jax read from its cache, XLA for CPUs writes a file that runs nowhere."""
    hits: list[str] = []
    square = np.ones((4, 4), np.float32)

    def listen(event: str, **_) -> None:
        hits.extend([event] if event.endswith("/cache_hits") else [])

    def lower(name):  # another function each time, which jax has nowhere but on disk
        return jax.jit(lambda x: jnp.sort(jnp.tanh(x @ x))).lower(square)

    lower("").compile()  # jax keeps it
    jax.monitoring.register_event_listener(listen)
    try:
        lower("").compile()
        assert len(hits) == 1
        store, kept_by_jax = ProgramStore(tmp_path / "programs", "key", jax.devices()[0]), files(tmp_path / "jax")
        (made,) = compile_side_by_side(["program"], lower, store=store)
        assert len(hits) == 1
        assert files(tmp_path / "jax") == kept_by_jax != []  # nobody would read it there
    finally:
        jax.monitoring.unregister_event_listener(listen)
    kept = store.load("program")
    assert kept is not None
    assert kept(square).tolist() == made.executable(square).tolist()
