"""`PageAllocator`: which pages of the pool are free, and how many holders each of the others has."""

from collections import Counter
from collections.abc import Iterable, Sequence

from jpaged.errors import ConfigError, OutOfPagesError, PageStateError


class PageAllocator:
    """Hands out page ids and takes them back; it never touches the device.

    Each page of the pool is in exactly one state:
      page 0             the null page, target of all padding: never given out, never freed
      free               no holder, on the free list
      used               at least one holder; `share` adds one, `free` drops one, the last drop makes the page free

    The free list is a stack. A page that was freed last is given out first, which keeps the touched part of the pool
    small, and the order depends on nothing but the calls. No page has to leave the stack's middle: a cache of pages
    that no sequence holds is one more holder of them, and keeps their order of eviction itself.

    Args:
      num_pages: pages in the pool, the null page included.
      page_size: token slots a page.

    Raises:
      ConfigError: fewer than two pages, or pages without slots.

    Example:
      >>> allocator = PageAllocator(num_pages=5, page_size=16)
      >>> pages = allocator.allocate(allocator.pages_for(40))
      >>> pages, allocator.num_free
      ([1, 2, 3], 1)
      >>> allocator.free(pages)
      >>> allocator.num_used
      0
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ConfigError(f"num_pages is {num_pages}, expected at least 2 (page 0 is the null page)")
        if page_size < 1:
            raise ConfigError(f"page_size is {page_size}, expected at least 1")
        self._num_pages = num_pages
        self._page_size = page_size
        self._free = list(range(num_pages - 1, 0, -1))  # the end is given out first, so a new pool counts up from 1
        self._ref_counts = [0] * num_pages

    @property
    def num_pages(self) -> int:
        """Pages in the pool, the null page included."""
        return self._num_pages

    @property
    def page_size(self) -> int:
        """Token slots a page."""
        return self._page_size

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages with at least one holder; a shared page counts once, the null page does not count."""
        return self._num_pages - 1 - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self._page_size)

    def can_allocate(self, num_pages: int) -> bool:
        """Whether `allocate(num_pages)` would succeed now."""
        return num_pages <= len(self._free)

    def ref_count(self, page: int) -> int:
        """Holders of a page; 0 for a free page and for the null page.

        Raises:
          PageStateError: there is no such page.
        """
        if not 0 <= page < self._num_pages:
            raise PageStateError(f"page {page} is not in the pool, expected an id in [0, {self._num_pages})")
        return self._ref_counts[page]

    def allocate(self, num_pages: int) -> list[int]:
        """Takes `num_pages` free pages, all or none; the caller becomes their one holder.

        Raises:
          OutOfPagesError: fewer pages are free; nothing was taken.
        """
        if num_pages < 0:
            raise PageStateError(f"allocate got {num_pages} pages, expected at least 0")
        if num_pages > len(self._free):
            raise OutOfPagesError(
                f"{num_pages} pages asked for, {len(self._free)} free of {self._num_pages - 1} "
                f"(pages of {self._page_size} tokens): free pages first, or enlarge the pool"
            )
        start = len(self._free) - num_pages
        pages = self._free[start:]
        del self._free[start:]
        pages.reverse()
        for page in pages:
            self._ref_counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds one holder to each page, all or none.

        Raises:
          PageStateError: a page is not in use; the message names it and nothing was changed.
        """
        pages = tuple(pages)
        for page in pages:
            self._require_references(page, 1, "shared")
        for page in pages:
            self._ref_counts[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Drops one holder of each page, all or none; a page without holders is free at once.

        Raises:
          PageStateError: a page was freed before, or never given out; the message names it and nothing was changed.
        """
        for page, drops in Counter(pages).items():
            self._require_references(page, drops, "freed")
        # From the end, so that the first page of a sequence is the first to be given out again.
        for page in reversed(pages):
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                self._free.append(page)

    def check_invariants(self, holders: Iterable[Iterable[int]] | None = None) -> None:
        """Checks that free pages, used pages and the null page are the whole pool, each page in one state.

        Args:
          holders: the page lists of all holders; if given, the reference counts must be exactly their sum.

        Raises:
          PageStateError: they are not; the message names the page.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            page = Counter(self._free).most_common(1)[0][0]
            raise PageStateError(f"page {page} is on the free list twice")
        if 0 in free or self._ref_counts[0] != 0:
            raise PageStateError("page 0, the null page, is free or in use, expected neither")
        for page in range(1, self._num_pages):
            count = self._ref_counts[page]
            if (page in free) != (count == 0) or count < 0:
                where = "on" if page in free else "not on"
                raise PageStateError(f"page {page} has {count} holders and is {where} the free list")
        if holders is not None:
            held = Counter(page for pages in holders for page in pages)
            for page in range(self._num_pages):
                holding, count = held.pop(page, 0), self._ref_counts[page]
                if holding != count:
                    raise PageStateError(f"page {page} counts {count} holders, expected {holding}")
            if held:
                raise PageStateError(f"page {min(held)} is held, and is not in the pool")

    def _require_references(self, page: int, least: int, verb: str) -> None:
        if page == 0:
            raise PageStateError(f"page 0 cannot be {verb}: it is the null page, which nobody holds")
        if not 0 < page < self._num_pages:
            raise PageStateError(f"page {page} cannot be {verb}: expected an id in [1, {self._num_pages})")
        count = self._ref_counts[page]
        if count < least:
            raise PageStateError(f"page {page} cannot be {verb} {least}x: it has {count} holders; was it freed before?")
