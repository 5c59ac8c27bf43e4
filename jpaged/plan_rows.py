"""`PlanRows`: the rows of a step while it is being planned."""

from jpaged.sequence import Sequence, SequenceGroup
from jpaged.step_plan import PageTransfers, StepPlan


class PlanRows:
    """Collects rows and brings them into the order of a `StepPlan`.

    Args:
      max_num_tokens: the token budget of the step.

    Attributes:
      decoding: sequences that compute their one last token and sample. They are counted as computed by whoever puts
        them here: this is the only row that a large batch is made of.
      preempted, admitted: as in `StepPlan`.
    """

    def __init__(self, max_num_tokens: int) -> None:
        self.decoding: list[Sequence] = []
        self.preempted: list[SequenceGroup] = []
        self.admitted: list[Sequence] = []
        self._max_num_tokens = max_num_tokens
        self._num_chunk_tokens = 0
        self._chunks: list[tuple[Sequence, int, int, bool]] = []  # sequence, start, tokens, samples
        self._forks: list[tuple[Sequence, Sequence]] = []  # child, parent

    @property
    def budget(self) -> int:
        """Tokens that are left."""
        return self._max_num_tokens - len(self.decoding) - self._num_chunk_tokens

    def add(self, seq: Sequence, num_tokens: int, samples: bool) -> None:
        """A row of the sequence's next tokens, which count as computed from now on."""
        start = seq.num_computed_tokens
        seq.num_computed_tokens = start + num_tokens
        seq.num_pending += samples
        self._chunks.append((seq, start, num_tokens, samples))
        self._num_chunk_tokens += num_tokens

    def add_fork(self, child: Sequence, parent: Sequence) -> None:
        """A row that samples from the last token of `parent`, which has a row that samples too."""
        self._forks.append((child, parent))

    def holds_chunk_of(self, group: SequenceGroup) -> bool:
        """Whether a row beside the decoding ones is of this group. Such a row stays: others may count on its KV."""
        return any(chunk[0].group is group for chunk in self._chunks)

    def drop_decoding(self, group: SequenceGroup) -> None:
        """Takes the decoding rows of a group back: it computes and samples nothing in this step."""
        for seq in [seq for seq in self.decoding if seq.group is group]:
            seq.num_computed_tokens -= 1
            seq.num_pending -= 1
            self.decoding.remove(seq)

    def __bool__(self) -> bool:
        return bool(self.decoding or self._chunks)

    def build(self, transfers: PageTransfers) -> StepPlan:
        """The plan."""
        decoding, chunks = self.decoding, self._chunks
        ones = [chunk for chunk in chunks if chunk[2] == 1]
        ordered = ones + [chunk for chunk in chunks if chunk[2] > 1]
        seqs = decoding + [chunk[0] for chunk in ordered]
        parents = {id(seq): row for row, seq in enumerate(seqs)} if self._forks else {}
        num_rows, num_forks = len(seqs), len(self._forks)
        return StepPlan(
            seqs=seqs + [child for child, _ in self._forks],
            starts=[seq.num_computed_tokens - 1 for seq in decoding]
            + [chunk[1] for chunk in ordered]
            + [child.num_computed_tokens for child, _ in self._forks],
            q_lens=[1] * len(decoding) + [chunk[2] for chunk in ordered] + [0] * num_forks,
            samples=[True] * len(decoding) + [chunk[3] for chunk in ordered] + [True] * num_forks,
            sources=[*range(num_rows), *(parents[id(parent)] for _, parent in self._forks)],
            num_decode=len(decoding) + len(ones),
            num_tokens=len(decoding) + self._num_chunk_tokens,
            transfers=transfers,
            preempted=tuple(self.preempted),
            admitted=tuple(self.admitted),
        )
