"""What a process of the server's or of the engine's does for its own good."""

import gc

import pytest

from jpaged.engine_host import collect_seldom, freeze_objects


@pytest.fixture
def collector():
    """Python's garbage collector, which is left as it was."""
    thresholds = gc.get_threshold()
    yield gc
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_what_is_there_when_serving_begins_is_not_looked_at_again(collector) -> None:
    there: list = []
    freeze_objects()
    assert not any(one is there for one in gc.get_objects())
    assert collector.get_freeze_count() > 1000
    new: list = []
    assert any(one is new for one in gc.get_objects())


def test_collections_come_seldom_and_still_come(collector) -> None:
    before = collector.get_threshold()
    collect_seldom()
    young, *older = collector.get_threshold()
    assert young > before[0] > 0
    assert older == [*before[1:]]
    assert collector.isenabled()
