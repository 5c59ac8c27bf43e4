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


def sequence(hit_rate: float = 0.9, left: int = 100, lead: float = 0.0, **params) -> Sequence:
    """One that may get `left` tokens more."""
    group = SequenceGroup(Request(request_id="a", prompt_token_ids=(1, 2, 3, 1, 2), params=SamplingParams(**params)))
    (seq,) = group.seqs
    seq.limit = 5 + left
    seq.guesser = Guesser(2, 4)
    seq.guesser.hit_rate = hit_rate
    seq.guesser.lead = lead
    return seq


def counts(rule: Speculation, *seqs: Sequence, **options) -> list[int]:
    """All have a guess."""
    return rule.counts(seqs, range(len(seqs)), **options)


def leads(seqs) -> list[float]:
    return [seq.guesser.lead for seq in seqs]


def test_guesses_fill_a_shape_that_pays_best():
    assert counts(speculation(), sequence(0.99)) == [15]
    assert counts(speculation(token_cost=0.1), sequence(0.8)) == [7]
    assert counts(speculation(token_cost=10.0), sequence(0.99)) == []
    assert counts(speculation(num_tokens=5), sequence(0.99)) == [5]


@pytest.mark.parametrize(("hit_rate", "guesses"), [(0.1, False), (0.3, True), (0.0, False), (1.0, True)])
def test_a_row_guesses_only_if_it_gains_more_than_waiting_costs(hit_rate, guesses):
    assert bool(counts(speculation(), sequence(hit_rate))) == guesses


def test_no_row_waits_for_others_guesses_unless_it_is_ahead():
    rule = speculation()  # a step of 8 tokens takes 1.25 times as long as one of 2
    assert counts(rule, sequence(0.9), sequence(0.9))
    assert not counts(rule, sequence(0.9), sequence(0.0))
    assert not rule.counts([sequence(0.9), sequence(0.9)], [0])
    for lead, guesses in ((0.1, False), (0.5, True)):
        seqs = [sequence(0.9), sequence(0.0, lead=lead)]
        assert bool(rule.counts(seqs, [0])) == guesses
    assert not counts(rule, sequence(0.9, lead=-9.0), sequence(0.9))
    assert counts(rule, sequence(0.99, lead=-9.0), sequence(0.9))


def test_the_more_tokens_a_row_has_the_more_it_may_be_behind():
    rule = speculation()
    slow = sequence(0.0, left=1000)
    assert not rule.counts([sequence(0.9), slow], [0])
    slow.tokens += [7] * 100
    assert rule.counts([sequence(0.9), slow], [0])


def test_rows_get_first_what_they_need_and_then_what_is_worth_most():
    rule = speculation(token_cost=0.02)
    found = counts(rule, sequence(0.6), sequence(0.95), sequence(0.8), sequence(0.5))
    assert found[1] > found[2] > found[0] >= 1
    assert found[3] >= 1  # its guesses are worth less than others that are not made
    assert 4 + sum(found) in (8, 16, 32)
    equal = counts(speculation(num_tokens=4, token_cost=0.05), *(sequence(0.9) for _ in range(4)))
    assert sum(equal) == 12
    assert max(equal) - min(equal) <= 1


def test_nothing_is_guessed_beyond_the_last_token():
    assert counts(speculation(), sequence(0.99, left=4)) == [3]
    assert counts(speculation(), sequence(0.99, left=1)) == []
    assert counts(speculation(), sequence(0.99, left=4), sequence(0.99, left=1, lead=1.0)) == [3, 0]


def test_a_step_has_no_more_samples_than_its_shape():
    shapes = [StepShape(64, 16, 4)]
    rule = Speculation(SpeculationConfig(token_cost=0.0, wait_cost=0.0), shapes, "cpu")
    assert sum(counts(rule, *(sequence(0.99) for _ in range(10)))) == 6
    assert counts(rule, *(sequence(0.99) for _ in range(16))) == []


def test_a_step_that_was_read_says_how_far_ahead_each_row_is():
    rule, seqs = speculation(), [sequence(), sequence(lead=2.0)]
    rule.settle(seqs, [6, 0], [4, 1])
    ratio = (1.2 + 0.07) / 1.03  # of 8 tokens to 2, for which there is a shape of 4
    assert leads(seqs) == pytest.approx([4 - ratio, 3 - ratio])


