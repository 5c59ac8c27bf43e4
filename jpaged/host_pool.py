"""`HostPool`: pages of host memory, and how sequences get there and back."""

from collections import Counter
from collections.abc import Iterable, Set

from jpaged.errors import OutOfPagesError
from jpaged.page_allocator import PageAllocator
from jpaged.pending_transfers import PendingTransfers
from jpaged.sequence import Sequence


class HostPool:
    """Moves the KV of sequences between the device's pages and those of the host; the moves are made by the next plan.

    Args:
      allocator: of the device's pages.
      host_allocator: of the host's pages.
      pending: where the moves are collected.
    """

    def __init__(self, allocator: PageAllocator, host_allocator: PageAllocator, pending: PendingTransfers) -> None:
        self._allocator = allocator
        self._host_allocator = host_allocator
        self._pending = pending

    def can_take(self, seqs: Iterable[Sequence], unwritten: Set[int]) -> bool:
        """Whether there is room for sequences, and all that they hold is there before the plan that is being made.

        Args:
          seqs: to be moved to the host.
          unwritten: pages that the step being planned writes, after pages are saved.
        """
        pages = {page for seq in seqs for page in self._computed(seq) if page}
        if self._pending.fills_any(pages) or not pages.isdisjoint(unwritten):
            return False
        return len(pages) <= self._host_allocator.num_available

    def take(self, seqs: list[Sequence]) -> None:
        """Gives sequences host pages to which theirs are saved, one for each that they hold or share.

        Raises:
          OutOfPagesError: there is too little room; nothing was changed.
        """
        holders = Counter(page for seq in seqs for page in self._computed(seq) if page)
        to_host = dict(zip(sorted(holders), self._host_allocator.allocate(len(holders)), strict=True))
        self._pending.swap_out(to_host.items())
        for page, count in holders.items():
            self._host_allocator.share([to_host[page]] * (count - 1))
        for seq in seqs:
            seq.host_pages = [to_host.get(page, 0) for page in self._computed(seq)]

    def num_pages_for(self, seqs: list[Sequence]) -> int:
        """Available pages of the device that sequences take when they are given back."""
        there = self._still_there(seqs)
        host_pages = {page for seq in seqs for page in seq.host_pages if page}
        return len(host_pages) - len(there) + sum(not self._allocator.ref_count(page) for page in set(there.values()))

    def give_back(self, seqs: list[Sequence]) -> None:
        """Gives sequences pages of the device again. They share what they shared, and with the prefix cache too.

        Raises:
          OutOfPagesError: there are too few pages; nothing was changed.
        """
        needed, available = self.num_pages_for(seqs), self._allocator.num_available
        if needed > available:
            raise OutOfPagesError(f"{needed} pages are needed to swap in, {available} available: free pages first")
        holders = Counter(page for seq in seqs for page in seq.host_pages if page)
        to_device = self._still_there(seqs)
        for host_page, page in to_device.items():
            self._allocator.share([page] * holders[host_page])
        moved = sorted(holders.keys() - to_device.keys())
        pages = self._allocator.allocate(len(moved))
        for host_page, page in zip(moved, pages, strict=True):
            self._allocator.share([page] * (holders[host_page] - 1))
            to_device[host_page] = page
        self._pending.swap_in(dict(zip(pages, moved, strict=True)), holders.elements())
        for seq in seqs:
            seq.pages = [to_device.get(page, 0) for page in seq.host_pages]
            seq.host_pages = []

    def drop(self, seq: Sequence) -> None:
        """Gives up what a sequence has on the host."""
        self._host_allocator.free([page for page in seq.host_pages if page])
        seq.host_pages = []

    def share(self, parent: Sequence, child: Sequence, num_pages: int) -> None:
        """Gives a sequence the first pages of another one that is on the host too."""
        child.host_pages = parent.host_pages[:num_pages]
        self._host_allocator.share([page for page in child.host_pages if page])

    def check_invariants(self, seqs: Iterable[Sequence]) -> None:
        """Checks that host pages are held by these sequences and by moves that are pending, and by nobody else.

        Raises:
          PageStateError: they are not.
        """
        holders = [[page for page in seq.host_pages if page] for seq in seqs]
        self._host_allocator.check_invariants([*holders, self._pending.host_sources])

    def _computed(self, seq: Sequence) -> list[int]:
        """The pages that hold KV, 0 for those that left the window."""
        return seq.pages[: self._allocator.pages_for(seq.num_computed_tokens)]

    def _still_there(self, seqs: Iterable[Sequence]) -> dict[int, int]:
        """Host page: page of the device that has the same, since the prefix cache kept it or was given it again."""
        return {
            host_page: entry.page
            for seq in seqs
            for host_page, entry in zip(seq.host_pages, seq.chain[1:], strict=False)
            if host_page and entry.attached and entry.page
        }
