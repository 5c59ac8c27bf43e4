"""`StateLoader`: brings the sampler state up to date with what the host alone knows, before a step."""

from typing import NamedTuple

import numpy as np

from jpaged.constraints import Constraints
from jpaged.entry_loader import EntryLoader
from jpaged.request import SamplingParams
from jpaged.sampler_state import SamplerEntry, SamplerState, entry_for, load_entry, load_masks, warm_up_masks
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

    Args:
      entries: who needs an entry.
      constraints: who needs a mask.
    """

    def __init__(self, entries: EntryLoader, constraints: Constraints) -> None:
        self._entries = entries
        self._constraints = constraints

    def due(self, plan: StepPlan) -> StateLoads | None:
        """What must be loaded before the step of this plan; `None`: nothing, as for most plans."""
        loads = StateLoads(list(self._entries.due(plan)), self._constraints.due(plan))
        return loads if any(loads) else None

    def load(self, state: SamplerState, loads: StateLoads) -> SamplerState:
        """Loads it (`state` is donated)."""
        for index, entry in loads.entries:
            state = load_entry(state, index, entry)
        return load_masks(state, loads.masks) if loads.masks else state

    def warm_up(self, state: SamplerState, *, idle: bool, masks: bool) -> SamplerState:
        """Compiles the small programs that `load` uses (`state` is donated).

        Args:
          state: of the engine.
          idle: entry 0 is nobody's, so that it may be emptied; if it is not, somebody has most likely compiled the
            program already.
          masks: there can be forms.
        """
        if idle:
            state = load_entry(state, 0, entry_for(SamplingParams(), (), state.vocab_size))
        return warm_up_masks(state) if masks else state

    def clear(self) -> None:
        """All sequences have ended."""
        self._entries.clear()
        self._constraints.clear()
