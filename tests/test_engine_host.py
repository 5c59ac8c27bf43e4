"""What a process of the server's or of the engine's does for its own good."""

import gc

import pytest

from jpaged.engine_host import collect_seldom, freeze_objects


@pytest.fixture
def collector():
    """Python's garbage collector, left as all tests have it: with their thresholds, and what there is frozen."""
    thresholds = gc.get_threshold()
    yield gc
    gc.freeze()
    gc.set_threshold(*thresholds)


def test_what_is_there_when_serving_begins_is_not_looked_at_again(collector) -> None:
    there: list = []
    assert any(one is there for one in gc.get_objects())
    before = collector.get_freeze_count()
    freeze_objects()
    assert not any(one is there for one in gc.get_objects())
    assert collector.get_freeze_count() > before
    new: list = []
    assert any(one is new for one in gc.get_objects())


def test_collections_come_seldom_and_still_come(collector) -> None:
    collector.set_threshold(700, 11, 12)
    collect_seldom()
    assert collector.get_threshold() == (5000, 11, 12)
    assert collector.isenabled()
