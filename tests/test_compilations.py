"""Programs that are compiled side by side: all of them, in the caller's contexts, and errors as they were raised."""

import gc
import threading

import jax
import jax.numpy as jnp
import pytest

from jpaged.compilations import compile_side_by_side, num_compile_threads


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
