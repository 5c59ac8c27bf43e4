"""A budget allows so many restarts in any window of its length, no matter how they come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.errors import ConfigError
from jpaged.restarts import RestartBudget, RestartPolicy


@given(st.integers(0, 4), st.lists(st.floats(0, 30), max_size=40))
def test_no_window_has_more_than_allowed(most, gaps):
    now, taken = 0.0, []
    budget = RestartBudget(RestartPolicy(max_restarts=most, window_s=40), clock=lambda: now)
    for gap in gaps:
        now += gap
        recent = [moment for moment in taken if now - moment < 40]
        assert budget.take() == (len(recent) < most)
        if len(recent) < most:
            taken.append(now)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"max_restarts": True}, "max_restarts is True"),
        ({"window_s": 0}, "window_s is 0"),
        ({"window_s": float("inf")}, "window_s is inf"),
        ({"window_s": "a"}, "window_s is 'a'"),
    ],
)
def test_bad_policies_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        RestartPolicy(**changes)
