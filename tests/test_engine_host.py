"""What a process of the server's or of the engine's does for its own good."""

import gc

import pytest

from jpaged.engine_host import freeze_objects


@pytest.fixture
def collector():
    """Python's garbage collector, which is left as it was."""
    thresholds = gc.get_threshold()
    yield gc
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_what_is_there_when_serving_begins_is_not_looked_at_again(collector) -> None:
    before = collector.get_threshold()
    there = [object(), []]
    freeze_objects()
    assert any(one is there for one in gc.get_objects()) is False
    assert collector.get_freeze_count() > 1000
    # What a thousand requests hold while they wait is looked at seldom, and what goes away is found all the same.
    assert collector.get_threshold()[0] > before[0] > 0
    assert collector.isenabled()
    new: list = []
    assert any(one is new for one in gc.get_objects())
