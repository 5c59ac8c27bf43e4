"""`BeamScores`: log-probabilities for beam searches without a model."""

import random
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from jpaged.sequence import Sequence

_VOCABULARY: Final = 32_000
_LEVELS: Final = 256
_LOW: Final = 1.0
_HIGH: Final = 4.0


@dataclass
class BeamScores:
    """What the likeliest next tokens of a beam might be.

    The token of rank r (from 1) has a probability proportional to r ** -s (Zipf). The exponent s is drawn anew for each
    step, evenly between 1, where the likeliest of 32,000 tokens has a probability of 9 %, and 4, where it has 92 %:
    some steps are all but certain, in others many tokens will do. The beams of a request say nearly the same thing, so
    they share the draw, but for a part of it (`own`) that each beam draws for itself. Nothing ends before its length.

    Args:
      num_candidates: tokens to give.
      own: 0, beams differ by the tokens that they took alone; 1, they have nothing in common.
      seed: same seed, same scores.
    """

    num_candidates: int
    own: float = 0.0
    seed: int = 0
    _rows: list[list[tuple[int, float]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        log_ranks = np.log(np.arange(1, _VOCABULARY + 1))
        self._rows = []
        for exponent in np.linspace(_LOW, _HIGH, _LEVELS):
            logprobs = -exponent * log_ranks
            logprobs -= np.log(np.exp(logprobs).sum())
            self._rows.append(list(enumerate(logprobs[: self.num_candidates].tolist())))
        self._random = random.Random(self.seed)

    def of(self, seq: Sequence) -> list[tuple[int, float]]:
        """(token, log-probability) of the likeliest tokens, best first."""
        step = seq.request.seed + len(seq.tokens)  # all tokens of all requests are numbered
        level = random.Random(step ^ self.seed << 40).random()
        if self.own:
            level += self.own * (self._random.random() - level)
        return self._rows[int(level * _LEVELS)]
