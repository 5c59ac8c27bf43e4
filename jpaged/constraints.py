"""`Constraints`: the masks of the sequences whose output must have a form, made beside the steps.

    add ───► compile the grammar            on a thread; the request waits in the queue, others run
    plan ──► a row samples, with its mask   the next plans leave the sequence out ...
    read ──► take the token, make the next mask   on another thread, while the device runs the step after
    plan ──► ... until the mask is there

A sequence tells the scheduler by its `mask_position` which token it has a mask for.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Final

import numpy as np

from jpaged.grammar import Grammar
from jpaged.grammar_compiler import Compilation, GrammarCompiler
from jpaged.sequence import Sequence as RunningSequence
from jpaged.sequence import SequenceGroup
from jpaged.step_plan import StepPlan
from jpaged.structured import DEAD_END, FORM_FAILED, FORM_TOO_COMPLEX
from jpaged.token_mask import hold_back, num_mask_words, pack_mask
from jpaged.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

COMPILE_LIMIT_S: Final = 10.0
_IDLE_WAIT_S: Final = 0.01  # no longer, so that whoever drives the engine can also take new requests
_GRACE_S: Final = 0.002  # so long a plan waits for masks that are being made; usual ones take far less


@dataclass(eq=False, slots=True)
class _State:
    """Where a sequence is in its grammar.

    Attributes:
      grammar: its own, compiled.
      mask: u32[W], the tokens that may come next.
      allowed: u32[W], those of `allowed_token_ids`, if there are any.
      matcher: after the output so far; `None`: at its start, to be copied from the grammar.
      error: why none may.
    """

    grammar: Grammar
    mask: np.ndarray
    allowed: np.ndarray | None
    matcher: "LLMatcher | None" = None
    error: str | None = None


@dataclass(eq=False, slots=True)
class _Job:
    """Masks that are being made."""

    items: list[tuple[RunningSequence, _State]]
    future: "Future[float]"


@dataclass(slots=True)
class MaskCounter:
    """What masks cost so far.

    Attributes:
      num_masks: masks made, the first of each grammar not counted.
      make_s: that the thread spent on them.
      wait_s: that the engine waited for them before it could go on planning.
    """

    num_masks: int = 0
    make_s: float = 0.0
    wait_s: float = 0.0


class Constraints:
    """Follows every constrained sequence. Used by one thread, the engine's; it has two kinds of its own.

    Args:
      tokenizer: of the model; `None`: no request with a grammar comes.
      vocab_size: V of the model.
      eos_token_ids: ids that end an output.
      compile_limit_s: seconds after which a request is refused whose grammar is still being compiled.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        compile_limit_s: float = COMPILE_LIMIT_S,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = [token for token in eos_token_ids if 0 <= token < vocab_size]
        self._compile_limit_s = compile_limit_s
        self._wake = threading.Event()
        self._compiler: GrammarCompiler | None = None
        if tokenizer is not None:
            self._compiler = GrammarCompiler(tokenizer, vocab_size, self._eos_token_ids, self._wake.set)
        self._compiling: dict[SequenceGroup, Compilation] = {}
        self._states: dict[RunningSequence, _State] = {}
        self._jobs: list[_Job] = []
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
        self.counter = MaskCounter()

    @property
    def is_working(self) -> bool:
        """Whether a grammar or a mask is being made."""
        return bool(self._compiling or self._jobs)

    def open(self, group: SequenceGroup) -> None:
        """A new request, which the scheduler has taken; nothing is done if it wants no form."""
        structured = group.request.params.structured
        if structured is None:
            return
        if self._compiler is None:
            raise ValueError("a grammar needs a tokenizer; the door should have refused it")
        self._compiling[group] = Compilation(structured)  # wanted from here on
        this = weakref.ref(self)  # an engine that restarts drops its constraints, and nobody ends the requests

        def is_wanted() -> bool:
            owner = this()
            return owner is not None and group in owner._compiling and not group.is_finished

        self._compiling[group] = self._compiler.submit(structured, is_wanted)

    def poll(self) -> list[tuple[SequenceGroup, str]]:
        """Takes what is done, so that the next plan knows of it; waits a moment for masks that are nearly there.

        Returns:
          Requests that must be refused now, and why.
        """
        self._wake.clear()
        if self._jobs:
            self._take_masks()
        return list(self._take_grammars()) if self._compiling else []

    def wait(self) -> None:
        """Waits until a grammar or masks are done that were not at the last `poll`, but not for long."""
        if self.is_working:
            started = perf_counter()
            self._wake.wait(_IDLE_WAIT_S)
            self.counter.wait_s += perf_counter() - started if self._jobs else 0.0

    def due(self, plan: StepPlan) -> list[tuple[int, np.ndarray]]:
        """(state index, mask) of the rows of this plan that sample under one."""
        if not self._states:
            return []
        self._states = {seq: state for seq, state in self._states.items() if not seq.is_finished}
        rows = zip(plan.seqs, plan.entries.tolist(), plan.samples, strict=True)
        return [
            (entry, self._state(seq).mask) for seq, entry, samples in rows if samples and seq.mask_position is not None
        ]

    def advance(self, plan: StepPlan) -> None:
        """The results of this plan's step have been taken: makes the next masks of its rows."""
        if not self._states:
            return
        items = []
        for seq, samples in zip(plan.seqs, plan.samples, strict=True):
            if seq.mask_position is None or not samples:
                continue
            if not seq.is_finished:
                items.append((seq, self._state(seq)))
        if items:
            if self._thread is None:
                from llguidance import LLExecutor

                self._thread = ThreadPoolExecutor(1, thread_name_prefix="jpaged-masks")
                self._executor = LLExecutor()
            future = self._thread.submit(self._make_masks, items)
            future.add_done_callback(lambda _: self._wake.set())
            self._jobs.append(_Job(items, future))

    def clear(self) -> None:
        """All requests have ended."""
        self._compiling.clear()
        self._states.clear()
        self._jobs.clear()

    def _state(self, seq: RunningSequence) -> _State:
        state = self._states.get(seq)
        if state is None:  # forked just now: all answers begin alike
            parent = self._states[seq.group.seqs[0]]
            state = self._states[seq] = _State(parent.grammar, parent.mask, parent.allowed)
        return state

    # ------------------------------------------------------------------------------------------ results

    def _take_masks(self) -> None:
        started = perf_counter()
        while self._jobs:
            job, waited = self._jobs[0], perf_counter() - started
            try:
                make_s = job.future.result(max(_GRACE_S - waited, 0))
            except TimeoutError:
                break
            del self._jobs[0]
            self.counter.num_masks += len(job.items)
            self.counter.make_s += make_s
            for seq, state in job.items:
                seq.mask_position = len(seq.tokens)
                seq.group.error = seq.group.error or state.error
        self.counter.wait_s += perf_counter() - started

    def _take_grammars(self) -> Iterator[tuple[SequenceGroup, str]]:
        for group, compilation in list(self._compiling.items()):
            if group.is_finished or compilation.done or compilation.overdue(self._compile_limit_s):
                del self._compiling[group]
            if group.is_finished:
                continue
            if compilation.grammar is not None:
                self._begin(group, compilation.grammar)
            elif compilation.error is not None:
                yield group, compilation.error
            elif group not in self._compiling:
                kind = compilation.structured.kind
                yield (
                    group,
                    f"structured.{kind} was still being compiled after {self._compile_limit_s:g} s: make it simpler",
                )

    def _begin(self, group: SequenceGroup, grammar: Grammar) -> None:
        seq, ids = group.seqs[0], group.request.params.allowed_token_ids
        allowed = None if ids is None else pack_mask(ids, self._vocab_size)
        state = self._states[seq] = _State(grammar, grammar.first_mask.copy(), allowed)
        self._restrict(seq, state)
        group.error, seq.mask_position = state.error, len(seq.tokens)

    # ------------------------------------------------------------------------------------------ the thread

    def _make_masks(self, items: list[tuple[RunningSequence, _State]]) -> float:
        """Runs on the thread. Nobody else touches these states before the job is taken, nor sequences that wait."""
        started = perf_counter()
        try:
            self._fill(items)
        except BaseException as error:  # a panic of llguidance too: no token is left to these sequences, alone
            for _, state in items:
                state.mask = np.zeros(num_mask_words(self._vocab_size), np.uint32)
                state.error = f"{FORM_FAILED} ({error!r:.200})"
        return perf_counter() - started

    def _fill(self, items: list[tuple[RunningSequence, _State]]) -> None:
        assert self._executor is not None
        matchers: list[LLMatcher] = []
        for _, state in items:
            if state.matcher is None:
                state.matcher = state.grammar.matcher.deep_copy()
            matchers.append(state.matcher)
        # It takes part in no step until its mask is there, so there is one new token.
        self._executor.consume_token_par([(m, seq.tokens[-1]) for m, (seq, _) in zip(matchers, items, strict=True)])
        masks = np.zeros((len(items), num_mask_words(self._vocab_size)), np.uint32)
        numbered = [(matcher, index) for index, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(numbered, masks.ctypes.data, masks.shape[1] * 4, len(items))
        for (seq, state), matcher, mask in zip(items, matchers, masks, strict=True):
            state.mask = mask
            if matcher.is_error():  # it would allow the end now
                mask[:] = 0
                why = f"{matcher.get_error():.200}".partition("\n")[0]
                is_ours = "doesn't satisfy" in why  # a token that the mask forbade; all else is a limit
                state.error = f"{FORM_FAILED if is_ours else FORM_TOO_COMPLEX}: {why}"
            else:
                self._restrict(seq, state)

    def _restrict(self, seq: RunningSequence, state: _State) -> None:
        """Applies to a mask what else decides about the next token."""
        params = seq.request.params
        if state.allowed is not None:
            state.mask &= state.allowed
        held: Iterable[int] = ()
        if len(seq.tokens) - seq.num_prompt_tokens < params.min_tokens:
            held = (*self._eos_token_ids, *params.stop_token_ids)
        elif params.ignore_eos:
            held = self._eos_token_ids
        if held:
            hold_back(state.mask, pack_mask(held, self._vocab_size))
        if not state.mask.any():
            state.error = DEAD_END
