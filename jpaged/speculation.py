"""`Speculation`: which rows of a step guess, and how many tokens, so that no row is the slower for it.

A guess is one more token to compute. Next to the weights, which a step reads once, that costs little, until there are
many. And a step with guesses is read before the next one is planned, so the device waits for the host. Such a step
takes r times as long as one without; r is measured while steps run (`jpaged.step_costs`). It takes as long for all of
its rows, those included that guess nothing. So each row has an account, its *lead*:

    lead += tokens that the step gave to the row - r

which is how many tokens the row is ahead of where steps without guesses would have brought it. A step may have guesses
if afterwards, as far as can be expected, no row is further behind than `_SLACK` of the tokens that it has got. That is
the promise made to every request, kept by keeping its account. Of the shapes in which it is kept, the one is taken that
gives most tokens for its time, if that is more than without guesses.

What can be expected is known as well, as a row keeps count of how many of its guesses come true: with a hit rate of p
its first guess is worth p tokens, the next one p * p, and so on. Guesses fill up the tokens of the shape: first each
row gets those without which it would fall behind, then those come that are worth most.

So it costs a row nothing to find out whether guessing pays: guesses are judged in steps without them too.
"""

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Final

import numpy as np

from jpaged.config import SpeculationConfig, StepShape
from jpaged.guesser import Guesser
from jpaged.sequence import Sequence as RunningSequence
from jpaged.step_costs import StepCosts

_SLACK: Final = 0.01  # part of a row's tokens that it may be behind
_ROWS_A_REST: Final = 4  # of so many rows each, one plan is made without looking
# What is expected before it is measured: of each further token, and of waiting, as parts of a step of one token.
FIRST_COSTS: Final = {"cpu": (0.1, 0.05), "gpu": (0.003, 0.5), "tpu": (0.003, 0.5)}


