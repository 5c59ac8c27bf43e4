"""Which tokens of a vocabulary may come, one bit a token: bit i of word w is token 32 * w + i."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import UInt32

ALL_TOKENS = np.uint32(0xFFFFFFFF)


def num_mask_words(vocab_size: int) -> int:
    """Words of a mask.

    Example:
      >>> num_mask_words(64), num_mask_words(65)
      (2, 3)
    """
    return -(-vocab_size // 32)


def pack_mask(token_ids: Iterable[int], vocab_size: int) -> UInt32[np.ndarray, " W"]:
    """The mask that allows these tokens alone; ids outside [0, vocab_size) are left out.

    Example:
      >>> pack_mask([0, 3, 33, 99], vocab_size=40).tolist()
      [9, 2]
    """
    ids = np.array([token for token in token_ids if 0 <= token < vocab_size], np.int64)
    mask = np.zeros(num_mask_words(vocab_size), np.uint32)
    np.bitwise_or.at(mask, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return mask


def unpack_mask(mask: UInt32[np.ndarray, " W"]) -> list[int]:
    """The tokens that a mask allows, ascending.

    Example:
      >>> unpack_mask(np.array([9, 2], np.uint32))
      [0, 3, 33]
    """
    return np.nonzero(np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little"))[0].tolist()


def hold_back(mask: UInt32[np.ndarray, " W"], held: UInt32[np.ndarray, " W"]) -> None:
    """Takes tokens out of a mask, in place, unless it allows nothing else.

    Args:
      mask: what may come.
      held: what is to be taken out of it.

    Example:
      >>> mask = np.array([6], np.uint32)
      >>> hold_back(mask, np.array([2], np.uint32)), mask.tolist()
      (None, [4])
      >>> hold_back(mask, np.array([4], np.uint32)), mask.tolist()
      (None, [4])
    """
    rest = mask & ~held
    if rest.any():
        mask[:] = rest
