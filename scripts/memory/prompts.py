"""`Prompts`: token ids for the requests of a trace, which says how long they are, and perhaps what is equal."""

from dataclasses import dataclass

import numpy as np

from jpaged.lengths import Lengths

_IDS = 1 << 31  # token ids are non-negative 32-bit integers


@dataclass(frozen=True)
class Prompts:
    """Token ids.

        a request of its own           bases[i], bases[i] + 1, ...: no token stands in two requests
        a turn of a conversation       likewise, with the base of the conversation: it begins with what was said before
        a request with hash ids        `block` for each id, the last one cut to the length of the prompt

    Args:
      lengths: the requests.
      num_sequences: answers to each request; all have tokens of their own.
      reuse: conversations are told apart; without, each turn stands alone.
    """

    lengths: Lengths
    num_sequences: int = 1
    reuse: bool = True

    def bases(self) -> np.ndarray:
        """The first token of each request, i64[n]; an answer's token at position p is this + p + index * max_tokens."""
        needed = self.lengths.prompt_tokens + self.num_sequences * np.maximum(self.lengths.output_tokens, 1)
        ids = self.lengths.conversation_ids
        if ids is None or not self.reuse:
            bases = np.cumsum(needed) - needed
        else:
            most = np.zeros(ids.max() + 1, np.int64)
            np.maximum.at(most, ids, needed)
            bases = (np.cumsum(most) - most)[ids]
        if bases[-1] + needed[-1] >= _IDS - 1:
            raise ValueError(f"{len(self.lengths)} requests have more tokens than there are token ids; take fewer")
        return bases

    def prompt(self, index: int, base: int) -> tuple[int, ...]:
        """The prompt of a request."""
        num_tokens = int(self.lengths.prompt_tokens[index])
        if self.lengths.hash_ids is None or not self.reuse:
            return tuple(range(base, base + num_tokens))
        return tuple(self.hashed(index).tolist())

    def hashed(self, index: int) -> np.ndarray:
        """The prompt of a request with hash ids, i32[prompt tokens]."""
        assert self.lengths.hash_ids is not None
        assert self.lengths.tokens_per_hash_id is not None
        ids, size = self.lengths.hash_ids[index], self.lengths.tokens_per_hash_id
        return blocks(ids, size)[: int(self.lengths.prompt_tokens[index])]


def blocks(hash_ids: tuple[int, ...], num_tokens: int) -> np.ndarray:
    """`num_tokens` pseudo-random token ids for each hash id, i32[ids * num_tokens]; two ids have none in one place.

    Example:
      >>> a, b = blocks((7,), 4), blocks((7, 8), 4)
      >>> bool((a == b[:4]).all()), bool((a == b[4:]).any())
      (True, False)
    """
    # XOR of a fixed random row with a number of the id that no other id (below 2**31) has.
    row = np.random.default_rng(0).integers(0, _IDS, num_tokens, dtype=np.int64)
    numbers = np.array(hash_ids, np.int64) * 0x2545F491 % _IDS
    return (row[None, :] ^ numbers[:, None]).astype(np.int32).ravel()
