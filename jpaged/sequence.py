"""`Sequence`: what the engine knows of one answer while it makes it; `SequenceGroup`: the answers to one request."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from jpaged.request import FinishReason, Request

if TYPE_CHECKING:
    from jpaged.beam_search import BeamSearch
    from jpaged.guesser import Guesser
    from jpaged.prefix_cache import CachedPage


class SequenceStatus(enum.Enum):
    """Of a sequence and of its group; a finished sequence may belong to a group that still runs."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


# What is counted of a sequence, an integer each. While it runs these are a row of the scheduler's `RunningTable`, so
# that a step of many rows costs a few array operations.
COUNTERS: Final = (
    "num_tokens",
    "num_computed_tokens",
    "num_given_tokens",
    "writable_end",
    "limit",
    "last_token_ns",
    "watch",
    "pages_version",
    "run",
)
NUM_TOKENS, NUM_COMPUTED, NUM_GIVEN, WRITABLE_END, LIMIT, LAST_TOKEN_NS, WATCH, PAGES_VERSION, RUN = range(9)

STREAM, HANDLE = 1, 2  # a token is told to a client; it is looked at in any case, for a stop string for instance


def _counter(index: int) -> Any:
    def get(seq: "Sequence") -> int:
        return seq.counters[index]

    def set_to(seq: "Sequence", value: int) -> None:
        seq.counters[index] = value

    return property(get, set_to)


class Sequence:
    """One answer to a request, and its pages. Mutable; the scheduler owns it.

    Token ranges, all half-open:
      [0, num_prompt_tokens)                   the prompt
      [num_prompt_tokens, len(tokens))         output that the host has read
      [len(tokens), num_tokens)                output that steps in flight have sampled (`num_pending`), or, for those
                                               that guess (`jpaged.drafts`), may have
      [0, num_computed_tokens)                 tokens whose KV is written, by steps that ran or are in flight
      [num_computed_tokens, writable_end)      slots of its own pages, which it may fill without asking for memory

    Attributes:
      group: the answers to the same request.
      index: of this answer among them.
      tokens: prompt and output; always the same list.
      pages: page i holds tokens [i * page_size, (i + 1) * page_size); 0, the null page, where they left the window.
      host_pages: while it is swapped out, the pages of the host that hold its KV.
      chain: what the prefix cache knows of its leading full pages: the root, then one entry a page.
      state_index: its entry of the sampler state, while it runs.
      stop_ids: token ids that may end it; set by the scheduler.
      mask_position: position of the token that can be sampled next as far as masks go: the one that a mask was made
        for; -1: none was made yet; `None`: it needs none. Whether it is `None` does not change once it was added.
      num_cached_tokens: prompt tokens found in the prefix cache when it first ran.
      guesser: guesses its next tokens; `None`: was never asked to.
      counters: the following, in this order; a list of its own, or a row of the `RunningTable` while it runs.
      num_tokens, num_computed_tokens, writable_end: as above.
      num_given_tokens: tokens that it had when it began to run. The last one of those after them was sampled into its
        entry of the sampler state, so the device knows it, whether it was read or not.
      limit: tokens at which it ends, prompt included; 0 while it is to be forked, and in a beam search, which decides
        that itself. Set by the scheduler.
      last_token_ns: when its last token was read, by the monotonic clock; 0: none was. Kept by the collector, as is
      watch: what the collector does with each of its tokens: nothing before its end, STREAM or HANDLE it.
      pages_version: another number, which no other sequence ever has, whenever an entry of `pages` is replaced, rather
        than added at the end.
      run: a number that no other run of any sequence has; 0 while it does not run.
    """

    __slots__ = (
        "chain",
        "counters",
        "finish_reason",
        "group",
        "guesser",
        "host_pages",
        "index",
        "mask_position",
        "num_cached_tokens",
        "pages",
        "state_index",
        "status",
        "stop_ids",
        "stop_reason",
        "tokens",
    )

    def __init__(
        self,
        group: "SequenceGroup",
        index: int = 0,
        *,
        tokens: Iterable[int] = (),
        stop_ids: frozenset[int] = frozenset(),
        **counters: int,
    ) -> None:
        self.group = group
        self.index = index
        self.tokens = list(tokens)
        self.pages: list[int] = []
        self.host_pages: list[int] = []
        self.chain: list[CachedPage] = []
        self.state_index: int | None = None
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.stop_ids = stop_ids
        self.mask_position: int | None = None
        self.num_cached_tokens = 0
        self.guesser: Guesser | None = None
        counters.setdefault("num_tokens", len(self.tokens))
        counters.setdefault("num_given_tokens", len(self.tokens))
        self.counters: list[int] | memoryview = [counters.pop(name, 0) for name in COUNTERS]
        if counters:
            raise TypeError(f"a Sequence has no {', '.join(counters)}")

    num_tokens: int = _counter(NUM_TOKENS)
    num_computed_tokens: int = _counter(NUM_COMPUTED)
    num_given_tokens: int = _counter(NUM_GIVEN)
    writable_end: int = _counter(WRITABLE_END)
    limit: int = _counter(LIMIT)
    last_token_ns: int = _counter(LAST_TOKEN_NS)
    watch: int = _counter(WATCH)
    pages_version: int = _counter(PAGES_VERSION)
    run: int = _counter(RUN)

    def __repr__(self) -> str:
        counters = " ".join(f"{name}={value}" for name, value in zip(COUNTERS, self.counters, strict=True))
        return (
            f"Sequence({self.request.request_id!r}, {self.index}, {self.status.value}, tokens={self.tokens}, "
            f"pages={self.pages}, state_index={self.state_index}, {counters})"
        )

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
    def num_logprobs(self) -> int:
        """The likeliest tokens wanted with each sampled one; 0: only its own log-probability; -1: not even that."""
        params, beam = self.group.request.params, self.group.beam
        if beam is not None:
            return beam.num_candidates
        if params.logprobs is None and params.num_sequences > params.n:
            return 0  # `best_of` ranks by them
        return -1 if params.logprobs is None else params.logprobs

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.group.request.prompt_token_ids)

    @property
    def num_pending(self) -> int:
        """Output tokens that steps in flight have sampled and the host has not read."""
        return self.num_tokens - len(self.tokens)

    def append(self, token: int) -> None:
        """Another token, which no step in flight has sampled."""
        self.tokens.append(token)
        self.counters[NUM_TOKENS] += 1

    def drop_pending(self) -> None:
        """What is in flight will not be read."""
        self.counters[NUM_TOKENS] = len(self.tokens)

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
        self.seqs = [Sequence(self, tokens=self.request.prompt_token_ids)]

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
