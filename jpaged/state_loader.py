"""`StateLoader`: brings the sampler state up to date with what the host alone knows, before a step."""

from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

import numpy as np

from jpaged.constraints import Constraints
from jpaged.sampler_state import (
    SamplerEntry,
    SamplerState,
    entry_for,
    load_entry,
    load_masks,
    needs_entry,
    warm_up_entry,
    warm_up_masks,
)
from jpaged.sequence import Sequence
from jpaged.step_plan import StepPlan


class StateLoads(NamedTuple):
    """What is to be loaded, each with the entry that it is for.

    Attributes:
      entries: of sequences that have their first row.
      masks: u32[W], of rows that sample under one.
    """

    entries: list[tuple[int, SamplerEntry]]
    masks: list[tuple[int, np.ndarray]]


class StateLoader:
    """Loads entries of sequences that begin to run, and masks of rows whose output must have a form.

    An entry is loaded with all that its sequence has by its first row, which may come some steps after it began to run.

    Args:
      eos_token_ids: the model's end-of-sequence ids.
      vocab_size: V.
      constraints: who needs a mask.
    """

    def __init__(self, eos_token_ids: AbstractSequence[int], vocab_size: int, constraints: Constraints) -> None:
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._constraints = constraints
        self._awaiting: dict[Sequence, None] = {}  # those that run, need an entry and had no row yet

    def due(self, plan: StepPlan) -> StateLoads | None:
        """What must be loaded before the step of this plan; `None`: nothing, as for most plans."""
        for seq in plan.admitted:
            if needs_entry(seq.request.params):
                self._awaiting[seq] = None
        entries = list(self._entries(plan)) if self._awaiting else []
        loads = StateLoads(entries, self._constraints.due(plan))
        return loads if any(loads) else None

    def _entries(self, plan: StepPlan) -> Iterator[tuple[int, SamplerEntry]]:
        with_row = set(plan.seqs)
        for seq in list(self._awaiting):
            if seq.state_index is None:  # it was preempted or has ended
                del self._awaiting[seq]
            elif seq in with_row:
                del self._awaiting[seq]
                params, num_prompt, held = seq.request.params, seq.num_prompt_tokens, seq.tokens
                known = {"prompt": held[:num_prompt], "output": held[num_prompt:]}
                yield seq.state_index, entry_for(params, self._eos_token_ids, self._vocab_size, **known)

    def load(self, state: SamplerState, loads: StateLoads) -> SamplerState:
        """Loads it (`state` is donated)."""
        for index, entry in loads.entries:
            state = load_entry(state, index, entry)
        return load_masks(state, loads.masks) if loads.masks else state

    def warm_up(self, state: SamplerState, *, masks: bool) -> SamplerState:
        """Compiles the small programs that `load` uses; nobody's entry changes.

        Args:
          state: of the engine; it is donated.
          masks: there can be forms.
        """
        state = warm_up_entry(state)
        return warm_up_masks(state) if masks else state

    def clear(self) -> None:
        """All sequences have ended."""
        self._awaiting.clear()
        self._constraints.clear()
