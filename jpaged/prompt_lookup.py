"""`PromptLookup`: guesses what a text goes on with by where its last tokens stood before, in the prompt or the output.

Who edits a text says most of it once more. So the tokens that came after the last few when those stood there before are
a good guess, and need no model. Places are found by a chain, as compressors of the LZ77 family find theirs:

    tokens      7  1  2  9  4  1  2  8  3  1  2      shortest match: 2 tokens, so the key is 1 2
    ends        .  .  .  3  .  .  .  7  .  .  . 11   where those two end
    before      .  .  .  0  .  .  .  3  .  .  .  7   the end before, of the same key; 0: there is none

Of the places that the chain leads to, the one is taken before which most tokens agree, and of those the latest.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

MAX_PLACES: Final = 16  # that are looked at: those of two common words may be hundreds
_FACTOR: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_MANY: Final = 64  # tokens that are sooner entered all at once than one by one


class PromptLookup:
    """What is known of the tokens of one sequence. Entering a token and looking for a match take constant time.

    Args:
      shortest: tokens that must agree at least.
      longest: tokens that are compared at most.

    Example:
      >>> lookup = PromptLookup(shortest=2, longest=4)
      >>> tokens = [7, 1, 2, 9, 4, 1, 2, 8, 3, 9, 4, 1, 2]
      >>> lookup.extend(tokens)
      >>> lookup.find(tokens)
      7
      >>> tokens_from(tokens, 7, 3)
      [8, 3, 9]

    Reference:
      Saxena, "Prompt Lookup Decoding", 2023 (https://github.com/apoorvumang/prompt-lookup-decoding).
    """

    __slots__ = ("_before", "_last", "_longest", "_shortest")

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._last: dict[int, int] = {}  # by key: where it ended last
        self._before = [0]  # by end

    def extend(self, tokens: Sequence[int]) -> None:
        """Enters the tokens that are new.

        Args:
          tokens: of the sequence, all of them; those that were entered before have not changed.
        """
        before, last, shortest, factor = self._before, self._last, self._shortest, _FACTOR
        if not last and len(tokens) >= max(_MANY, shortest):
            self._enter_all(tokens)
            return
        for end in range(len(before), len(tokens) + 1):
            key = 0
            for token in tokens[max(end - shortest, 0) : end]:
                key = (key * factor + token + 1) & _MASK
            before.append(last.get(key, 0) if end >= shortest else 0)
            if end >= shortest:
                last[key] = end

    def _enter_all(self, tokens: Sequence[int]) -> None:
        values, shortest = np.array(tokens, np.uint64) + np.uint64(1), self._shortest
        num_keys = len(tokens) - shortest + 1
        keys = np.zeros(num_keys, np.uint64)
        for offset in range(shortest):
            keys *= np.uint64(_FACTOR)
            keys += values[offset : offset + num_keys]
        order = np.argsort(keys, kind="stable")
        again = np.diff(keys[order]) == 0  # the key is that of the place before it in this order
        ends = order + shortest
        before = np.zeros(len(tokens) + 1, np.int64)
        before[ends[1:][again]] = ends[:-1][again]
        self._before = before.tolist()
        final = np.append(~again, True)
        self._last = dict(zip(keys[order[final]].tolist(), ends[final].tolist(), strict=True))

    def find(self, tokens: Sequence[int]) -> int:
        """Where the token stands that came after the last ones when they stood there before; 0: they never did.

        Args:
          tokens: as they were given to `extend`.
        """
        num_tokens, before, longest = len(tokens), self._before, self._longest
        best, most, end = 0, self._shortest - 1, before[-1]
        for _ in range(MAX_PLACES):
            if not end:
                break
            agree, limit = 0, min(longest, end)
            while agree < limit and tokens[end - 1 - agree] == tokens[num_tokens - 1 - agree]:
                agree += 1
            if agree > most:
                best, most = end, agree
                if agree == longest:
                    break
            end = before[end]
        return best


def tokens_from(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on; where they end, a text that repeats itself goes on to do so.

    Example:
      >>> tokens_from([4, 5, 6, 7], 2, 5)
      [6, 7, 6, 7, 6]
    """
    found = list(tokens[start : start + count])
    while len(found) < count:
        found += found[: count - len(found)]
    return found
