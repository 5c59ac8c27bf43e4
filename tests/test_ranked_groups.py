"""Groups in the order of service."""

import random

import pytest

from jpaged.ranked_groups import RankedGroups
from jpaged.request import Request, SamplingParams
from jpaged.sequence import SequenceGroup


def make_groups(ranks) -> list[SequenceGroup]:
    groups = []
    for index, rank in enumerate(ranks):
        groups.append(
            SequenceGroup(Request(request_id=str(index), prompt_token_ids=(1,), params=SamplingParams()), rank=rank)
        )
    return groups


def test_any_order_of_adding_and_removing_keeps_them_sorted():
    rng = random.Random(0)
    groups = make_groups([(float(level), number) for level in (-1, 0, 2) for number in range(10)])
    ranked, inside = RankedGroups(), []
    for _ in range(300):
        group = rng.choice(groups)
        if group in inside:
            ranked.remove(group)
            inside.remove(group)
        else:
            ranked.add(group)
            inside.append(group)
        expected = sorted(inside, key=lambda group: group.rank)
        assert list(ranked) == expected
        assert len(ranked) == len(expected)
        assert [ranked[index] for index in range(len(ranked))] == expected


def test_those_after_a_group_come_last_first():
    groups = make_groups([(0.0, number) for number in range(4)])
    ranked = RankedGroups()
    for group in groups[::2]:
        ranked.add(group)
    assert list(ranked.after(groups[0])) == [groups[2]]
    assert list(ranked.after(groups[1])) == [groups[2]]  # which need not be in
    assert list(ranked.after(groups[2])) == []
    ranked.add(groups[3])
    assert list(ranked.after(groups[0])) == [groups[3], groups[2]]


@pytest.mark.parametrize("rank", [(0.0, 0), (0.0, 1), (9.0, 9)])
def test_a_group_that_is_not_in_cannot_be_removed(rank):
    inside, [outside] = make_groups([(0.0, 0), (1.0, 1)]), make_groups([rank])
    ranked = RankedGroups()
    for group in inside:
        ranked.add(group)
    with pytest.raises(ValueError, match="request '0' is not among the waiting ones"):
        ranked.remove(outside)
    assert list(ranked) == inside
