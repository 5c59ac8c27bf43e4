"""`Guesser`: guesses the next tokens of one sequence, and counts how often it is right, be its guesses used or not."""

from collections.abc import Sequence
from typing import Final

from jpaged.prompt_lookup import PromptLookup, tokens_from

_FIRST_HIT_RATE: Final = 0.5
_WEIGHT: Final = 0.2  # of the last guess in the hit rate


class Guesser:
    """Follows one sequence. While its guesses come true, the next one is the token that follows in the same place.

    Args:
      shortest, longest: as for `PromptLookup`.

    Attributes:
      hit_rate: part of the guesses of one token that came true, the last ones counting most.
      lead: tokens that the sequence is ahead of where single steps would have brought it; below 0 it is behind.

    Example:
      >>> guesser = Guesser(shortest=2, longest=4)
      >>> guesser.follow([1, 2, 3, 4, 1, 2])
      >>> guesser.guess([1, 2, 3, 4, 1, 2], 2)
      [3, 4]
      >>> guesser.follow([1, 2, 3, 4, 1, 2, 3])
      >>> guesser.hit_rate
      0.6
    """

    __slots__ = ("_lookup", "_num_tokens", "_place", "hit_rate", "lead")

    def __init__(self, shortest: int, longest: int) -> None:
        self._lookup = PromptLookup(shortest, longest)
        self._num_tokens = 0
        self._place = 0  # of the token that comes next, by its guess; 0: it has none
        self.hit_rate = _FIRST_HIT_RATE
        self.lead = 0.0

    @property
    def has_guess(self) -> bool:
        return self._place > 0

    def follow(self, tokens: Sequence[int]) -> None:
        """Takes the tokens that are new, and judges by them.

        Args:
          tokens: of the sequence, all of them.
        """
        if len(tokens) == self._num_tokens:
            return
        place, beyond = self._place, 0
        for index in range(self._num_tokens, len(tokens)) if place else ():
            hit = tokens[place] == tokens[index]
            self.hit_rate += _WEIGHT * (hit - self.hit_rate)
            if not hit:
                place, beyond = 0, place + len(tokens) - index
                break
            place += 1
        self._num_tokens = len(tokens)
        self._lookup.extend(tokens)
        # Where one word took the place of another, the text may go on behind it.
        self._place = place or self._lookup.find(tokens) or beyond

    def guess(self, tokens: Sequence[int], count: int) -> list[int]:
        """The next `count` tokens, as far as that can be said: if `has_guess`. `tokens` as `follow` last had them."""
        return tokens_from(tokens, self._place, count)
