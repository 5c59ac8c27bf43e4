"""`Pins`: pages that are held by name, and pages that will be."""

from jpaged.page_allocator import PageAllocator


class Pins:
    """Holds pages under names until they are unpinned. Pages may be promised before they are there.

    Example:
      >>> allocator = PageAllocator(num_pages=9, page_size=16)
      >>> pins = Pins(allocator)
      >>> pins.promise("system prompt", num_pages=2)
      >>> pins.num_promised
      2
      >>> pages = allocator.allocate(2)
      >>> pins.keep_promise("system prompt", pages)
      >>> pins.num_promised, pins.num_pages, allocator.ref_count(pages[0])
      (0, 2, 2)
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._pages: dict[str, list[int]] = {}
        self._promised: dict[str, int] = {}

    @property
    def num_pages(self) -> int:
        """Pages that are pinned, those with several names counted once."""
        return len(self.pages)

    @property
    def num_promised(self) -> int:
        """Pages that will be pinned."""
        return sum(self._promised.values())

    @property
    def pages(self) -> set[int]:
        """Pages that are pinned."""
        return {page for pages in self._pages.values() for page in pages}

    @property
    def holders(self) -> list[list[int]]:
        """The pages of each name."""
        return list(self._pages.values())

    def promise(self, name: str, num_pages: int) -> None:
        """So many pages will be pinned."""
        self._promised[name] = num_pages

    def is_pinned(self, name: str) -> bool:
        """Whether a promise was kept, and its pages not let go since."""
        return name in self._pages

    def drop_promise(self, name: str) -> bool:
        """Ends a promise; False if there is none."""
        return self._promised.pop(name, None) is not None

    def keep_promise(self, name: str, pages: list[int]) -> None:
        """Pins pages, in the place of those that had this name; nothing is done if the promise was dropped."""
        if self.drop_promise(name):
            self._allocator.share(pages)
            self._allocator.free(self._pages.pop(name, []))
            self._pages[name] = pages

    def unpin(self, name: str) -> bool:
        """Lets pages go, or ends the promise; False if there is nothing of that name."""
        was_promised, pages = self.drop_promise(name), self._pages.pop(name, None)
        self._allocator.free(pages or [])
        return was_promised or pages is not None

    def unpin_all(self) -> None:
        """Lets all pages go; promises stay."""
        for pages in self._pages.values():
            self._allocator.free(pages)
        self._pages.clear()
