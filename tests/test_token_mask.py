"""Masks of one bit a token: packed, unpacked, held back."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jpaged.token_mask import hold_back, num_mask_words, pack_mask, unpack_mask

V = 70
TOKENS = st.sets(st.integers(0, V - 1))


@given(st.lists(st.integers(-5, V + 40)))
def test_a_mask_holds_the_tokens_of_the_vocabulary(tokens):
    mask = pack_mask(tokens, V)
    assert (mask.dtype, mask.shape) == (np.uint32, (num_mask_words(V),))
    assert unpack_mask(mask) == sorted({token for token in tokens if 0 <= token < V})


@given(TOKENS, TOKENS)
def test_what_is_held_back_comes_only_if_nothing_else_can(allowed, held):
    mask = pack_mask(allowed, V)
    hold_back(mask, pack_mask(held, V))
    assert set(unpack_mask(mask)) == (allowed - held or allowed)
