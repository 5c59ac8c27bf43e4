"""`PendingTransfers`: what the device has to do with pages before the step that is being planned."""

from collections import Counter
from collections.abc import Iterable, Iterator, Set

from jpaged.page_allocator import PageAllocator
from jpaged.step_plan import PageTransfers

_NOTHING = PageTransfers()


class PendingTransfers:
    """Collects the transfers of a plan, and keeps what they read from being given out before they are made.

    All pages of one kind are read before any is written, kinds follow each other as in `PageTransfers`. So a copy of
    a copy is made of the first one's source.

    Args:
      allocator: of the device's pages.
      host_allocator: of the host's pages, if there are any.

    Example:
      >>> allocator = PageAllocator(num_pages=9, page_size=16)
      >>> pending = PendingTransfers(allocator)
      >>> source, copy = allocator.allocate(2)
      >>> pending.copy(pending.hold(source), copy)
      >>> allocator.ref_count(source), pending.take().copies, allocator.ref_count(source)
      (2, ((1, 2),), 1)
    """

    def __init__(self, allocator: PageAllocator, host_allocator: PageAllocator | None = None) -> None:
        self._allocator = allocator
        self._host_allocator = host_allocator
        self._swapped_out: list[tuple[int, int]] = []  # device page, host page
        self._swapped_in: dict[int, int] = {}  # device page: host page
        self._copies: dict[int, int] = {}  # copy: source
        self._sources: Counter[int] = Counter()  # of copies, each held once a copy
        self._host_sources: list[int] = []

    @property
    def sources(self) -> Iterator[int]:
        """Pages that are held, each as often as it is."""
        return self._sources.elements()

    @property
    def host_sources(self) -> list[int]:
        """Host pages that are held, each as often as it is."""
        return self._host_sources

    def num_held(self, page: int) -> int:
        """How often a page is held here."""
        return self._sources[page]

    def hold(self, page: int) -> int:
        """Holds the page that a copy of `page` is made of, which is its own source if it is such a copy itself."""
        source = self._copies.get(page, page)
        self._allocator.share([source])
        self._sources[source] += 1
        return source

    def copy(self, source: int, copy: int) -> None:
        """Copies a page that `hold` gave."""
        self._copies[copy] = source

    def swap_out(self, pages: Iterable[tuple[int, int]]) -> None:
        """Saves pages: (device page, host page). They are read first, so nothing need be held."""
        self._swapped_out += pages

    def swap_in(self, pages: dict[int, int], held: Iterable[int]) -> None:
        """Loads pages back.

        Args:
          pages: device page: host page.
          held: host pages, which the caller held and gives up, each as often as it did.
        """
        self._swapped_in |= pages
        self._host_sources += held

    def is_copy(self, page: int) -> bool:
        """Whether a page is still to be copied from another one."""
        return page in self._copies

    def fills_any(self, pages: Set[int]) -> bool:
        """Whether one of these pages is still to be copied or loaded."""
        return not (pages.isdisjoint(self._copies) and pages.isdisjoint(self._swapped_in))

    def drop_copies(self, pages: Iterable[int]) -> None:
        """Gives up the copies to those of these pages that nobody wants any more."""
        for page in self._copies.keys() & pages:
            if not self._allocator.ref_count(page) and not self._allocator.is_retained(page):
                source = self._copies.pop(page)
                self._sources[source] -= 1
                self._allocator.free([source])

    def take(self) -> PageTransfers:
        """What was collected, for the device; nothing is held or pending any more."""
        if not (self._copies or self._swapped_in or self._swapped_out or self._sources or self._host_sources):
            return _NOTHING
        swapped_in = tuple((host_page, page) for page, host_page in self._swapped_in.items())
        copies = tuple((source, copy) for copy, source in self._copies.items())
        transfers = PageTransfers(tuple(self._swapped_out), swapped_in, copies)
        if self._sources:
            self._allocator.free(list(self._sources.elements()))
        if self._host_sources and self._host_allocator is not None:
            self._host_allocator.free(self._host_sources)
        if any(transfers):
            self._swapped_out, self._swapped_in, self._copies = [], {}, {}
        self._sources.clear()
        self._host_sources = []
        return transfers
