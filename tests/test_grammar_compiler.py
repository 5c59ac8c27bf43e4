"""Threads that compile grammars: order, results kept, errors, and who gives up."""

import threading
import time

import pytest

from jpaged import grammar_compiler
from jpaged.errors import RequestError
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.grammar_compiler import Compilation, GrammarCompiler
from jpaged.structured import FORM_FAILED, TOO_MANY_WAIT, StructuredOutput
from jpaged.tokenizer import Tokenizer
from tests.tiny_vocabs import byte_level_metadata


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(gguf_vocabulary(byte_level_metadata(), "tiny"), "tiny")


class Waiting:
    """A compiler whose results can be waited for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.done = threading.Semaphore(0)
        self.compiler = GrammarCompiler(tokenizer, 300, [2], self.done.release)

    def submit(self, wanted=lambda: True, **form) -> Compilation:
        return self.compiler.submit(StructuredOutput(**form), wanted)

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.done.acquire(timeout=60)


def test_compiles_once_what_is_asked_for_twice(tokenizer):
    it = Waiting(tokenizer)
    made = it.submit(regex="a+")
    assert it.submit(regex="a+") is made
    it.wait(1)
    assert it.submit(regex="a+") is made
    assert made.done
    assert made.grammar is not None
    assert made.error is None


def test_an_error_is_a_result_too(tokenizer, monkeypatch):
    it = Waiting(tokenizer)
    refused = it.submit(regex="(a")
    it.wait(1)
    assert refused.done
    assert "unclosed group" in refused.error

    def breaks(structured, vocabulary):
        raise MemoryError("no room")

    monkeypatch.setattr(grammar_compiler, "compile_grammar", breaks)
    broken = it.submit(regex="b")
    it.wait(1)
    assert broken.error == f"{FORM_FAILED} (regex): MemoryError('no room')"


class Slow:
    """In the place of `compile_grammar`: waits for `go`."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), []
        self._begun = threading.Semaphore(0)

    def __call__(self, structured, vocabulary):
        self.begun.append(structured.regex)
        self._begun.release()
        assert self.go.wait(60)
        raise RequestError(structured.regex)

    def wait_for_both(self) -> None:
        """Until both threads are busy."""
        for _ in range(2):
            assert self._begun.acquire(timeout=60)


@pytest.fixture
def slow(monkeypatch):
    slow = Slow()
    monkeypatch.setattr(grammar_compiler, "compile_grammar", slow)
    yield slow
    slow.go.set()


def test_two_at_once_the_others_in_order_of_arrival(tokenizer, slow):
    it = Waiting(tokenizer)
    made = [it.submit(regex=letter) for letter in "abcde"]
    slow.wait_for_both()
    assert set(slow.begun) == {"a", "b"}
    assert [c.started_s is None for c in made] == [False, False, True, True, True]
    assert not made[0].overdue(60)
    assert made[0].overdue(-1)
    assert not made[2].overdue(-1)  # it has not begun
    slow.go.set()
    it.wait(5)
    assert sorted(slow.begun) == list("abcde")
    assert all(c.done and not c.overdue(-1) for c in made)
    assert not any(c.wanted for c in made)  # nobody is kept alive by them


def test_what_nobody_waits_for_is_not_begun(tokenizer, slow):
    it, gone = Waiting(tokenizer), set()
    for letter in "abcd":
        it.submit(lambda letter=letter: letter not in gone, regex=letter)
    it.submit(regex="c")  # somebody else wants it too
    slow.wait_for_both()
    gone |= set("bcd")
    slow.go.set()
    it.wait(3)
    assert sorted(slow.begun) == ["a", "b", "c"]
    it.submit(regex="d")  # as if it had never been asked for
    it.wait(1)
    assert slow.begun[-1] == "d"


def test_few_wait(tokenizer, slow, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "MAX_WAITING", 2)
    it, gone = Waiting(tokenizer), set()
    it.submit(regex="a")
    it.submit(regex="b")
    slow.wait_for_both()
    for letter in "cd":
        it.submit(lambda letter=letter: letter not in gone, regex=letter)
    refused = it.submit(regex="e")
    assert (refused.done, refused.error) == (True, TOO_MANY_WAIT)
    assert not it.submit(regex="c").done  # waits already, and costs nothing
    gone.add("d")  # which makes room
    assert not it.submit(regex="e").done
    slow.go.set()
    it.wait(4)
    assert sorted(slow.begun) == ["a", "b", "c", "e"]


def test_keeps_the_last_ones(tokenizer, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "_MAX_KEPT", 2)
    it = Waiting(tokenizer)
    first, second = it.submit(regex="a"), it.submit(regex="b")
    it.wait(2)
    assert it.submit(regex="a") is first  # now the last one used
    it.submit(regex="c")
    it.wait(1)
    assert it.submit(regex="a") is first
    assert it.submit(regex="b") is not second


def test_threads_end_when_there_is_nothing_to_do(tokenizer):
    it = Waiting(tokenizer)
    it.submit(regex="a")
    it.wait(1)
    until = time.monotonic() + 60
    while it.compiler._num_threads and time.monotonic() < until:
        time.sleep(0.001)
    assert it.compiler._num_threads == 0
    it.submit(regex="b")  # and begin again
    it.wait(1)
