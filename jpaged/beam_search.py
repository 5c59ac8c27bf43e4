"""`BeamSearch`: which beams of a request go on, which have ended, and when the search is over.

It sees tokens and log-probabilities alone. Running the model, and forking and freeing the pages of beams, is the
caller's part: each step it runs the beams that `advance` named and hands back their likeliest tokens.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jpaged.errors import RequestError


@dataclass(frozen=True)
class Hypothesis:
    """An output that has ended.

    Attributes:
      token_ids: its tokens, the ending stop token included.
      score: `cumulative_logprob` / (number of tokens, the stop token included) ** length_penalty.
      cumulative_logprob: sum of its tokens' log-probabilities (natural log).
      finish_reason: "stop" for a stop token, "length" for `max_tokens`; a stop token at `max_tokens` is a "stop".
      stop_token: the stop token that ended it.
    """

    token_ids: tuple[int, ...]
    score: float
    cumulative_logprob: float
    finish_reason: Literal["stop", "length"]
    stop_token: int | None = None


class _Beam(NamedTuple):
    token_ids: tuple[int, ...]
    cumulative_logprob: float


class BeamSearch:
    """Beam search over one prompt, as `generate(num_beams=...)` of Hugging Face transformers 5 does it.

    In a step all continuations of all beams are ranked by their cumulative log-probability:
      the first `width` of them  those that end (a stop token, or `max_tokens` reached) become hypotheses
      all                        the first `width` of those that do not end are the beams of the next step
    The `width` best hypotheses by score are kept. The search is over when no beam is left, which is so after
    `max_tokens` steps at the latest, or when `width` hypotheses are there and the best beam promises no more than the
    worst of them. What a beam promises is its score as if it ended now; with early_stopping "never" and a length
    penalty above 0, as if it had `max_tokens` tokens and lost nothing more. With early_stopping True the search ends as
    soon as `width` hypotheses are there.

    Among equals the earlier one goes first: the hypothesis found first, the continuation of the better beam, the token
    that was handed in first. (Transformers leaves that order to its sort, so equals may come in another order there.)

    It differs from transformers in two places. Continuations of probability 0 are never taken, so with a tiny
    vocabulary there may be fewer beams, and fewer hypotheses, than asked for, where transformers fills up with
    sequences whose score is -1e9. And scores are compared as they are, where transformers takes one below -1e9 (a
    strongly negative `length_penalty`) for none.

    Args:
      width: beams that run at once. With 1, and early_stopping True or False, it is greedy decoding.
      num_return: hypotheses asked for, at most `width`.
      length_penalty: power of the length that divides a cumulative log-probability; above 0 favours long outputs, 0
        leaves the lengths out.
      early_stopping: see above.
      stop_token_ids: tokens that end an output.
      max_tokens: output tokens at the most, a stop token included.
      min_tokens: output tokens that come before a stop token at the least.

    Raises:
      RequestError: an argument is out of range; the message names it.

    Reference:
      Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention, section 4.4,
      https://arxiv.org/abs/2309.06180; length penalty: https://arxiv.org/abs/1609.08144

    Example (two beams; token 0 ends an output):
      >>> search = BeamSearch(width=2, num_return=1, stop_token_ids=[0], max_tokens=8)
      >>> search.advance([[(5, -0.5), (6, -1.0), (0, -4.0)]])
      [(0, 5), (0, 6)]
      >>> search.advance([[(7, -2.0), (8, -3.0)], [(0, -0.25), (9, -2.5)]])
      [(0, 7), (0, 8)]
      >>> search.results()
      [Hypothesis(token_ids=(6, 0), score=-0.625, cumulative_logprob=-1.25, finish_reason='stop', stop_token=0)]
    """

    def __init__(
        self,
        *,
        width: int,
        num_return: int,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        stop_token_ids: Collection[int],
        max_tokens: int,
        min_tokens: int = 0,
    ) -> None:
        if width < 1:
            raise RequestError(f"the beam width is {width}, expected at least 1")
        if not 1 <= num_return <= width:
            raise RequestError(f"{num_return} hypotheses are asked for, expected 1 to the beam width ({width})")
        if not isinstance(early_stopping, bool) and early_stopping != "never":
            raise RequestError(f"early_stopping is {early_stopping!r}, expected True, False or 'never'")
        if max_tokens < 1:
            raise RequestError(f"max_tokens is {max_tokens}, expected at least 1 in beam search")
        if not 0 <= min_tokens <= max_tokens:
            raise RequestError(f"min_tokens is {min_tokens}, expected 0 to max_tokens ({max_tokens})")
        if not _fits(max_tokens, length_penalty):
            raise RequestError(
                f"length_penalty is {length_penalty}, expected a number whose power of max_tokens ({max_tokens}) fits "
                "into a float"
            )
        self._width = width
        self._num_return = num_return
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._stop_token_ids = frozenset(stop_token_ids)
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._num_tokens = 0  # output tokens of every beam
        self._beams = [_Beam((), 0.0)]  # those whose candidates the next call brings, best first
        self._hypotheses: list[Hypothesis] = []  # best first, at most `width`

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens that `advance` must be given of each beam; all, where the vocabulary has fewer.

        A beam has no more continuations that end than there are stop tokens, so at least `width` of these go on.
        """
        return max(2, 1 + len(self._stop_token_ids)) * self._width

    @property
    def finished(self) -> bool:
        """Whether the search is over."""
        return not self._beams

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, int]]:
        """Takes one step: extends the beams, keeps the outputs that end, and says which beams to run next.

        Args:
          candidates: for each beam that ran, in the order in which they were named, its `num_candidates` likeliest
            tokens as (token id, log-probability), best first. At the first call there is one beam, the prompt.

        Returns:
          The beams of the next step, best first, as (place of the beam that it extends among those that ran, token): at
          most `width`, and none when the search is over.

        Raises:
          ValueError: the search is over, the number of beams is another, or a log-probability is NaN or infinity.
        """
        if self.finished:
            raise ValueError("the search is over: read its results and make a new BeamSearch")
        if len(candidates) != len(self._beams):
            raise ValueError(f"got candidates of {len(candidates)} beams, expected those of {len(self._beams)}")
        self._num_tokens += 1
        ranked = self._rank(candidates)
        at_limit = self._num_tokens == self._max_tokens
        ended = [c for c in ranked[: self._width] if at_limit or c[2] in self._stop_token_ids]
        going = [] if at_limit else [c for c in ranked if c[2] not in self._stop_token_ids][: self._width]
        self._keep([self._hypothesis(*c) for c in ended])
        if not going or self._is_decided(best_logprob=going[0][0]):
            self._beams = []
            return []
        self._beams = [_Beam((*self._beams[parent].token_ids, token), total) for total, parent, token in going]
        return [(parent, token) for _, parent, token in going]

    def results(self) -> list[Hypothesis]:
        """The best `num_return` outputs that have ended so far, best first; fewer if there are not so many."""
        return self._hypotheses[: self._num_return]

    def _rank(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[float, int, int]]:
        """(cumulative log-probability, parent beam, token) of all continuations that may be taken, best first."""
        stops_banned = self._num_tokens <= self._min_tokens
        ranked = []
        for parent, (beam, row) in enumerate(zip(self._beams, candidates, strict=True)):
            for token, logprob in row:
                if not logprob < math.inf:  # rounding may leave one a little above 0
                    raise ValueError(f"the log-probability of token {token} after beam {parent} is {logprob}")
                if logprob == -math.inf or (stops_banned and token in self._stop_token_ids):
                    continue
                # This sum is exact to f64. Transformers rounds it to f32 at each step: there totals differ by up to
                # tokens * 2**-24 * |total|, some of them become equal, and beams so near to each other change places.
                ranked.append((beam.cumulative_logprob + logprob, parent, token))
        ranked.sort(key=lambda continuation: -continuation[0])  # stable: see the order of equals above
        return ranked

    def _hypothesis(self, total: float, parent: int, token: int) -> Hypothesis:
        stopped = token in self._stop_token_ids
        return Hypothesis(
            token_ids=(*self._beams[parent].token_ids, token),
            score=self._score(total, self._num_tokens),
            cumulative_logprob=total,
            finish_reason="stop" if stopped else "length",
            stop_token=token if stopped else None,
        )

    def _keep(self, ended: list[Hypothesis]) -> None:
        merged = sorted([*self._hypotheses, *ended], key=lambda hypothesis: -hypothesis.score)
        self._hypotheses = merged[: self._width]

    def _is_decided(self, best_logprob: float) -> bool:
        """Whether the hypotheses are settled though beams could go on; `best_logprob` is the best beam's total."""
        if len(self._hypotheses) < self._width:
            return False
        if self._early_stopping is True:
            return True
        far = self._early_stopping == "never" and self._length_penalty > 0
        promise = self._score(best_logprob, self._max_tokens if far else self._num_tokens)
        return promise <= self._hypotheses[-1].score

    def _score(self, total: float, num_tokens: int) -> float:
        return total / num_tokens**self._length_penalty


def _fits(max_tokens: int, length_penalty: float) -> bool:
    """Whether lengths up to `max_tokens` can be raised to that power and divided by."""
    try:
        return 0 < float(max_tokens) ** length_penalty < math.inf
    except OverflowError:
        return False
