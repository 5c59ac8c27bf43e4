"""`PageAllocator`: which pages of the pool are free, which are kept for their contents, and who holds the others."""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from jpaged.errors import ConfigError, OutOfPagesError, PageStateError
from jpaged.metrics import PageLives


def pages_at_most(num_tokens: int, page_size: int, *, sliding_window: int | None, chunk: int) -> int:
    """Pages that a sequence holds at once at the most.

    Args:
      num_tokens: of the sequence.
      page_size: token slots a page.
      sliding_window: positions that the model sees at most; pages left of it are given back. `None`: all.
      chunk: tokens that are computed in one step at the most.

    Example:
      >>> pages_at_most(100, 8, sliding_window=None, chunk=16), pages_at_most(100, 8, sliding_window=20, chunk=16)
      (13, 6)
    """
    pages = -(-num_tokens // page_size)
    return pages if sliding_window is None else min(pages, -(-(sliding_window + chunk) // page_size) + 1)


class PageAllocator:
    """Hands out page ids and takes them back; it never touches the device. Each call costs O(1) a page.

    Each page of the pool is in exactly one state:
      page 0             the null page, target of all padding: never given out, never freed
      free               no holder, nothing worth keeping in it
      cached             no holder, but somebody may come back for its contents (`retain`)
      used               at least one holder; `share` adds one, `free` drops one

    Free pages are given out first, the one that was freed last before the others, which keeps the touched part of the
    pool small. When there is none left, the page that has been cached longest is evicted. A list of pages is freed from
    its end, so of two pages of one sequence the later one is evicted first: a prefix loses its leaves before its root.

    Args:
      num_pages: pages in the pool, the null page included.
      page_size: token slots a page.

    Attributes:
      num_pages, page_size: as above.
      on_evict: told of each cached page that is about to be given out for other contents, if somebody sets it.
      lives: of the pages, as histograms.

    Raises:
      ConfigError: fewer than two pages, or pages without slots.

    Example:
      >>> allocator = PageAllocator(num_pages=5, page_size=16)
      >>> pages = allocator.allocate(allocator.pages_for(40))
      >>> pages, allocator.num_free
      ([1, 2, 3], 1)
      >>> allocator.retain(2)
      >>> allocator.free(pages)
      >>> allocator.num_free, allocator.num_cached, allocator.num_used
      (3, 1, 0)
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ConfigError(f"num_pages is {num_pages}, expected at least 2 (page 0 is the null page)")
        if page_size < 1:
            raise ConfigError(f"page_size is {page_size}, expected at least 1")
        self.num_pages, self.page_size = num_pages, page_size
        self.on_evict: Callable[[int], None] | None = None
        self._free = list(range(num_pages - 1, 0, -1))  # the end is given out first, so a new pool counts up from 1
        self._cached: OrderedDict[int, None] = OrderedDict()  # the longest cached first
        self._ref_counts = [0] * num_pages
        self._retained = bytearray(num_pages)
        self.lives = PageLives(num_pages)

    @property
    def num_free(self) -> int:
        """Pages with no holder and no contents worth keeping."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and that are kept for their contents, until they are needed."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages with at least one holder; a shared page counts once, the null page does not count."""
        return self.num_pages - 1 - len(self._free) - len(self._cached)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.page_size)

    def ref_count(self, page: int) -> int:
        """Holders of a page; 0 for a free or cached page and for the null page.

        Raises:
          PageStateError: there is no such page.
        """
        if not 0 <= page < self.num_pages:
            raise PageStateError(f"page {page} is not in the pool, expected an id in [0, {self.num_pages})")
        return self._ref_counts[page]

    def states(self) -> bytes:
        """One byte a page: 0 free, 1 used by one holder, 2 by several, 3 cached, 4 the null page.

        Example:
          >>> allocator = PageAllocator(num_pages=4, page_size=16)
          >>> allocator.share(allocator.allocate(1))
          >>> list(allocator.states())
          [4, 2, 0, 0]
        """
        states = bytearray(map(min, self._ref_counts, itertools.repeat(2)))
        for page in self._cached:
            states[page] = 3
        states[0] = 4
        return bytes(states)

    def is_retained(self, page: int) -> bool:
        """Whether a page of the pool is kept for its contents, now or when its last holder frees it."""
        return bool(self._retained[page])

    def allocate(self, num_pages: int) -> list[int]:
        """Takes `num_pages` free or cached pages, all or none; the caller becomes their one holder.

        Raises:
          OutOfPagesError: fewer pages are available; nothing was taken.
        """
        if num_pages < 0:
            raise PageStateError(f"allocate got {num_pages} pages, expected at least 0")
        if num_pages > self.num_available:
            raise OutOfPagesError(
                f"{num_pages} pages asked for, {self.num_available} available of {self.num_pages - 1} "
                f"(pages of {self.page_size} tokens): free pages first, or enlarge the pool"
            )
        while len(self._free) < num_pages:
            self._evict()
        start = len(self._free) - num_pages
        pages = self._free[start:]
        del self._free[start:]
        pages.reverse()
        for page in pages:
            self._ref_counts[page] = 1
        self.lives.given_out(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds one holder to each page, used or cached, all or none.

        Raises:
          PageStateError: a page is free; the message names it and nothing was changed.
        """
        pages = tuple(pages)
        for page in pages:
            if not (0 < page < self.num_pages and self._retained[page]):
                self._require_references(page, 1, "shared")
        revived = []
        for page in pages:
            if self._ref_counts[page] == 0:
                del self._cached[page]
                revived.append(page)
            self._ref_counts[page] += 1
        self.lives.reused(revived)

    def free(self, pages: Sequence[int]) -> None:
        """Drops one holder of each page, all or none; a page without holders is free or, if retained, cached at once.

        Raises:
          PageStateError: a page was freed before, or never given out; the message names it and nothing was changed.
        """
        for page, drops in Counter(pages).items():
            self._require_references(page, drops, "freed")
        cached = []
        for page in reversed(pages):
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                if self._retained[page]:
                    self._cached[page] = None
                    cached.append(page)
                else:
                    self._free.append(page)
        self.lives.cached(cached)

    def retain(self, page: int) -> None:
        """Marks a used page: when its last holder frees it, it is cached instead of free.

        Raises:
          PageStateError: the page is not in use.
        """
        if page <= 0 or page >= self.num_pages or not self._ref_counts[page]:
            self._require_references(page, 1, "retained")
        self._retained[page] = 1

    def forget(self, page: int) -> None:
        """Takes `retain` back: a cached page is free at once. The page must be retained.

        Raises:
          PageStateError: it is not.
        """
        if not (0 < page < self.num_pages and self._retained[page]):
            raise PageStateError(f"page {page} cannot be forgotten: it is not retained")
        self._retained[page] = 0
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def check_invariants(self, holders: Iterable[Iterable[int]] | None = None) -> None:
        """Checks that free, cached, used pages and the null page are the whole pool, each page in one state.

        Args:
          holders: the page lists of all holders; if given, the reference counts must be exactly their sum.

        Raises:
          PageStateError: they are not; the message names the page.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            page = Counter(self._free).most_common(1)[0][0]
            raise PageStateError(f"page {page} is on the free list twice")
        if 0 in free or 0 in self._cached or self._ref_counts[0] != 0:
            raise PageStateError("page 0, the null page, is free, cached or in use, expected none of them")
        foreign = [page for page in (*free, *self._cached) if not 0 < page < self.num_pages]
        if foreign:
            raise PageStateError(f"page {foreign[0]} is free or cached, and is not in the pool")
        for page in range(1, self.num_pages):
            count, retained = self._ref_counts[page], bool(self._retained[page])
            where = (page in free, page in self._cached)
            if count < 0 or where != (count == 0 and not retained, count == 0 and retained):
                raise PageStateError(f"page {page} has {count} holders, {retained=} and (free, cached) is {where}")
        if holders is not None:
            held = Counter(page for pages in holders for page in pages)
            for page in range(self.num_pages):
                holding, count = held.pop(page, 0), self._ref_counts[page]
                if holding != count:
                    raise PageStateError(f"page {page} counts {count} holders, expected {holding}")
            if held:
                raise PageStateError(f"page {min(held)} is held, and is not in the pool")

    def _evict(self) -> None:
        page, _ = self._cached.popitem(last=False)
        self._retained[page] = 0
        self._free.append(page)
        self.lives.evicted(page)
        if self.on_evict is not None:
            self.on_evict(page)

    def _require_references(self, page: int, least: int, verb: str) -> None:
        if page == 0:
            raise PageStateError(f"page 0 cannot be {verb}: it is the null page, which nobody holds")
        if not 0 < page < self.num_pages:
            raise PageStateError(f"page {page} cannot be {verb}: expected an id in [1, {self.num_pages})")
        count = self._ref_counts[page]
        if count < least:
            raise PageStateError(f"page {page} cannot be {verb} {least}x: it has {count} holders; was it freed before?")
