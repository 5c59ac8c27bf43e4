"""`RunningTable`: what is counted of running sequences, by state index; `RunningRows`: them in the order of service.

There is one copy: a row of the table is the `counters` of the sequence itself, so whoever changes one sees the other.

    counters        num_tokens    num_computed_tokens   ...
    state index 0      18                 17                 ◄── `Sequence.counters`
                1      31                 30
                2       0                  0                     nobody runs

What is counted of the rows of a step is `counters[entries]`, `entries` being their state indices.
"""

import itertools
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from jpaged.errors import PageStateError
from jpaged.sequence import COUNTERS, RUN, Sequence

_NEVER = 2**62  # more tokens than any sequence has


class RunningTable:
    """Holds the counters of sequences while they run.

    Args:
      num_entries: state indices.

    Attributes:
      counters: i64[num_entries, C], a column a counter of `COUNTERS`; zeros where nobody runs.

    Example:
      >>> from jpaged.request import Request, SamplingParams
      >>> from jpaged.sequence import NUM_COMPUTED, SequenceGroup
      >>> request = Request(request_id="a", prompt_token_ids=(1, 2), params=SamplingParams())
      >>> (seq,) = SequenceGroup(request).seqs
      >>> table = RunningTable(num_entries=4)
      >>> table.begin(seq, 3)
      >>> table.counters[3, NUM_COMPUTED] += 2
      >>> seq.num_computed_tokens
      2
      >>> table.end(seq)
      3
      >>> seq.num_computed_tokens, int(table.counters[3, NUM_COMPUTED])
      (2, 0)
    """

    def __init__(self, num_entries: int) -> None:
        self.counters = np.zeros((num_entries, len(COUNTERS)), np.int64)
        self._columns = list(self.counters.T)  # this is several times faster than indexing rows and columns at once
        self._runs = itertools.count(1)

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return int(np.count_nonzero(self._columns[RUN]))

    def begin(self, seq: Sequence, state_index: int) -> None:
        """A sequence begins to run at this state index, which is free."""
        row = self.counters[state_index]
        row[:] = seq.counters
        seq.state_index, seq.counters = state_index, memoryview(row)
        seq.run = next(self._runs)
        # It is the host that says what a beam goes on with.
        seq.num_given_tokens = seq.num_tokens if seq.group.beam is None else _NEVER

    def add(self, counter: int, entries: np.ndarray, amount: int | np.ndarray) -> None:
        """Adds to one counter of the sequences at these state indices; one amount, or one for each."""
        self._columns[counter][entries] += amount

    def end(self, seq: Sequence) -> int:
        """A sequence does not run any more; the state index that it had."""
        index = seq.state_index
        if index is None:
            raise PageStateError(f"{seq.request.request_id!r} runs without a state index")
        seq.counters = list(seq.counters)
        seq.run, seq.state_index = 0, None
        self.counters[index] = 0
        return index

    def check_invariants(self, seqs: Iterable[Sequence]) -> None:
        """Checks that these sequences, all that run, have their rows, and that the others are empty.

        Raises:
          PageStateError: they have not.
        """
        others = np.ones(len(self.counters), bool)
        for seq in seqs:
            name, index = seq.request.request_id, seq.state_index
            if index is None:
                raise PageStateError(f"{name!r} runs without a state index")
            if not np.shares_memory(np.asarray(seq.counters), self.counters[index]):
                raise PageStateError(f"{name!r} runs, and row {index} of the table is not its own")
            if not seq.run or seq.num_pending < 0:
                raise PageStateError(f"{name!r} runs as {seq!r}")
            others[index] = False
        if self.counters[others].any():
            raise PageStateError(f"rows of nobody are not empty: {self.counters[others].tolist()}")


class RunningRows:
    """The sequences that run, in the order of service, as a step is planned of them. Never changed, but made anew.

    Those of one group stand together, in any order.

    Attributes:
      seqs: the sequences.
      entries: i64[n], their state indices.
    """

    def __init__(self, seqs: list[Sequence]) -> None:
        self.seqs = seqs
        self.entries = np.array([seq.state_index for seq in seqs], np.int64)

    def without(self, seq: Sequence) -> "RunningRows":
        """The same, but for one that does not run any more."""
        place, rows = self.seqs.index(seq), RunningRows.__new__(RunningRows)
        rows.seqs = self.seqs[:place] + self.seqs[place + 1 :]
        rows.entries = np.concatenate((self.entries[:place], self.entries[place + 1 :]))
        return rows

    @cached_property
    def masked(self) -> np.ndarray:
        """i64[m], places of those whose output must have a form."""
        return np.array([i for i, seq in enumerate(self.seqs) if seq.mask_position is not None], np.int64)

    @cached_property
    def are_plain(self) -> bool:
        """Whether the device can go on with each alone: nothing but its logits, and noise, says what it samples."""
        return all(_is_plain(seq) for seq in self.seqs)

    @cached_property
    def siblings(self) -> list[Sequence]:
        """Those that are not alone in their group, and may share a page that is not full."""
        return [seq for seq in self.seqs if len(seq.group.seqs) > 1]


def _is_plain(seq: Sequence) -> bool:
    params = seq.request.params
    adjusted = params.uses_penalties or params.logit_bias or params.min_tokens or params.allowed_token_ids is not None
    draws = params.temperature > 0 and params.top_k != 1  # else the likeliest token, which no filter takes out
    filters = draws and (params.top_k > 1 or params.top_p < 1 or params.min_p > 0)
    told = params.logprobs is not None or params.num_sequences > params.n or seq.group.beam is not None
    return not (adjusted or filters or told) and seq.mask_position is None
