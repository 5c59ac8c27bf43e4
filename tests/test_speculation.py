"""Rows guess where it pays, as many tokens as pay best."""

import pytest

from jpaged.config import SpeculationConfig, StepShape
from jpaged.guesser import Guesser
from jpaged.request import Request, SamplingParams
from jpaged.sequence import Sequence, SequenceGroup
from jpaged.speculation import FIRST_COSTS, Speculation, may_guess
from jpaged.structured import StructuredOutput

SHAPES = [StepShape(size, min(size, 32), pages) for size in (1, 4, 8, 16, 32, 64) for pages in (4, 8)]


def speculation(**options) -> Speculation:
    options = {"token_cost": 0.01, "wait_cost": 0.2, "num_tokens": 15, **options}
    return Speculation(SpeculationConfig(**options), SHAPES, "cpu")


def sequence(hit_rate: float = 0.9, left: int = 100, **params) -> Sequence:
    """One that may get `left` tokens more."""
    group = SequenceGroup(Request(request_id="a", prompt_token_ids=(1, 2, 3, 1, 2), params=SamplingParams(**params)))
    (seq,) = group.seqs
    seq.limit = 5 + left
    seq.guesser = Guesser(2, 4)
    seq.guesser.hit_rate = hit_rate
    return seq


def test_guesses_fill_a_shape_that_pays_best():
    assert speculation().counts([sequence(0.99)], 1) == [15]
    assert speculation(token_cost=0.1).counts([sequence(0.8)], 1) == [7]
    assert speculation(token_cost=10.0).counts([sequence(0.99)], 1) == []
    assert speculation(num_tokens=5).counts([sequence(0.99)], 1) == [5]


@pytest.mark.parametrize(("hit_rate", "guesses"), [(0.1, False), (0.3, True), (0.0, False), (1.0, True)])
def test_a_row_guesses_only_if_it_gains_more_than_waiting_costs(hit_rate, guesses):
    assert bool(speculation().counts([sequence(hit_rate)], 1)) == guesses


def test_few_rows_of_many_do_not_make_the_others_wait():
    assert speculation().counts([sequence(0.9)], 1)
    assert not speculation().counts([sequence(0.9)], 2)
    assert not speculation().counts([sequence(0.9) for _ in range(5)], 8)
    assert not speculation().counts([sequence(0.5) for _ in range(8)], 8)
    assert speculation().counts([sequence(0.9) for _ in range(6)], 8)


def test_guesses_go_to_those_that_are_right_most():
    counts = speculation().counts([sequence(0.6), sequence(0.95), sequence(0.8)], 4)
    assert counts[1] > counts[2] > counts[0]
    assert 4 + sum(counts) in (8, 16, 32)
    equal = speculation(num_tokens=4).counts([sequence(0.9), sequence(0.9), sequence(0.9)], 4)
    assert sum(equal) in (4, 12)
    assert max(equal) - min(equal) <= 2


def test_nothing_is_guessed_beyond_the_last_token():
    assert speculation().counts([sequence(0.99, left=4)], 1) == [3]
    assert speculation().counts([sequence(0.99, left=1)], 1) == []
    assert speculation().counts([sequence(0.99, left=4), sequence(0.99, left=1)], 2) == [3, 0]


def test_a_step_has_no_more_samples_than_its_shape():
    shapes = [StepShape(64, 16, 4)]
    rule = Speculation(SpeculationConfig(token_cost=0.0, wait_cost=0.0), shapes, "cpu")
    assert sum(rule.counts([sequence(0.99) for _ in range(10)], 10)) == 6
    assert rule.counts([sequence(0.99) for _ in range(16)], 16) == []


def test_sequences_are_followed_that_have_a_guess():
    rule, fresh, other = speculation(), sequence(), sequence(frequency_penalty=0.5)
    fresh.guesser = other.guesser = None
    assert rule.follow([other, fresh]) == [1]
    assert other.guesser is None
    assert fresh.guesser is not None
    assert fresh.guesser.guess(fresh.tokens, 2) == [3, 1]
    nothing = sequence()
    nothing.guesser, nothing.tokens[:] = None, [1, 2, 3, 4, 5]
    assert rule.follow([other, nothing, fresh]) == [2]


@pytest.mark.parametrize(
    ("params", "guesses"),
    [
        ({}, True),
        ({"temperature": 0.7, "top_p": 0.9, "min_tokens": 3, "logit_bias": {1: 2.0}, "logprobs": 2, "n": 2}, True),
        ({"allowed_token_ids": [1, 2]}, True),
        ({"presence_penalty": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"structured": StructuredOutput(regex="a+")}, False),
    ],
)
def test_who_may_guess(params, guesses):
    assert may_guess(sequence(**params)) == guesses


def test_beams_do_not_guess():
    seq = sequence()
    seq.group.beam = object()  # type: ignore[assignment]
    assert not may_guess(seq)


def test_costs_are_expected_to_be_those_of_the_device_until_they_are_measured():
    assert {"cpu", "gpu", "tpu"} == FIRST_COSTS.keys()
    assert Speculation(SpeculationConfig(), SHAPES, "gpu").counts([sequence(0.99)], 1) == [15]
    assert not Speculation(SpeculationConfig(token_cost=100), SHAPES, "abacus").counts([sequence(0.99)], 1)


def test_rows_stop_guessing_where_steps_take_longer_for_it_and_try_again_later():
    now = 0.0
    rule = Speculation(SpeculationConfig(), SHAPES, "gpu", clock=lambda: now)
    for _ in range(5):
        rule.costs.begin(1)
        now += 1.0
    assert rule.counts([sequence(0.6)], 1)
    for _ in range(9):
        rule.costs.begin(16, waits=True)
        now += 3.0
    assert not rule.counts([sequence(0.6)], 1)  # two and a half tokens at most, in three times the time
    assert rule.counts([sequence(0.99)], 1)
    tried = next(count for count in range(1000) if rule.counts([sequence(0.6)], 1))
    assert 20 < tried < 200


def test_guesses_that_are_never_right_are_not_made_because_steps_became_quicker():
    now = 0.0
    rule = Speculation(SpeculationConfig(), SHAPES, "gpu", clock=lambda: now)
    for waits, seconds in ((False, 3.0), (True, 1.0)):  # the other kind was last measured when they were slow
        for _ in range(9):
            rule.costs.begin(16, waits=waits)
            now += seconds
    assert not rule.counts([sequence(0.05)], 1)
    assert rule.counts([sequence(0.9)], 1)


def test_many_rows_rest_for_a_while_after_it_did_not_pay():
    rule = speculation()
    assert not rule.rests()
    assert rule.counts([sequence(0.0)], 12) == []
    assert [rule.rests() for _ in range(4)] == [True, True, False, False]
    assert rule.counts([sequence(0.0)], 1) == []
    assert not rule.rests()


def test_to_wait_for_a_step_in_flight_costs_once_more():
    rule = speculation(token_cost=0.0, wait_cost=0.5)
    assert rule.counts([sequence(0.4)], 1)
    assert not rule.counts([sequence(0.4)], 1, ahead=True)
    assert rule.counts([sequence(0.6)], 1, ahead=True)
