"""What the scheduler decides for one step (`StepPlan`), and what became of its rows (`SequenceUpdate`)."""

from dataclasses import dataclass

from jpaged.request import Sequence


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One sequence's part of a step.

    Attributes:
      seq: whose row it is. Its `pages` already hold every token of the row.
      start: first token that the step computes.
      num_tokens: tokens that it computes, [start, start + num_tokens). Those at or after `len(seq.tokens)` are known to
        the device only, when the step before this one has not been read yet.
      samples: whether its last token is the sequence's last one, so that the step samples the next.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool

    @property
    def kv_len(self) -> int:
        """KV tokens of the sequence once the step has run."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Who takes part in one step, and with how many tokens.

    Attributes:
      rows: at least one; rows of one token stand first. Else in the order of admission.
      preempted: sequences that lost their pages while this plan was made, newest first.
      admitted: sequences that began to run with this plan, in order.
    """

    rows: tuple[PlannedRow, ...]
    preempted: tuple[Sequence, ...] = ()
    admitted: tuple[Sequence, ...] = ()

    @property
    def num_decode(self) -> int:
        """Leading rows of one token."""
        return sum(row.num_tokens == 1 for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, padding not counted."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_seqs(self) -> int:
        """Rows, padding not counted."""
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What one row of a step gave.

    Attributes:
      seq: whose row it was. `seq.is_finished` tells whether this step was its last one.
      row: index of the row in its plan.
      new_token: the token that was appended to `seq.tokens`; `None` if the row sampled none, or if what it sampled was
        not a token (then `seq.finish_reason` is "error").
    """

    seq: Sequence
    row: int
    new_token: int | None
