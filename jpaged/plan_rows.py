"""`PlanRows`: the rows of a step while it is being planned."""

from collections.abc import Sequence as AbstractSequence

import numpy as np

from jpaged.drafts import Drafts
from jpaged.running_table import RunningRows, RunningTable
from jpaged.sequence import NUM_COMPUTED, NUM_GIVEN, NUM_TOKENS, PAGES_VERSION, RUN, Sequence, SequenceGroup
from jpaged.step_plan import PageTransfers, StepPlan

_NOBODY = RunningRows([])


class PlanRows:
    """Collects rows and brings them into the order of a `StepPlan`.

    Args:
      table: the counters of those that run.

    Attributes:
      preempted, admitted, num_steps: as in `StepPlan`.
    """

    def __init__(self, table: RunningTable) -> None:
        self.preempted: list[SequenceGroup] = []
        self.admitted: list[Sequence] = []
        self._table = table
        self._max_num_tokens = 0
        self._running = _NOBODY
        self._decodes = np.zeros(0, bool)  # by place in `_running`
        self._counted = False
        self._num_decoding = 0
        self._num_chunk_tokens = 0
        self._chunks: list[tuple[Sequence, int, bool]] = []  # sequence, tokens, samples
        self._guesses: dict[Sequence, AbstractSequence[int]] = {}
        self.num_steps = 1
        self._num_more: np.ndarray | None = None
        self._forks: list[tuple[Sequence, Sequence]] = []  # child, parent

    @property
    def budget(self) -> int:
        """Tokens that are left, once `leave` was called."""
        return self._max_num_tokens - self.num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, once `count_decoding` was called."""
        return self._num_decoding + self._num_chunk_tokens

    def leave(self, budget: int) -> None:
        """So many tokens are left beside those of the rows so far."""
        self._max_num_tokens = self.num_tokens + budget

    def decode(self, running: RunningRows, decodes: np.ndarray) -> None:
        """Rows of sequences that compute their one last token and sample; there are none so far.

        Args:
          running: those that run.
          decodes: bool[n], which of them decode. Rows are still added and dropped until `count_decoding`.
        """
        self._running, self._decodes, self._counted = running, decodes, False

    def count_decoding(self) -> None:
        """The tokens of decoding rows count as computed, and their samples as pending."""
        self._counted = True
        self._num_decoding = int(np.count_nonzero(self._decodes))
        entries = self._decoding_entries()
        self._table.add(NUM_COMPUTED, entries, 1)
        self._table.add(NUM_TOKENS, entries, 1)

    def drop_decoding(self, group: SequenceGroup) -> None:
        """Takes the decoding rows of a group back: it computes and samples nothing in this step. None of it guesses."""
        for place in np.flatnonzero(self._decodes).tolist():
            seq = self._running.seqs[place]
            if seq.group is group:
                self._decodes[place] = False
                if self._counted:
                    seq.num_computed_tokens -= 1
                    seq.num_tokens -= 1
                    self._num_decoding -= 1

    def add(self, seq: Sequence, num_tokens: int, samples: bool) -> None:
        """A row of the sequence's next tokens, which count as computed from now on. One row a sequence at the most."""
        seq.num_computed_tokens += num_tokens
        seq.num_tokens += samples
        self._chunks.append((seq, num_tokens, samples))
        self._num_chunk_tokens += num_tokens

    def guess(self, place: int, guesses: AbstractSequence[int]) -> None:
        """A decoding row, which was counted, goes on with these guesses, for which there is room."""
        seq = self._running.seqs[place]
        self._decodes[place] = False
        self._num_decoding -= 1
        self._chunks.append((seq, 1 + len(guesses), True))
        self._num_chunk_tokens += 1 + len(guesses)
        self._guesses[seq] = guesses
        seq.num_computed_tokens += len(guesses)
        seq.num_tokens += len(guesses)

    def go_on(self, num_steps: int, num_more: np.ndarray) -> None:
        """The decoding rows, which were counted and are all rows, compute more tokens, each from the sample before it.

        Args:
          num_steps: in all.
          num_more: i64[n], tokens more of each row, for which there is room; at most `num_steps` - 1.
        """
        self.num_steps, self._num_more = num_steps, num_more
        entries = self._decoding_entries()
        self._table.add(NUM_COMPUTED, entries, num_more)
        self._table.add(NUM_TOKENS, entries, num_more)

    def add_fork(self, child: Sequence, parent: Sequence) -> None:
        """A row that samples from the last token of `parent`, which has a row that samples too."""
        self._forks.append((child, parent))

    def holds_chunk_of(self, group: SequenceGroup) -> bool:
        """Whether a row beside the decoding ones is of this group. Such a row stays: others may count on its KV."""
        return any(chunk[0].group is group for chunk in self._chunks)

    @property
    def decodes_only(self) -> bool:
        """Whether all rows decode."""
        return not self._chunks

    @property
    def decoding(self) -> list[tuple[int, Sequence]]:
        """The sequences of decoding rows, each with its place for `guess`."""
        return [(place, self._running.seqs[place]) for place in np.flatnonzero(self._decodes).tolist()]

    def __bool__(self) -> bool:
        return bool(self._num_decoding or self._chunks)

    def build(self, transfers: PageTransfers) -> StepPlan:
        """The plan."""
        seqs, entries, num_ones = self._running.seqs, self._decoding_entries(), self._num_decoding
        if num_ones != len(seqs):
            seqs = [seqs[place] for place in np.flatnonzero(self._decodes).tolist()]
        q_lens, samples, sources = np.ones(num_ones, np.int64), np.ones(num_ones, bool), np.arange(num_ones)
        if self._chunks:
            ones = [chunk for chunk in self._chunks if chunk[1] == 1]
            ordered = ones + [chunk for chunk in self._chunks if chunk[1] > 1]
            num_ones += len(ones)
            children, parents = [child for child, _ in self._forks], [parent for _, parent in self._forks]
            num_rows, others = len(seqs) + len(ordered), [*(chunk[0] for chunk in ordered), *children]
            seqs = seqs + others
            row_of = {id(seq): row for row, seq in enumerate(seqs)} if parents else {}
            entries = _longer(entries, [seq.state_index for seq in others])
            q_lens = _longer(q_lens, [chunk[1] for chunk in ordered] + [0] * len(children))
            samples = _longer(samples, [chunk[2] for chunk in ordered] + [True] * len(children))
            sources = _longer(np.arange(num_rows), [row_of[id(parent)] for parent in parents])
        counters = self._table.counters.take(entries, axis=0)
        ends = counters[:, NUM_COMPUTED]
        if self._num_more is not None:
            ends = ends - self._num_more  # as the first step leaves them
        from_device, drafts = ends > counters[:, NUM_GIVEN], None
        if self._guesses:
            guesses = [self._guesses.get(seq, ()) for seq in seqs]
            counts = np.array([len(tokens) for tokens in guesses], np.int64)
            drafts = Drafts(counts, np.array([token for tokens in guesses for token in tokens], np.int64))
            from_device &= counts == 0  # all that such a row computes was read, or is guessed, by the host
        return StepPlan(
            seqs=seqs,
            starts=ends - q_lens,
            q_lens=q_lens,
            samples=samples,
            sources=sources,
            entries=entries,
            versions=counters[:, PAGES_VERSION : RUN + 1],
            from_device=from_device,
            num_decode=num_ones,
            num_tokens=self.num_tokens,
            transfers=transfers,
            preempted=tuple(self.preempted),
            admitted=tuple(self.admitted),
            drafts=drafts,
            num_steps=self.num_steps,
            num_more=self._num_more,
        )

    def _decoding_entries(self) -> np.ndarray:
        entries = self._running.entries
        return entries if self._num_decoding == len(entries) else entries[self._decodes]


def _longer(column: np.ndarray, more: list) -> np.ndarray:
    return np.concatenate((column, np.array(more, column.dtype)))
