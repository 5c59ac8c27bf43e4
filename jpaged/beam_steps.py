"""`BeamSteps`: turns what a step says of beams into the beams of the next one, on their pages."""

from collections.abc import Sequence as AbstractSequence

from jpaged.beam_search import BeamSearch
from jpaged.group_queues import GroupQueues
from jpaged.sequence import Sequence, SequenceGroup

Candidates = AbstractSequence[tuple[int, float]]


class BeamSteps:
    """Keeps what is known of some beams of a search until it is known of all of them.

    The beams of a search need not be computed by the same step: pages, or the tokens of a step, may not suffice.

    Args:
      queues: forks and ends beams.
    """

    def __init__(self, queues: GroupQueues) -> None:
        self._queues = queues
        self._candidates: dict[Sequence, Candidates] = {}

    @staticmethod
    def begin(group: SequenceGroup) -> None:
        """Gives a group its search; `limit` and `stop_ids` of its sequence are set."""
        seq, params = group.seqs[0], group.request.params
        group.beam = BeamSearch(
            width=params.num_sequences,
            num_return=params.n,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            stop_token_ids=seq.stop_ids,
            max_tokens=group.limit - seq.num_prompt_tokens,
            min_tokens=params.min_tokens,
        )

    def take(self, seq: Sequence, candidates: Candidates) -> bool:
        """Takes the likeliest next tokens of a beam, and with the last beam's takes a step of the search.

        Beams are dropped or forked then, and each gets a token.

        Returns:
          Whether the search is over; its beams are then still to be finished.
        """
        group, beam = seq.group, seq.group.beam
        assert beam is not None
        self._candidates[seq] = candidates
        if not all(other in self._candidates for other in group.seqs):
            return False
        old = group.seqs
        moves = beam.advance([self._candidates.pop(other) for other in old])
        if not moves:
            return True
        parents = {parent for parent, _ in moves}
        for index, other in enumerate(old):
            if index not in parents:
                self._queues.finish(other)  # never the last one: the group goes on
        beams: list[Sequence] = []
        for parent, _ in moves:
            other = old[parent]
            beams.append(self._queues.fork(other, 0) if other in beams else other)
        for other, (_, token) in zip(beams, moves, strict=True):
            other.append(token)
        group.seqs = beams
        return False

    def forget(self, seq: Sequence) -> None:
        """Drops what a beam gave: it has ended, or will give it once more."""
        self._candidates.pop(seq, None)
