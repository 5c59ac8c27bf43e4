"""Which guesses a step bears out."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jpaged.drafts import FAILED, NO_TOKEN, Drafts

ROWS = st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(FAILED, 2)), max_size=4), min_size=1, max_size=5)


@given(ROWS, st.data())
def test_tokens_go_to_the_first_guess_that_was_wrong(rows, data):
    """Each row: its guesses, each with what was sampled in its place."""
    last = [data.draw(st.integers(FAILED, 2)) for _ in rows]
    guesses = [[guess for guess, _ in row] for row in rows]
    samples = [[*(sample for _, sample in row), final] for row, final in zip(rows, last, strict=True)]
    drafts = Drafts(np.array([len(row) for row in rows]), np.array([g for row in guesses for g in row], np.int64))
    flat = [row[0] for row in samples] + [sample for row in samples for sample in row[1:]]
    found = drafts.verified(np.array([*flat, 77]))  # padding follows
    for row, guessed in enumerate(guesses):
        right = 0
        while right < len(guessed) and guessed[right] == samples[row][right]:
            right += 1
        expected = samples[row][: right + 1]
        assert found[row].tolist() == expected + [NO_TOKEN] * (found.shape[1] - len(expected))
        assert [flat[drafts.sample_of(row, place)] for place in range(len(samples[row]))] == samples[row]


def test_a_row_that_failed_has_no_more_tokens():
    drafts = Drafts(np.array([2, 0]), np.array([4, 5]))
    assert drafts.verified(np.array([4, 1, FAILED, 5])).tolist() == [[4, FAILED, NO_TOKEN], [1, NO_TOKEN, NO_TOKEN]]
