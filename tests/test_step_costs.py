"""What steps take is measured where it says something, and not believed at once."""

import pytest

from jpaged.step_costs import StepCosts


class Steps:
    """Steps that take as long as they are told."""

    def __init__(self, **options) -> None:
        self.now = 0.0
        self.costs = StepCosts([1, 4, 16], clock=lambda: self.now, **{"token": 0.0, "wait": 0.0, **options})

    def run(self, num_tokens: int | None, seconds: float, times: int = 1, *, waits: bool = False) -> None:
        for _ in range(times):
            self.costs.begin(num_tokens, waits=waits)
            self.now += seconds

    def of(self, num_tokens: int, *, waits: bool = False) -> float:
        return self.costs.of(num_tokens, waits=waits)


def test_what_is_expected_holds_until_something_is_measured():
    steps = Steps(token=0.5, wait=0.25)
    assert [steps.of(size) for size in (1, 2, 4, 5, 99)] == [1.0, 2.5, 2.5, 8.5, 50.0]
    assert steps.of(4, waits=True) == 2.75


def test_costs_that_are_given_are_not_measured():
    steps = Steps(token=0.5, measures=False)
    steps.run(4, 7.0, times=9)
    assert steps.of(4) == 2.5


def test_steps_that_were_planned_ahead_count_once_the_device_holds_them_up():
    steps = Steps()
    steps.run(1, 0.1)  # the host alone
    steps.run(1, 2.0)
    steps.run(1, 2.0)
    assert steps.of(1) == 1.0  # the first one that counts did some things for the first time
    assert not steps.costs.knows_plain
    steps.run(1, 2.0, times=2)
    assert steps.of(1) == pytest.approx(2.0)
    assert steps.costs.knows_plain
    steps.run(1, 3.0)
    steps.run(1, 3.0)
    assert 2.0 < steps.of(1) < 3.0
    steps.run(1, 3.0, times=40)
    assert steps.of(1) == pytest.approx(3.0, rel=0.01)


def test_a_step_that_was_read_before_guesses_counts_as_such():
    steps = Steps()
    for _ in range(4):
        steps.run(4, 3.0)  # nothing was guessed; what it sampled had to be read
        steps.run(16, 6.0, waits=True)
    assert (steps.of(4, waits=True), steps.of(16, waits=True)) == (3.0, 6.0)
    assert steps.of(4) == 3.0  # nothing better is known


def test_of_several_steps_in_one_plan_each_counts():
    steps = Steps()
    for _ in range(6):
        steps.costs.begin(4, num_steps=5)
        steps.now += 10.0
    assert steps.of(4) == 2.0


def test_steps_that_are_read_at_once_are_counted_apart():
    steps = Steps()
    steps.run(1, 2.0, times=5)
    steps.run(4, 5.0, times=3, waits=True)
    assert steps.of(4, waits=True) == 5.0
    assert (steps.of(1), steps.of(4)) == (2.0, 2.0)
    assert steps.of(16, waits=True) == 5.0  # as the next size


def test_a_step_that_waited_for_its_caller_counts_little():
    steps = Steps()
    steps.run(1, 1.0, times=9)
    steps.run(1, 1000.0)
    steps.run(1, 1.0)
    assert 1.0 < steps.of(1) < 2.0


def test_what_a_step_took_is_told_if_it_was_said_to_wait():
    steps, told = Steps(), []
    for waits, seconds in ((False, 1.0), (False, 1.0), (True, 3.0), (True, 3.0), (True, 50.0), (False, 1.0)):
        told.append(steps.costs.begin(4, waits=waits))
        steps.now += seconds
    assert told == [None, None, None, None, 3.0, 3.0 * 3]  # an odd one counts three times at the most
    assert steps.costs.begin(4, waits=True) is None


def test_when_all_steps_become_slower_so_does_a_kind_that_has_none():
    steps = Steps()
    steps.run(4, 1.0, times=9)
    steps.run(16, 2.0, times=9, waits=True)
    assert (steps.of(4), steps.of(16, waits=True)) == pytest.approx((1.0, 2.0))
    steps.run(16, 6.0, times=20, waits=True)
    assert steps.of(16, waits=True) == pytest.approx(6.0, rel=0.05)
    assert steps.of(4) > 2.0


def test_what_steps_take_that_nobody_waits_for_is_measured_again_some_time():
    steps = Steps()
    steps.run(1, 1.0, times=5)
    steps.run(4, 2.0, times=60, waits=True)
    assert steps.costs.knows_plain
    steps.run(4, 2.0, times=10, waits=True)
    assert not steps.costs.knows_plain
    steps.run(1, 1.0, times=4)
    assert steps.costs.knows_plain


def test_what_lies_between_two_kinds_of_steps_is_not_counted():
    steps = Steps()
    steps.run(1, 1.0, times=5)
    for _ in range(5):
        steps.run(None, 50.0)  # a prompt, or nothing to do
        steps.run(1, 70.0)
        steps.run(1, 80.0)
        steps.run(4, 90.0, waits=True)
        steps.run(None, 10.0)
    assert steps.of(1) == 1.0


def test_doubt_gives_hope_until_waiting_is_measured_again():
    steps = Steps()
    steps.run(1, 1.0, times=5)
    steps.run(4, 3.0, times=3, waits=True)
    assert steps.costs.hope == 1.0
    for _ in range(100):
        steps.costs.doubt()
    assert 0.3 < steps.costs.hope < 0.4
    assert steps.of(4, waits=True) == 3.0
    steps.run(4, 3.0, times=2, waits=True)
    assert steps.costs.hope == 1.0
