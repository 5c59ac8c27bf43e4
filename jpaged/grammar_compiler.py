"""`GrammarCompiler`: compiles grammars on threads of its own, and keeps those that were compiled last."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jpaged.errors import RequestError
from jpaged.grammar import Grammar, compile_grammar, grammar_vocabulary, start_with_deep_stack
from jpaged.structured import StructuredOutput
from jpaged.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_MAX_THREADS: Final = 2
_MAX_KEPT: Final = 64


@dataclass(eq=False)
class Compilation:
    """One grammar on its way. `grammar` or `error` is set once, by the thread that compiles it.

    Attributes:
      structured: what is compiled.
      started_s: when a thread began with it, by `time.monotonic()`.
      grammar: the result.
      error: why there is none.
    """

    structured: StructuredOutput
    started_s: float | None = None
    grammar: Grammar | None = None
    error: str | None = None

    @property
    def done(self) -> bool:
        """Whether there is a result."""
        return self.grammar is not None or self.error is not None

    def overdue(self, limit_s: float) -> bool:
        """Whether it has been compiled for longer than that."""
        return not self.done and self.started_s is not None and time.monotonic() - self.started_s > limit_s


class GrammarCompiler:
    """Compiles on at most two threads, in order of arrival; what is asked for again is not compiled again.

    A thread cannot be stopped. Whoever finds a compilation overdue gives it up, and it ends for itself: the size of a
    grammar is bounded, and so is llguidance's work on it.

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
        self._kept: OrderedDict[StructuredOutput, Compilation] = OrderedDict()
        self._lock = threading.Lock()  # of the two below
        self._waiting: deque[Compilation] = deque()
        self._num_threads = 0
        self._vocabulary: LLTokenizer | None = None
        self._vocabulary_lock = threading.Lock()

    def submit(self, structured: StructuredOutput) -> Compilation:
        """The compilation of a grammar, which may be done already."""
        found = self._kept.get(structured)
        if found is not None:
            self._kept.move_to_end(structured)
            return found
        made = self._kept[structured] = Compilation(structured)
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        with self._lock:
            self._waiting.append(made)
            if self._num_threads == _MAX_THREADS:
                return made
            self._num_threads += 1
        start_with_deep_stack(self._work)
        return made

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_threads -= 1
                    return
                compilation = self._waiting.popleft()
            compilation.started_s = time.monotonic()
            try:
                compilation.grammar = compile_grammar(compilation.structured, self._get_vocabulary())
            except RequestError as error:
                compilation.error = str(error)
            except BaseException as error:  # whatever it is, the request must not wait for ever
                compilation.error = f"structured.{compilation.structured.kind} cannot be compiled: {error!r:.200}"
            self._on_done()

    def _get_vocabulary(self) -> "LLTokenizer":
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = grammar_vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
            return self._vocabulary