def test_who_is_made_to_wait_is_behind_by_that():
    rule, seqs = speculation(), [sequence(), sequence(lead=2.0)]
    rule.wait(seqs)
    assert leads(seqs) == pytest.approx([1.0 - 1.23 / 1.03, 3.0 - 1.23 / 1.03])


def test_what_a_step_really_took_counts_as_soon_as_it_is_known():
    now = 0.0
    rule, seqs = Speculation(SpeculationConfig(), SHAPES, "gpu", clock=lambda: now), [sequence()]
    for _ in range(6):
        rule.begin(1, waits=False, num_steps=1)
        now += 1.0
    rule.begin(16, waits=True, num_steps=1)
    now += 99.0  # it does some things for the first time
    rule.begin(16, waits=True, num_steps=1)
    now += 2.5
    rule.settle(seqs, [15], [6])
    assert leads(seqs) == pytest.approx([6 - (1 + 0.003 * 15 + 0.5)])  # as expected
    rule.begin(16, waits=True, num_steps=1)
    assert leads(seqs) == pytest.approx([6 - 2.5])


def test_nobody_guesses_before_it_is_known_what_steps_take_without():
    now = 0.0
    rule = Speculation(SpeculationConfig(), SHAPES, "gpu", clock=lambda: now)
    assert not counts(rule, sequence(0.99))
    for _ in range(5):
        rule.begin(1, waits=False, num_steps=1)
        now += 1.0
    assert counts(rule, sequence(0.99))


def test_sequences_are_followed_that_have_a_guess():
    rule, fresh, other = speculation(), sequence(), sequence(frequency_penalty=0.5)
    fresh.guesser = other.guesser = None
    assert rule.follow([other, fresh]) == [1]
    assert other.guesser is not None  # it never has a guess, but may be behind
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
    assert Speculation(SpeculationConfig(), SHAPES, "gpu").costs.of(1, waits=True) == 1.5
    assert Speculation(SpeculationConfig(wait_cost=2), SHAPES, "abacus").costs.of(1, waits=True) == 3.0


def test_rows_stop_guessing_where_steps_take_longer_for_it_and_try_again_later():
    now = 0.0
    rule = Speculation(SpeculationConfig(), SHAPES, "gpu", clock=lambda: now)
    for _ in range(5):
        rule.begin(1, waits=False, num_steps=1)
        now += 1.0
    assert counts(rule, sequence(0.6))
    for _ in range(9):
        rule.begin(16, waits=True, num_steps=1)
        now += 3.0
    assert not counts(rule, sequence(0.6))  # two and a half tokens at most, in three times the time
    assert counts(rule, sequence(0.99))
    tried = next(count for count in range(1000) if counts(rule, sequence(0.6)))
    assert 20 < tried < 200


def test_guesses_that_are_never_right_are_not_made_because_steps_became_quicker():
    now = 0.0
    rule = Speculation(SpeculationConfig(), SHAPES, "gpu", clock=lambda: now)
    for waits, seconds in ((False, 3.0), (True, 1.0)):  # the other kind was last measured when they were slow
        for _ in range(9):
            rule.begin(16, waits=waits, num_steps=1)
            now += seconds
    assert not counts(rule, sequence(0.05, lead=-1.0))
    assert counts(rule, sequence(0.9))


def test_many_rows_rest_for_a_while_after_it_did_not_pay():
    rule = speculation()
    assert not rule.rests()
    assert counts(rule, *(sequence(0.0) for _ in range(12))) == []
    assert [rule.rests() for _ in range(4)] == [True, True, False, False]
    assert counts(rule, sequence(0.0)) == []
    assert not rule.rests()


def test_to_wait_for_a_step_in_flight_costs_once_more():
    rule = speculation(token_cost=0.0, wait_cost=0.5)
    assert counts(rule, sequence(0.4))
    assert not counts(rule, sequence(0.4), ahead=True)
    assert counts(rule, sequence(0.6), ahead=True)