class Speculation:
    """The rule of an engine.

    Args:
      config: of the engine.
      shapes: that its steps may have.
      platform: of the device, as jax calls it.
      clock: gives seconds.

    Attributes:
      max_rows: of a step in which any guesses.
      costs: of steps; told of those that only decode.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        shapes: Iterable[StepShape],
        platform: str,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._config = config
        self._num_resting = 0
        self._settled: tuple[list[Guesser], float, int] | None = None  # of the last step with guesses
        self.max_rows = config.max_rows
        self._sizes = sorted({(shape.num_tokens, shape.num_rows) for shape in shapes})
        token, wait = FIRST_COSTS.get(platform, FIRST_COSTS["gpu"])
        self.costs = StepCosts(
            (num_tokens for num_tokens, _ in self._sizes),
            token=token if config.token_cost is None else config.token_cost,
            wait=wait if config.wait_cost is None else config.wait_cost,
            measures=config.token_cost is None or config.wait_cost is None,
            clock=clock,
        )

    def rests(self) -> bool:
        """Whether nothing is to be looked up for this plan: with many rows, for a while after it did not pay."""
        self._num_resting -= self._num_resting > 0
        return self._num_resting > 0

    def follow(self, seqs: Sequence[RunningSequence]) -> list[int]:
        """Brings what is guessed of sequences up to date; places of those that have a guess."""
        found = []
        for place, seq in enumerate(seqs):
            guesser = seq.guesser
            if guesser is None:
                guesser = seq.guesser = Guesser(self._config.shortest_match, self._config.longest_match)
            if not may_guess(seq):
                continue
            guesser.follow(seq.tokens)
            if guesser.has_guess:
                found.append(place)
        return found

    def wait(self, seqs: Sequence[RunningSequence]) -> None:
        """A step in flight is read before the next one is planned, in which somebody may guess."""
        num_rows = len(seqs)
        _charge(_guessers(seqs), self._ratio(num_rows, num_rows) - 1.0)

    def settle(self, seqs: Sequence[RunningSequence], counts: Sequence[int], num_new: Sequence[int]) -> None:
        """A step with guesses was read.

        Args:
          seqs: of its rows.
          counts: how many tokens each of them guessed.
          num_new: how many it got.
        """
        num_rows = len(seqs)
        ratio = self._ratio(num_rows + sum(counts), num_rows)
        for seq, new in zip(seqs, num_new, strict=True):
            if seq.guesser is not None:
                seq.guesser.lead += new - ratio
        self._settled = _guessers(seqs), ratio, num_rows

    def begin(self, num_tokens: int | None, *, waits: bool, num_steps: int) -> None:
        """A step was planned; as `StepCosts.begin`. What the last one with guesses really took is known now."""
        settled, self._settled = self._settled, None
        cost = self.costs.begin(num_tokens, waits=waits, num_steps=num_steps)
        if settled is not None and cost is not None:
            guessers, ratio, num_rows = settled
            _charge(guessers, cost / self.costs.of(num_rows, waits=False) - ratio)

    def _ratio(self, num_tokens: int, num_rows: int) -> float:
        """What a step of so many tokens that is read at once takes, as a part of one of a token a row that is not."""
        # More tokens, and waiting, cannot take less time: if they seem to, steps have become quicker meanwhile.
        return max(self.costs.of(num_tokens, waits=True) / self.costs.of(num_rows, waits=False), 1.0)

    def counts(self, seqs: Sequence[RunningSequence], able: Sequence[int], *, ahead: bool = False) -> list[int]:
        """How many tokens each sequence should guess; none at all, if it does not pay.

        Args:
          seqs: of all rows of the step, which has one token of each but for the guesses.
          able: places of those that have a guess.
          ahead: a step is in flight, which would have to be read before, so the device waits twice.
        """
        if not able or not self.costs.knows_plain:
            return []
        num_rows = len(seqs)
        worths = np.zeros((num_rows, self._config.num_tokens))
        leads = np.zeros(num_rows)
        for row, seq in enumerate(seqs):
            if seq.guesser is not None:
                leads[row] = seq.guesser.lead + _SLACK * (len(seq.tokens) - seq.num_prompt_tokens)
        powers = np.arange(1, self._config.num_tokens + 1)
        for row in able:
            seq = seqs[row]
            assert seq.guesser is not None
            # A guess is of no use after the last token that a sequence may have.
            most = min(seq.limit - len(seq.tokens) - 1, self._config.num_tokens)
            worths[row, :most] = seq.guesser.hit_rate ** powers[:most]
        counts = self._best(worths, leads, ahead=ahead)
        if counts is None:
            self.costs.doubt()
            self._num_resting = num_rows // _ROWS_A_REST
            return []
        return counts

    def _best(self, worths: np.ndarray, leads: np.ndarray, *, ahead: bool) -> list[int] | None:
        num_rows, most = worths.shape
        gains = np.concatenate((np.zeros((num_rows, 1)), worths.cumsum(axis=1)), axis=1)
        useful, best, best_rate = int(np.count_nonzero(worths)), None, 1.0
        lost = self._ratio(num_rows, num_rows) - 1.0 if ahead else 0.0
        for num_tokens, max_rows in self._sizes:
            room = min(num_tokens, max_rows) - num_rows
            if room <= 0:
                continue
            count = min(room, useful)
            ratio = 1.0 + (self._ratio(num_rows + count, num_rows) - 1.0) * self.costs.hope + lost
            wanted = ratio - 1.0 - leads  # that guesses give to each row at the least
            enough = gains >= wanted[:, None]
            needs = enough.argmax(axis=1)
            if enough.any(axis=1).all() and (num_needed := int(needs.sum())) <= count:
                free = np.where(np.arange(most) < needs[:, None], 0.0, worths)
                counts = needs
                if count > num_needed:
                    order = np.argsort(-free, axis=None, kind="stable")[: count - num_needed]
                    counts = needs + np.bincount(order // most, minlength=num_rows)
                rate = (num_rows + gains[np.arange(num_rows), counts].sum()) / (num_rows * ratio)
                if rate > best_rate:
                    best, best_rate = counts, rate
            if count == useful:
                break
        return None if best is None or not best.any() else best.tolist()


def may_guess(seq: RunningSequence) -> bool:
    """Whether what a sequence samples depends on its tokens, their positions and its seed alone.

    Penalties depend on counts, which the device brings up to date once a step; masks of a form are made from token to
    token; the tokens of beams are chosen by the host.
    """
    params = seq.request.params
    return not params.uses_penalties and params.structured is None and seq.group.beam is None


def _guessers(seqs: Sequence[RunningSequence]) -> list[Guesser]:
    return [seq.guesser for seq in seqs if seq.guesser is not None]


def _charge(guessers: Sequence[Guesser], num_tokens: float) -> None:
    for guesser in guessers:
        guesser.lead -= num_tokens
