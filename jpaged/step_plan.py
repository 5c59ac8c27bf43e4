"""`StepPlan`: what the scheduler decides for one step."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jpaged.drafts import NO_TOKEN, Drafts
from jpaged.sequence import Sequence, SequenceGroup


class PageTransfers(NamedTuple):
    """What the device does before the step runs, in this order. All pages of a field are read before any is written.

    Attributes:
      swapped_out: (device page, host page) to save on the host.
      swapped_in: (host page, device page) to load back.
      copies: (source, copy) within the device's pool.
    """

    swapped_out: tuple[tuple[int, int], ...] = ()
    swapped_in: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()


class PlannedRow(NamedTuple):
    """One sequence's part of a step.

    Attributes:
      seq: whose row it is. Its `pages` already hold every token of the row.
      start: first token that the step computes.
      num_tokens: tokens that it computes, [start, start + num_tokens). Those at or after `len(seq.tokens)` are known to
        the device only, when the step before this one has not been read yet.
      samples: whether the step samples the sequence's next token.
      source: index of the row whose last token it samples from: its own, or, where it computes no token because it was
        forked in this step, that of its parent.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    source: int

    @property
    def kv_len(self) -> int:
        """KV tokens of the sequence once the step has run."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Who takes part in one step, and with how many tokens. Column i of the lists is row i.

    Rows of one token stand first, then rows of more, then forks, which compute no token; else in the order of service.

    Attributes:
      seqs, starts, q_lens, samples, sources: as in `PlannedRow`, where `q_lens` is called `num_tokens`. i64[S], but
        `seqs` a list and `samples` bool[S].
      entries: i64[S], `state_index` of the sequences.
      versions: i64[S, 2], their `pages_version` and their `run`.
      from_device: bool[S], the last token of the row is the one that the device sampled last for the sequence; the host
        need not know it yet. It knows all others.
      num_decode: leading rows of one token.
      num_tokens: tokens of all rows, padding not counted.
      transfers: what to do with pages before the step.
      preempted: groups that lost their pages while this plan was made.
      admitted: sequences that got a state index with this plan, in order.
      drafts: the last tokens of rows that guess; `None` if no row does.
      num_steps: decode steps that are done one by one; if more than one, all rows decode.
      num_more: i64[S], those of them in which each row takes part, beside the first; `None`: it is the only one.
    """

    seqs: list[Sequence]
    starts: np.ndarray
    q_lens: np.ndarray
    samples: np.ndarray
    sources: np.ndarray
    entries: np.ndarray
    versions: np.ndarray
    from_device: np.ndarray
    num_decode: int
    num_tokens: int
    transfers: PageTransfers = field(default_factory=PageTransfers)
    preempted: tuple[SequenceGroup, ...] = ()
    admitted: tuple[Sequence, ...] = ()
    drafts: Drafts | None = None
    num_steps: int = 1
    num_more: np.ndarray | None = None

    @property
    def num_seqs(self) -> int:
        """Rows, padding not counted."""
        return len(self.seqs)

    @property
    def num_samples(self) -> int:
        """Rows of the sampler: one a row, and one a guess."""
        return len(self.seqs) + (0 if self.drafts is None else len(self.drafts.tokens))

    @property
    def positions(self) -> np.ndarray:
        """i64[S], of the first token that each row may sample."""
        ends = self.starts + self.q_lens
        return ends if self.drafts is None else ends - self.drafts.counts

    def new_tokens(self, samples: np.ndarray) -> np.ndarray:
        """[S, n]: what the step's samples give to each row's sequence, in order; `NO_TOKEN` after the last one.

        Args:
          samples: as the step gives them, one a row of the sampler; of several steps a line each.
        """
        if self.num_more is not None:
            steps = np.arange(1 + self.num_more.max())  # as wide as its longest line, so none is filled if all are even
            return np.where(steps <= self.num_more[:, None], samples[: len(steps), : len(self.seqs)].T, NO_TOKEN)
        return samples[: len(self.seqs), None] if self.drafts is None else self.drafts.verified(samples)

    @property
    def is_even(self) -> bool:
        """Whether rows that go on get as many tokens each."""
        return self.drafts is None and (self.num_more is None or bool((self.num_more == self.num_more[0]).all()))

    def prompt_spans(self) -> Iterator[tuple[Sequence, int, int, int]]:
        """Of the rows that ask for log-probabilities of their prompt's tokens: those that follow a token of the step.

        Yields:
          (sequence, index in the step's tokens of the first of the tokens before them, their positions [start, end)).
        """
        at = 0
        for row in self.rows:
            seq = row.seq
            start, end = row.start + 1, min(row.kv_len + 1, seq.num_prompt_tokens)
            if seq.request.params.prompt_logprobs is not None and start < end:
                yield seq, at, start, end
            at += row.num_tokens

    @property
    def rows(self) -> Iterator[PlannedRow]:
        """The columns, row by row."""
        columns = (self.starts, self.q_lens, self.samples, self.sources)
        return map(PlannedRow, self.seqs, *(column.tolist() for column in columns))
