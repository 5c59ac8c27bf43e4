"""Jobs that are prepared in several processes and measured one after the other."""

import os

import pytest

from scripts.measuring import Failure, measure_all


def _square(x: int):
    if x == 1:
        raise ValueError("one")
    if x > 8:
        os._exit(3)
    return lambda: x * x


def test_jobs_are_measured_in_processes_and_failures_are_results() -> None:
    found = dict(measure_all(_square, [(0,), (1,), (2,), (3,)], processes=2))
    assert (found[0], found[2], found[3]) == (0, 4, 9)
    assert isinstance(found[1], Failure)
    assert "ValueError: one" in found[1].error


def test_a_process_that_dies_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="exit status 3"):
        list(measure_all(_square, [(9,)], processes=1))
