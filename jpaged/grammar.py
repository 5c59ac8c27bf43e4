"""What a `StructuredOutput` says, compiled by llguidance: `Grammar`, and the threads that a compile needs.

llguidance follows rules and references by recursion, on the stack of the thread that calls it: a grammar that is one
long chain of rules, as long as a request may bring one, overflows the stack of an ordinary thread, which ends the
process. So everything that reads a grammar runs on a thread with a deep stack. What is done later, with a compiled
grammar, is no recursion over it.
"""

import importlib.util
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from jpaged.errors import RequestError
from jpaged.structured import StructuredOutput
from jpaged.token_mask import num_mask_words
from jpaged.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_STACK_BYTES: Final = 512 << 20  # of address space; the longest chain in `MAX_TEXT_BYTES` needs a quarter of it
_MAX_MESSAGE: Final = 400
_STACK_LOCK: Final = threading.Lock()  # the stack size of new threads is a setting of the whole process

Result = TypeVar("Result")


def require_llguidance() -> None:
    """Refuses if llguidance is not installed.

    Raises:
      RequestError: it is not.
    """
    if importlib.util.find_spec("llguidance") is None:
        raise RequestError(
            'structured outputs need llguidance, which is not installed: pip install "jpaged[structured]"'
        )


def check_grammar(structured: StructuredOutput) -> None:
    """Refuses what llguidance does not understand or support.

    It takes a millisecond or two for what people write, and seconds for the worst that fits: call it where nobody
    else waits.

    Raises:
      RequestError: with llguidance's own message, or llguidance is not installed.
    """
    require_llguidance()
    from llguidance import LLMatcher

    def check() -> str:
        return LLMatcher.validate_grammar(_source(structured), limits=_limits())

    message = run_with_deep_stack(check)
    if message:
        raise _refusal(structured, message)


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar, for one vocabulary. Immutable.

    Attributes:
      matcher: at the start of an output; to be copied.
      first_mask: u32[W], the tokens that an output may begin with.
    """

    matcher: "LLMatcher"
    first_mask: np.ndarray


def compile_grammar(structured: StructuredOutput, vocabulary: "LLTokenizer") -> Grammar:
    """Compiles; to be called in `run_with_deep_stack`.

    Args:
      structured: the form.
      vocabulary: see `grammar_vocabulary`.

    Raises:
      RequestError: the grammar is refused, with llguidance's own message.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary, _source(structured), log_level=0, limits=_limits())
    if matcher.is_error():
        raise _refusal(structured, matcher.get_error())
    mask = np.zeros(num_mask_words(vocabulary.vocab_size), np.uint32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if matcher.is_error():
        raise _refusal(structured, matcher.get_error())
    return Grammar(matcher, mask)


def grammar_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> "LLTokenizer":
    """The vocabulary as llguidance wants it; takes some tenths of a second.

    Special tokens, and ids that the tokenizer does not know, match no text, so no grammar allows them.

    Args:
      tokenizer: of the model; its vocabulary may be smaller or larger than the model's.
      vocab_size: V of the model.
      eos_token_ids: ids that end an output, at least one.

    Raises:
      RequestError: tokens of this vocabulary have no text of their own.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(_TokenBytes(tokenizer, vocab_size, eos_token_ids), eos_token=list(eos_token_ids))  # type: ignore[arg-type]


class _TokenBytes:
    """What llguidance's constructor looks for in a tokenizer of an unknown kind."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        special = {*tokenizer.special_token_ids, *eos_token_ids}
        self.special_token_ids = sorted(token for token in special if token < vocab_size)
        self.tokens = [self._bytes(index) for index in range(vocab_size)]
        self._text_of = {token: text for token, text in enumerate(self.tokens) if token not in special}
        self._token_of = {text: token for token, text in self._text_of.items() if text}
        self._longest = max(map(len, self._token_of), default=0)

    def _bytes(self, index: int) -> bytes:
        try:
            spelling = self._tokenizer.id_to_token(index)
        except RequestError:
            return b""  # models pad their vocabulary to round sizes
        return self._tokenizer.decode_plan.token_bytes(spelling)

    def __call__(self, text: str) -> list[int]:
        """How the model would spell a text that a grammar forces; the tokens' bytes are the text's, no more, no less.

        A tokenizer may put a space before every text, and takes the names of special tokens for these tokens.
        """
        wanted = text.encode()
        for before in ("", "\n"):  # behind a line break there is no space to be put
            token_ids = self._tokenizer.encode(before + text, add_special_tokens=False)
            start, size = len(token_ids), 0
            while start and size < len(wanted):
                start -= 1
                size += len(self._text_of.get(token_ids[start], b""))
            if b"".join(self._text_of.get(token, b"") for token in token_ids[start:]) == wanted:
                return token_ids[start:]
        return self._longest_first(wanted)

    def _longest_first(self, text: bytes) -> list[int]:
        token_ids, at = [], 0
        while at < len(text):
            ends = range(min(at + self._longest, len(text)), at, -1)
            end = next((end for end in ends if text[at:end] in self._token_of), None)
            if end is None:
                break  # the vocabulary has no such byte: the grammar is a dead end there
            token_ids.append(self._token_of[text[at:end]])
            at = end
        return token_ids


def run_with_deep_stack(function: Callable[[], Result]) -> Result:
    """Runs a function on a thread with a stack for deep recursion, and waits for it.

    Raises:
      Exception: what the function raised.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    start_with_deep_stack(run).join()
    if errors:
        raise errors[0]
    return results[0]


def start_with_deep_stack(function: Callable[[], Any]) -> threading.Thread:
    """Starts a function on such a thread, which does not keep the process alive."""
    with _STACK_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=function, name="jpaged-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def _source(structured: StructuredOutput) -> str:
    """In llguidance's own form."""
    from llguidance import LLMatcher, grammar_from

    kind, compact = structured.kind, structured.disable_any_whitespace
    try:
        if kind in ("json", "json_object"):
            schema = structured.json if isinstance(structured.json, str) else '{"type": "object"}'
            return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": not compact})
        if kind == "regex":
            return grammar_from("regex", structured.regex or "")
        if kind == "choice":
            quoted = (json.dumps(text, ensure_ascii=False) for text in structured.choice or ())
            return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))
        return grammar_from("grammar", structured.grammar or "")
    except (ValueError, RecursionError) as error:
        raise _refusal(structured, str(error)) from None


def _limits() -> Any:
    from llguidance import LLParserLimits

    # A state takes 1-2 kB, and by default there may be 250,000. Verbose messages would quote what the model wrote.
    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def _refusal(structured: StructuredOutput, message: str) -> RequestError:
    message = " ".join(message.replace("<non-verbose/>", "").split())
    if len(message) > _MAX_MESSAGE:
        message = message[:_MAX_MESSAGE] + "..."
    return RequestError(f"structured.{structured.kind} is refused: {message}")
