"""`RankedGroups`: sequence groups in the order of service."""

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from jpaged.sequence import SequenceGroup

_rank = attrgetter("rank")


class RankedGroups:
    """A list of groups, sorted by `rank`. Ranks are distinct and do not change while a group is in it.

    Example:
      >>> from jpaged.request import Request, SamplingParams
      >>> groups = [SequenceGroup(Request(request_id=name, prompt_token_ids=(1,), params=SamplingParams()))
      ...           for name in "ab"]
      >>> groups[0].rank, groups[1].rank = (0.0, 2), (0.0, 1)
      >>> ranked = RankedGroups()
      >>> for group in groups:
      ...     ranked.add(group)
      >>> [group.request.request_id for group in ranked]
      ['b', 'a']
    """

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []

    def add(self, group: SequenceGroup) -> None:
        """Puts a group in its place."""
        if not self._groups or self._groups[-1].rank < group.rank:
            self._groups.append(group)
        else:
            self._groups.insert(bisect_left(self._groups, group.rank, key=_rank), group)

    def remove(self, group: SequenceGroup) -> None:
        """Takes a group out; it must be in."""
        index = bisect_left(self._groups, group.rank, key=_rank)
        if index == len(self._groups) or self._groups[index] is not group:
            raise ValueError(f"request {group.request.request_id!r} is not among the {group.status.value} ones")
        del self._groups[index]

    def after(self, group: SequenceGroup) -> Iterator[SequenceGroup]:
        """The groups that come after a group, the last one first."""
        for index in range(len(self._groups) - 1, -1, -1):
            if self._groups[index].rank <= group.rank:
                return
            yield self._groups[index]

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> SequenceGroup:
        return self._groups[index]
