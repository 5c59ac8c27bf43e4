"""`Drafts`: what rows of a step guess of their next tokens, and which guesses the step bears out.

A row whose sequence has n tokens computes the last one and its guesses, and samples after each of them:

    computes    t[n-1]   d1      d2      d3            guesses of the tokens at n, n + 1, n + 2
    samples     s1       s2      s3      s4            at the positions n, n + 1, n + 2, n + 3
                d1 = s1, d2 = s2, d3 != s3             so s1, s2 and s3 are its next tokens; s4 is of no use

A sampled token is a function of what stands before it, of the request's seed and of its position. As long as the
guesses agree with what was sampled, what stands before is what would have stood there without them. So whatever is
guessed, the tokens are those that single steps give.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

FAILED: Final = -1  # the logits were NaN
NO_TOKEN: Final = -2  # fills a row of sampled tokens after its last one


@dataclass(frozen=True, eq=False)
class Drafts:
    """The guesses of the rows of a step.

    The step samples once a row, in the order of its rows, and then once a guess, in the order of `tokens`.

    Attributes:
      counts: i64[S], how many each row has.
      tokens: i64[sum of counts], those of the first row that has any, those of the next, and so on.

    Example:
      >>> drafts = Drafts(np.array([0, 3]), np.array([7, 8, 9]))
      >>> drafts.verified(np.array([5, 7, 8, 6, 4])).tolist()
      [[5, -2, -2, -2], [7, 8, 6, -2]]

    Reference:
      Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023
      (https://arxiv.org/abs/2211.17192); here the guesses are certain, and the noise of a position is always the same,
      so that nothing need be drawn again.
    """

    counts: np.ndarray
    tokens: np.ndarray

    @cached_property
    def rows(self) -> np.ndarray:
        """i64[sum], the row of each guess."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def firsts(self) -> np.ndarray:
        """i64[S], where in `tokens` those of each row begin."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def places(self) -> np.ndarray:
        """i64[sum], which of its row's guesses each one is."""
        return np.arange(len(self.tokens)) - self.firsts[self.rows]

    def sample_of(self, row: int, place: int) -> int:
        """Which of the step's samples the row's token number `place` is."""
        return row if place == 0 else len(self.counts) + int(self.firsts[row]) + place - 1

    def verified(self, samples: np.ndarray) -> np.ndarray:
        """i64[S, 1 + the most guesses]: the next tokens of each row's sequence, then `NO_TOKEN`.

        Args:
          samples: integers, at least as many as rows and guesses together.
        """
        num_rows, num_guesses = len(self.counts), len(self.tokens)
        rows, places = self.rows, self.places
        guessed = np.full((num_rows, int(self.counts.max(initial=0))), NO_TOKEN)
        guessed[rows, places] = self.tokens
        sampled = np.full((num_rows, guessed.shape[1] + 1), NO_TOKEN)
        sampled[:, 0] = samples[:num_rows]
        sampled[rows, places + 1] = samples[num_rows : num_rows + num_guesses]
        agree = (guessed == sampled[:, :-1]) & (guessed != NO_TOKEN)
        sampled[:, 1:][~np.logical_and.accumulate(agree, axis=1)] = NO_TOKEN
        return sampled
