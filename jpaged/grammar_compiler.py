"""`GrammarCompiler`: compiles grammars on threads of its own, and keeps those that were compiled last."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from jpaged.errors import RequestError
from jpaged.grammar import Grammar, compile_grammar, grammar_vocabulary, start_with_deep_stack
from jpaged.structured import FORM_FAILED, TOO_MANY_WAIT, StructuredOutput
from jpaged.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_MAX_THREADS: Final = 2
_MAX_KEPT: Final = 64
MAX_WAITING: Final = 64  # compilations that no thread has begun; one may take seconds


@dataclass(eq=False)
class Compilation:
    """One grammar on its way. `grammar` or `error` is set once, by the thread that compiles it.

    Attributes:
      structured: what is compiled.
      wanted: of each who asked: whether they still wait for it. Called on any thread.
      started_s: when a thread began with it, by `time.monotonic()`.
      grammar: the result.
      error: why there is none.
    """

    structured: StructuredOutput
    wanted: list[Callable[[], bool]] = field(default_factory=list)
    started_s: float | None = None
    grammar: Grammar | None = None
    error: str | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits for it."""
        return any(wanted() for wanted in self.wanted)

    @property
    def done(self) -> bool:
        """Whether there is a result."""
        return self.grammar is not None or self.error is not None

    def overdue(self, limit_s: float) -> bool:
        """Whether it has been compiled for longer than that."""
        return not self.done and self.started_s is not None and time.monotonic() - self.started_s > limit_s


class GrammarCompiler:
    """Compiles on at most two threads, in order of arrival; what is asked for again is not compiled again.

    What nobody waits for any more is not begun. A thread cannot be stopped: whoever finds a compilation overdue gives
    it up, and it ends for itself, since the size of a grammar is bounded, and so is llguidance's work on it.

    Args:
      tokenizer: of the model.
      vocab_size: V of the model.
      eos_token_ids: ids that end an output, at least one.
      on_done: called, on the thread that compiled, after each compilation.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], on_done: Callable[[], object]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._on_done = on_done
        self._lock = threading.Lock()  # of the three below
        self._kept: OrderedDict[StructuredOutput, Compilation] = OrderedDict()
        self._waiting: OrderedDict[StructuredOutput, Compilation] = OrderedDict()
        self._num_threads = 0
        self._vocabulary: LLTokenizer | None = None
        self._vocabulary_lock = threading.Lock()

    def submit(self, structured: StructuredOutput, wanted: Callable[[], bool]) -> Compilation:
        """The compilation of a grammar, which may be done already.

        Args:
          structured: what to compile.
          wanted: whether who asks still waits for it; called on any thread.

        Returns:
          One with the error `TOO_MANY_WAIT`, if `MAX_WAITING` others wait for a thread.
        """
        with self._lock:
            found = self._kept.get(structured) or self._waiting.get(structured)
            if found is not None:
                if structured in self._kept:
                    self._kept.move_to_end(structured)
                if not found.done:
                    found.wanted.append(wanted)
                return found
            if len(self._waiting) >= MAX_WAITING:
                self._drop_unwanted()
            if len(self._waiting) >= MAX_WAITING:
                return Compilation(structured, error=TOO_MANY_WAIT)
            made = self._waiting[structured] = Compilation(structured, [wanted])
            if self._num_threads == _MAX_THREADS:
                return made
            self._num_threads += 1
        try:
            start_with_deep_stack(self._work)
        except Exception as error:  # no threads or no memory are left
            self._stopped(error)
        return made

    def _stopped(self, error: Exception) -> None:
        """A thread did not start; without any, what waits has failed."""
        with self._lock:
            self._num_threads -= 1
            while self._waiting and not self._num_threads:
                structured, compilation = self._waiting.popitem(last=False)
                compilation.error = f"{FORM_FAILED} ({structured.kind}): {error!r:.200}"
        self._on_done()

    def _drop_unwanted(self) -> None:
        for structured in [structured for structured, one in self._waiting.items() if not one.is_wanted]:
            del self._waiting[structured]

    def _next(self) -> Compilation | None:
        """Takes the next one that is wanted; `None` ends the thread."""
        with self._lock:
            while self._waiting:
                structured, compilation = self._waiting.popitem(last=False)
                if compilation.is_wanted:
                    compilation.started_s = time.monotonic()
                    self._kept[structured] = compilation
                    while len(self._kept) > _MAX_KEPT:
                        self._kept.popitem(last=False)
                    return compilation
            self._num_threads -= 1
            return None

    def _work(self) -> None:
        while (compilation := self._next()) is not None:
            structured, failed = compilation.structured, False
            try:
                compilation.grammar = compile_grammar(compilation.structured, self._get_vocabulary())
            except RequestError as error:
                compilation.error = str(error)
            except BaseException as error:  # whatever it is, the request must not wait for ever
                compilation.error = f"{FORM_FAILED} ({structured.kind}): {error!r:.200}"
                failed = True
            with self._lock:
                if failed and self._kept.get(structured) is compilation:
                    del self._kept[structured]  # it may do next time
                compilation.wanted.clear()  # requests are not kept alive by what they asked for
            self._on_done()

    def _get_vocabulary(self) -> "LLTokenizer":
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = grammar_vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
            return self._vocabulary
