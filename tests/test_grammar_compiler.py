"""Threads that compile grammars: order, results kept, errors, and who gives up."""

import threading
import time

import pytest

from jpaged import grammar_compiler
from jpaged.errors import RequestError
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.grammar_compiler import Compilation, GrammarCompiler
from jpaged.structured import StructuredOutput
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

    def submit(self, **form) -> Compilation:
        return self.compiler.submit(StructuredOutput(**form))

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
    assert broken.error == "structured.regex cannot be compiled: MemoryError('no room')"


def test_two_at_once_the_others_in_order_of_arrival(tokenizer, monkeypatch):
    go, begun, lock = threading.Event(), [], threading.Lock()
    both = threading.Semaphore(0)

    def compile_slowly(structured, vocabulary):
        with lock:
            begun.append(structured.regex)
        both.release()
        assert go.wait(60)
        raise RequestError(structured.regex)

    monkeypatch.setattr(grammar_compiler, "compile_grammar", compile_slowly)
    it = Waiting(tokenizer)
    made = [it.submit(regex=letter) for letter in "abcde"]
    for _ in range(2):
        assert both.acquire(timeout=60)
    assert set(begun) == {"a", "b"}
    assert [c.started_s is None for c in made] == [False, False, True, True, True]
    assert not made[0].overdue(60)
    assert made[0].overdue(-1)
    assert not made[2].overdue(-1)  # it has not begun
    go.set()
    it.wait(5)
    assert sorted(begun) == list("abcde")
    assert all(c.done and not c.overdue(-1) for c in made)


def test_keeps_the_last_ones(tokenizer, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "_MAX_KEPT", 2)
    it = Waiting(tokenizer)
    first, second = it.submit(regex="a"), it.submit(regex="b")
    assert it.submit(regex="a") is first  # now the last one used
    it.submit(regex="c")
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
