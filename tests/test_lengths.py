"""`Lengths`: what rows may hold, selection, and drawn lengths."""

import numpy as np
import pytest

from jpaged.errors import ConfigError
from jpaged.lengths import Lengths, fixed_lengths, log_normal_lengths


def turns() -> Lengths:
    """Two conversations of two turns each, with all columns."""
    return Lengths(
        source="turns",
        prompt_tokens=[10, 30, 8, 20],
        output_tokens=[5, 6, 7, 0],
        weights=[1, 2, 3, 4],
        arrival_s=[0, 1, 2, 3],
        hash_ids=((1,), (1, 2), (3,), (3, 4)),
        tokens_per_hash_id=16,
        conversation_ids=[0, 0, 1, 1],
    )


def test_means_are_weighted():
    lengths = turns()
    assert len(lengths) == 4
    assert lengths.total_tokens.tolist() == [15, 36, 15, 20]
    assert lengths.mean_prompt_tokens == (10 + 60 + 24 + 80) / 10
    assert lengths.mean_output_tokens == (5 + 12 + 21 + 0) / 10


def test_rows_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        turns().prompt_tokens[0] = 1


def test_a_selection_keeps_all_columns_in_step():
    lengths = turns().where(np.array([False, True, False, True]))
    assert lengths.prompt_tokens.tolist() == [30, 20]
    assert lengths.weights.tolist() == [2, 4]
    assert lengths.arrival_s.tolist() == [1, 3]
    assert lengths.hash_ids == ((1, 2), (3, 4))
    assert (lengths.tokens_per_hash_id, lengths.conversation_ids.tolist()) == (16, [0, 1])


@pytest.mark.parametrize(
    ("bounds", "prompts"),
    [
        ({}, [10, 30, 8, 20]),
        ({"first_turns": True}, [10, 8]),
        ({"max_prompt": 20}, [10, 8, 20]),
        ({"max_total": 15}, [10, 8]),
        ({"min_output": 6}, [30, 8]),
        ({"first_turns": True, "min_output": 6}, [8]),
    ],
)
def test_bounds_are_inclusive(bounds, prompts):
    assert turns().select(**bounds).prompt_tokens.tolist() == prompts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_tokens": [], "output_tokens": []}, "no requests"),
        ({"output_tokens": [1]}, r"output_tokens of x has shape \(1,\), prompt_tokens \(2,\)"),
        ({"prompt_tokens": [[1, 2]], "output_tokens": [[1, 2]]}, "one row a request"),
        ({"prompt_tokens": [0, 1]}, "prompt_tokens of x are 0 to 1, expected 1 to"),
        ({"output_tokens": [-1, 1]}, "output_tokens of x are -1 to 1, expected 0 to"),
        ({"prompt_tokens": [1, 10**9 + 1]}, "1000000001"),
        ({"prompt_tokens": [1, 2**70]}, "prompt_tokens of x are no numbers of 64 bits"),
        ({"prompt_tokens": [1, "x"]}, "prompt_tokens of x are no numbers"),
        ({"weights": [0.0, 1.0]}, "weights of x begin at 0.0"),
        ({"weights": [1.0, np.inf]}, "finite numbers above 0"),
        ({"hash_ids": ((1,), (2,))}, "hash_ids and tokens_per_hash_id"),
        ({"hash_ids": ((1,),), "tokens_per_hash_id": 16}, "1 lists of hash_ids for 2 requests"),
        ({"conversation_ids": [0]}, "conversation_ids of x"),
    ],
)
def test_rows_out_of_range_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        Lengths(**({"source": "x", "prompt_tokens": [1, 2], "output_tokens": [1, 2]} | changes))


def test_an_empty_selection_is_refused():
    with pytest.raises(ConfigError, match="none of the 4 requests of turns"):
        turns().select(max_total=3)
    with pytest.raises(ConfigError, match="fixed 5\\+6 knows no conversations"):
        fixed_lengths(5, 6).select(first_turns=True)


def test_log_normal_lengths_have_the_means_and_the_sigma_that_were_asked_for():
    lengths = log_normal_lengths(200, 400, sigma=0.5, count=20_000, seed=3)
    assert lengths.mean_prompt_tokens == pytest.approx(200, rel=0.02)
    assert lengths.mean_output_tokens == pytest.approx(400, rel=0.02)
    assert np.log(lengths.prompt_tokens).std() == pytest.approx(0.5, rel=0.02)
    assert abs(np.corrcoef(lengths.prompt_tokens, lengths.output_tokens)[0, 1]) < 0.03


def test_the_seed_decides_the_drawn_lengths():
    one, same, other = (log_normal_lengths(20, 60, count=50, seed=seed).prompt_tokens.tolist() for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert set(log_normal_lengths(20, 60, sigma=0, count=3).output_tokens.tolist()) == {60}
    assert log_normal_lengths(1, 1, sigma=3).prompt_tokens.min() == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_mean": 0.5}, "the mean of prompts of log-normal 0.5"),
        ({"output_mean": float("nan")}, "the mean of outputs"),
        ({"sigma": 4}, "sigma of .* is 4, expected 0 to 3"),
        ({"count": 0}, "count"),
        ({"seed": -1}, "seed"),
    ],
)
def test_drawing_refuses_what_is_out_of_range(changes, words):
    with pytest.raises(ConfigError, match=words):
        log_normal_lengths(**({"prompt_mean": 20, "output_mean": 60} | changes))
