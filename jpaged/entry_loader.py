"""`EntryLoader`: which sequences need an entry of the sampler state loaded before a step, and with what."""

from collections.abc import Iterator, Sequence

from jpaged.batch import state_index
from jpaged.sampler_state import SamplerEntry, entry_for, needs_entry
from jpaged.sequence import Sequence as RunningSequence
from jpaged.step_plan import StepPlan


class EntryLoader:
    """Remembers who has begun to run and had no row yet: what is loaded must be all that it has by its first row.

    Args:
      eos_token_ids: the model's end-of-sequence ids.
      vocab_size: V.
    """

    def __init__(self, eos_token_ids: Sequence[int], vocab_size: int):
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._awaiting: dict[RunningSequence, None] = {}

    def due(self, plan: StepPlan) -> Iterator[tuple[int, SamplerEntry]]:
        """(state index, entry) of the sequences that must be loaded before the step of this plan."""
        for seq in plan.admitted:
            if needs_entry(seq.request.params):
                self._awaiting[seq] = None
        if not self._awaiting:
            return
        with_row = set(plan.seqs)
        for seq in list(self._awaiting):
            if seq.state_index is None:  # it was preempted or has ended
                del self._awaiting[seq]
            elif seq in with_row:
                del self._awaiting[seq]
                num_prompt, held = seq.num_prompt_tokens, seq.tokens
                yield (
                    state_index(seq),
                    entry_for(
                        seq.request.params,
                        self._eos_token_ids,
                        self._vocab_size,
                        prompt=held[:num_prompt],
                        output=held[num_prompt:],
                    ),
                )

    def clear(self) -> None:
        """All sequences have ended."""
        self._awaiting.clear()
