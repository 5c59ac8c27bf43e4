"""`Speculation`: which rows of a step guess, and how many tokens, so that it pays.

A guess is one more token to compute. Next to the weights, which a step reads once, that costs little, until there are
many. And a step with guesses is read before the next one is planned, so the device waits for the host. What both cost
is measured while steps run (`jpaged.step_costs`).

What a row gains is known as well, as it keeps count of how many of its guesses come true: with a hit rate of p the
first guess is worth p tokens, the next one p * p, and so on. Rows guess if the step then gives more tokens for its cost
than without; of the shapes that it may have the one is taken that gives most. Guesses fill up its tokens, those first
that are worth most.

So it costs a row nothing to find out whether guessing pays: guesses are judged in steps without them too.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from time import perf_counter
from typing import Final

from jpaged.config import SpeculationConfig, StepShape
from jpaged.guesser import Guesser
from jpaged.sequence import Sequence as RunningSequence
from jpaged.step_costs import StepCosts

_LEAST_GAIN: Final = 1.1  # for what is gained is an estimate
# Of several rows, who all wait, so many must gain by a hit rate of so much: else the others end later, and some of the
# gain is lost when those that gained have ended.
_MOST_ROWS: Final = 0.75
_SURE: Final = 0.55
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
                if not may_guess(seq):
                    continue
                guesser = seq.guesser = Guesser(self._config.shortest_match, self._config.longest_match)
            guesser.follow(seq.tokens)
            if guesser.has_guess:
                found.append(place)
        return found

    def counts(self, seqs: Sequence[RunningSequence], num_rows: int, *, ahead: bool = False) -> list[int]:
        """How many tokens each sequence should guess; none at all, if it does not pay.

        Args:
          seqs: those that have a guess.
          num_rows: rows of the step, one token each but for the guesses.
          ahead: a step is in flight, which would have to be read before, so the device waits twice.
        """
        sure = sum(seq.guesser is not None and seq.guesser.hit_rate >= _SURE for seq in seqs)
        if num_rows > 1 and sure < _MOST_ROWS * num_rows:
            self._num_resting = num_rows // _ROWS_A_REST
            return []
        ranked: list[tuple[float, int]] = []  # what each guess is worth, and whose it is
        for row, seq in enumerate(seqs):
            assert seq.guesser is not None
            hit_rate = worth = seq.guesser.hit_rate
            # A guess is of no use after the last token that a sequence may have.
            for _ in range(min(seq.limit - len(seq.tokens) - 1, self._config.num_tokens)):
                ranked.append((worth, row))
                worth *= hit_rate
        ranked.sort(reverse=True)
        counts = [0] * len(seqs)
        for _, row in ranked[: self._count([worth for worth, _ in ranked], num_rows, ahead=ahead)]:
            counts[row] += 1
        return counts if any(counts) else []

    def _count(self, ranked: list[float], num_rows: int, *, ahead: bool) -> int:
        """How many guesses, the best first, pay best."""
        if not ranked:
            return 0
        gains, costs = list(accumulate(ranked)), self.costs
        plain, choices = costs.of(num_rows, waits=False), dict[int, float]()
        for num_tokens, max_rows in self._sizes:
            count = min(min(num_tokens, max_rows) - num_rows, len(ranked))
            if count <= 0:
                continue
            choices[count] = costs.of(num_rows + count, waits=True)
            if ahead:
                choices[count] += max(choices[count] - costs.of(num_rows + count, waits=False), 0.0)
            if count == len(ranked):
                break
        # More tokens, and waiting, cannot take less time: if they seem to, steps have become quicker meanwhile.
        plain = min([plain, *choices.values()])
        best, best_rate = 0, _LEAST_GAIN * num_rows / plain
        for count, cost in choices.items():
            rate = (num_rows + gains[count - 1]) / cost
            if rate > best_rate:
                best, best_rate = count, rate
        if not best:
            costs.doubt()
            self._num_resting = num_rows // _ROWS_A_REST
        return best


def may_guess(seq: RunningSequence) -> bool:
    """Whether what a sequence samples depends on its tokens, their positions and its seed alone.

    Penalties depend on counts, which the device brings up to date once a step; masks of a form are made from token to
    token; the tokens of beams are chosen by the host.
    """
    params = seq.request.params
    return not params.uses_penalties and params.structured is None and seq.group.beam is None
