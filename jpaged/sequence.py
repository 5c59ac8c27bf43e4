"""`Sequence`: what the engine knows of one answer while it makes it; `SequenceGroup`: the answers to one request."""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jpaged.request import FinishReason, Request

if TYPE_CHECKING:
    from jpaged.beam_search import BeamSearch
    from jpaged.prefix_cache import CachedPage


class SequenceStatus(enum.Enum):
    """Of a sequence and of its group; a finished sequence may belong to a group that still runs."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer to a request, and its pages. Mutable; the scheduler owns it.

    Token ranges, all half-open:
      [0, num_prompt_tokens)                   the prompt
      [num_prompt_tokens, len(tokens))         output that the host has read
      [len(tokens), num_tokens)                output that steps in flight have sampled (`num_pending`)
      [0, num_computed_tokens)                 tokens whose KV is written, by steps that ran or are in flight
      [num_computed_tokens, writable_end)      slots of its own pages, which it may fill without asking for memory

    Attributes:
      group: the answers to the same request.
      index: of this answer among them.
      tokens: prompt and output.
      pages: page i holds tokens [i * page_size, (i + 1) * page_size); 0, the null page, where they left the window.
      pages_version: grows whenever an entry of `pages` is replaced, rather than added at the end.
      host_pages: while it is swapped out, the pages of the host that hold its KV.
      chain: what the prefix cache knows of its leading full pages: the root, then one entry a page.
      state_index: its entry of the sampler state, while it runs.
      limit: tokens at which it ends, prompt included; 0 while it is to be forked, and in a beam search, which decides
        that itself. Set by the scheduler, as is
      stop_ids: token ids that may end it.
      mask_position: position of the token that can be sampled next as far as masks go: the one that a mask was made
        for; -1: none was made yet; `None`: it needs none.
      num_cached_tokens: prompt tokens found in the prefix cache when it first ran.
    """

    group: "SequenceGroup" = field(repr=False)
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    num_pending: int = 0
    num_computed_tokens: int = 0
    writable_end: int = 0
    num_cached_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    pages_version: int = 0
    host_pages: list[int] = field(default_factory=list)
    chain: "list[CachedPage]" = field(default_factory=list, repr=False)
    state_index: int | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    limit: int = 0
    stop_ids: frozenset[int] = frozenset()
    mask_position: int | None = None

    @property
    def awaits_mask(self) -> bool:
        """Whether its next token cannot be sampled before a mask is made, be it that a token before is not known."""
        return self.mask_position is not None and self.mask_position != self.num_tokens

    @property
    def request(self) -> Request:
        return self.group.request

    @property
    def seed(self) -> int:
        """Of its samples: the request's seed for the first answer, the next ones for the others."""
        return (self.group.request.seed + self.index) % (1 << 63)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.group.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that were sampled, read or not."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Output tokens that the host has read."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED


@dataclass(eq=False, slots=True)
class SequenceGroup:
    """The answers to one request: admitted, preempted and resumed together.

    It starts with one sequence, which computes the prompt; the others are forked from it when it is computed.

    Attributes:
      request: what was asked.
      seqs: the sequences; those of a beam search that were dropped are taken out.
      rank: its place in the order of service, ascending; set by the scheduler.
      status: of the group.
      limit: tokens at which its sequences end, prompt included; set by the scheduler.
      beam: the state of a beam search, if the request asks for one.
      error: what went wrong with it, where more is known than that.
      num_preemptions: how often it lost its pages.
      num_recomputed: how often of these it had to compute them again.
      state_indices: those that it holds for sequences yet to be forked.
      num_pages_lacking: pages that it needs, when it last did not fit; 0 if it did, or was not tried.
      num_passed: younger groups that were admitted while this one, ahead of them, did not fit.
    """

    request: Request
    seqs: list[Sequence] = field(init=False)
    rank: tuple[float, int] = (0.0, 0)
    status: SequenceStatus = SequenceStatus.WAITING
    limit: int = 0
    beam: "BeamSearch | None" = None
    error: str | None = None
    num_preemptions: int = 0
    num_recomputed: int = 0
    state_indices: list[int] = field(default_factory=list)
    num_pages_lacking: int = 0
    num_passed: int = 0

    def __post_init__(self) -> None:
        self.seqs = [Sequence(self, tokens=list(self.request.prompt_token_ids))]

    @property
    def live(self) -> list[Sequence]:
        """The sequences that have not ended."""
        return [seq for seq in self.seqs if seq.status is not SequenceStatus.FINISHED]

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def awaits_mask(self) -> bool:
        """Whether one of its sequences awaits a mask."""
        return any(seq.awaits_mask for seq in self.live)

    @property
    def num_pending(self) -> int:
        """Tokens that steps in flight have sampled and the host has not read."""
        return sum(seq.num_pending for seq in self.seqs)
