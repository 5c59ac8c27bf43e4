"""`MemoryManager`: the pages of sequences. `start`, `append`, `fork` and `release` are all that the scheduler needs.

    prompt ── start ──► pages found in the prefix cache, shared            others
       │                                                                     ▲ share
       └──── append ──► new pages; the last page copied first if it is ──────┘ (copy-on-write)
                                                     │
    forks ◄── fork ─── all pages shared              ├── swap_out ──► pages of the host ── swap_in ──► new pages
                                                     └── release ──► the prefix cache keeps what is full, and the tail

It never touches the device. What has to be done there before the next step runs is collected: pages to save on the
host, to load back, and to copy (`take_transfers`).
"""

from collections import Counter
from collections.abc import Iterable

from jpaged.errors import PageStateError
from jpaged.page_allocator import PageAllocator
from jpaged.prefix_cache import CacheKey, PrefixCache, PrefixHit, token_bytes
from jpaged.sequence import Sequence
from jpaged.step_plan import PageTransfers


class MemoryManager:
    """Gives sequences their pages.

    Args:
      allocator: of the device's pages.
      prefix_cache: `None`: pages are never found again.
      host_allocator: of the host's pages, for `swap_out`; `None`: there are none.
      sliding_window: positions that every layer of the model sees at most; pages left of it are given back. `None`:
        all.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        prefix_cache: PrefixCache | None = None,
        host_allocator: PageAllocator | None = None,
        sliding_window: int | None = None,
    ) -> None:
        self.allocator = allocator
        self.prefix_cache = prefix_cache
        self.host_allocator = host_allocator
        self.weight_version = 0
        self.sliding_window = sliding_window
        self._copies: list[tuple[int, int]] = []
        self._swapped_out: list[tuple[int, int]] = []
        self._swapped_in: list[tuple[int, int]] = []
        # Sources of copies must keep their contents until the copies are made, whatever else this plan gives out.
        self._copy_sources: Counter[int] = Counter()
        self._host_sources: list[int] = []
        self._pins: dict[str, list[int]] = {}
        self.num_copied_pages = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @classmethod
    def for_pool(
        cls,
        num_pages: int,
        page_size: int,
        *,
        prefix_cache: bool = True,
        num_host_pages: int = 0,
        sliding_window: int | None = None,
    ) -> "MemoryManager":
        """Makes one with its allocators and its prefix cache.

        Args:
          num_pages: pages in the pool, the null page included.
          page_size: token slots a page.
          prefix_cache: whether pages can be found again.
          num_host_pages: pages of host memory.
          sliding_window: as above.

        Example:
          >>> memory = MemoryManager.for_pool(9, 16)
          >>> memory.capacity
          8
        """
        allocator = PageAllocator(num_pages, page_size)
        return cls(
            allocator,
            prefix_cache=PrefixCache(allocator, sliding_window=sliding_window) if prefix_cache else None,
            host_allocator=PageAllocator(num_host_pages + 1, page_size) if num_host_pages else None,
            sliding_window=sliding_window,
        )

    # ------------------------------------------------------------------------------------------ sizes

    @property
    def capacity(self) -> int:
        """Pages that sequences can have: all but the null page and pinned ones."""
        return self.allocator.num_pages - 1 - self.num_pinned_pages

    @property
    def num_pinned_pages(self) -> int:
        return len({page for pages in self._pins.values() for page in pages})

    def pages_at_most(self, num_tokens: int, chunk: int) -> int:
        """Pages that a sequence of `num_tokens` holds at once at the most, if it is computed `chunk` tokens a step."""
        pages = self.allocator.pages_for(num_tokens)
        if self.sliding_window is None:
            return pages
        return min(pages, self.allocator.pages_for(self.sliding_window + chunk) + 1)

    # ------------------------------------------------------------------------------------------ a sequence's life

    def find(self, seq: Sequence) -> PrefixHit | None:
        """What the prefix cache has of a sequence that holds no pages; `None`: nothing, or it must not be used."""
        params = seq.request.params
        if self.prefix_cache is None or params.prompt_logprobs is not None:
            return None
        tokens = token_bytes(seq.tokens)
        return self.prefix_cache.find(self._key(seq), tokens, max_tokens=len(seq.tokens) - 1)

    def num_pages_taken(self, hit: PrefixHit | None, num_tokens: int, chunk: int) -> int:
        """Available pages that a sequence of `num_tokens` takes, given its hit."""
        if hit is None:
            return self.pages_at_most(num_tokens, chunk)
        shared = sum(1 for page in hit.pages if page)
        revived = sum(1 for page in hit.pages if page and not self.allocator.ref_count(page))
        new = self.allocator.pages_for(num_tokens) - len(hit.pages)
        return min(new, max(self.pages_at_most(num_tokens, chunk) - shared, 0)) + revived

    def start(self, seq: Sequence, hit: PrefixHit | None) -> None:
        """Gives a sequence without pages what the cache has of its prompt; it need not compute that."""
        if self.prefix_cache is None:
            return
        first_time = not seq.group.num_preemptions
        self.num_queried_tokens += len(seq.tokens) if first_time else 0
        if hit is None:
            seq.chain = [self.prefix_cache.root(self._key(seq))]
            return
        allocator, num_tokens = self.allocator, hit.num_tokens
        held = [page for page in hit.pages if page]
        allocator.share(held)
        seq.pages, seq.chain = list(hit.pages), hit.chain
        if hit.partial_page:
            # The source may be a cached page: held, so that it counts as used until it is copied.
            if allocator.num_available > (allocator.ref_count(hit.partial_page) == 0):
                self._hold_source(hit.partial_page)
                seq.pages += allocator.allocate(1)
                self._copies.append((hit.partial_page, seq.pages[-1]))
            else:
                num_tokens -= hit.num_partial_tokens
        seq.pages_version += 1
        seq.num_computed_tokens = num_tokens
        seq.writable_end = len(seq.pages) * allocator.page_size
        if first_time:
            self.num_hit_tokens += num_tokens
            seq.num_cached_tokens = min(num_tokens, seq.num_prompt_tokens)

    def append(self, seq: Sequence, num_tokens: int) -> bool:
        """Makes room for the next `num_tokens` tokens, which the sequence alone may write; all or nothing.

        A last page that others hold too is copied first; pages that left the window are given back.

        Returns:
          False if there are not enough pages; nothing has been taken then.
        """
        allocator, start = self.allocator, seq.num_computed_tokens
        if self.sliding_window is not None:
            self._trim(seq)
        last, filled = divmod(start, allocator.page_size)
        copies = filled > 0 and self._holders(seq.pages[last]) > 1
        needed = max(allocator.pages_for(start + num_tokens) - len(seq.pages), 0)
        if needed + copies > allocator.num_available:
            return False
        pages = allocator.allocate(needed + copies)
        if copies:
            source, copy = seq.pages[last], pages.pop(0)
            self._hold_source(source)
            self._copies.append((source, copy))
            allocator.free([source])
            seq.pages[last] = copy
            seq.pages_version += 1
        seq.pages += pages
        seq.writable_end = len(seq.pages) * allocator.page_size
        return True

    def commit(self, seq: Sequence) -> None:
        """Lets others find the full pages that are computed, by steps that ran or that are planned."""
        if self.prefix_cache is None or not seq.chain:
            return
        size, chain, pages = self.allocator.page_size, seq.chain, seq.pages
        end = min(seq.num_computed_tokens, len(seq.tokens)) // size
        if len(chain) > end:
            return
        # An entry may have lost its page, if that was another sequence's: then this one's is entered instead.
        first = len(chain) - 1
        while first > 0 and (not chain[first].attached or (chain[first].page is None and pages[first - 1])):
            first -= 1
        if first == 0:
            chain[0] = self.prefix_cache.root(self._key(seq))
        del chain[first + 1 :]
        tokens = token_bytes(seq.tokens[first * size : end * size])
        width = len(tokens) // (end - first)
        for index in range(first, end):
            if not pages[index]:
                break  # left the window before its tokens were known
            chunk = tokens[(index - first) * width : (index - first + 1) * width]
            chain.append(self.prefix_cache.insert(chain[-1], chunk, pages[index]))

    def fork(self, parent: Sequence, child: Sequence, *, num_tokens: int | None = None) -> None:
        """Gives a sequence without pages those of another one, up to `num_tokens` tokens (default: all computed ones).

        Both hold them from now on; whoever writes to a page that is not full copies it first.
        """
        size = self.allocator.page_size
        num_tokens = parent.num_computed_tokens if num_tokens is None else num_tokens
        child.pages = parent.pages[: self.allocator.pages_for(num_tokens)]
        self.allocator.share([page for page in child.pages if page])
        child.pages_version += 1
        child.chain = parent.chain[: num_tokens // size + 1]
        if self.host_allocator is not None:  # of two that are swapped out
            child.host_pages = list(parent.host_pages)
            self.host_allocator.share([page for page in child.host_pages if page])
        child.num_computed_tokens = num_tokens
        child.writable_end = num_tokens  # asks first
        parent.writable_end = min(parent.writable_end, parent.num_computed_tokens)

    def release(self, seq: Sequence) -> None:
        """Takes a sequence's pages back. The prefix cache keeps what others may want, until the pages are needed."""
        self.commit(seq)
        pages = [page for page in seq.pages if page]
        dropped = [copy for copy in self._copies if copy[1] in pages]  # for it, in this plan; not wanted any more
        size, end = self.allocator.page_size, min(seq.num_computed_tokens, len(seq.tokens))
        full, rest = divmod(end, size)
        if self.prefix_cache is not None and rest and len(seq.chain) == full + 1:
            page = seq.pages[full]
            if self._holders(page) == 1 and all(page != copy for _, copy in dropped):
                tail = token_bytes(seq.tokens[full * size : end])
                self.prefix_cache.insert_partial(seq.chain[-1], tail, page)
        self._copies = [copy for copy in self._copies if copy not in dropped]
        self.allocator.free(pages)
        seq.pages, seq.chain = [], []
        seq.pages_version += 1
        seq.num_computed_tokens = seq.writable_end = 0

    # ------------------------------------------------------------------------------------------ swapping

    def can_swap_out(self, seqs: Iterable[Sequence]) -> bool:
        """Whether the host has room for their pages."""
        if self.host_allocator is None:
            return False
        pages = {page for seq in seqs for page in seq.pages if page}
        awaited = {page for _, page in self._copies + self._swapped_in}  # filled after pages are saved
        return len(pages) <= self.host_allocator.num_available and not pages & awaited

    def swap_out(self, seqs: list[Sequence]) -> None:
        """Moves sequences to the host; pages that they share are moved once. Asks `can_swap_out` first.

        Raises:
          PageStateError: there is no host memory.
          OutOfPagesError: there is too little; nothing was changed.
        """
        if self.host_allocator is None:
            raise PageStateError("sequences cannot be swapped out: there are no host pages (CacheConfig.host_pages)")
        kept = [seq.pages[: self.allocator.pages_for(seq.num_computed_tokens)] for seq in seqs]
        holders = Counter(page for pages in kept for page in pages if page)
        to_host = dict(zip(sorted(holders), self.host_allocator.allocate(len(holders)), strict=True))
        self._swapped_out += to_host.items()
        for page, count in holders.items():
            self.host_allocator.share([to_host[page]] * (count - 1))
        for seq, pages in zip(seqs, kept, strict=True):
            seq.host_pages = [to_host.get(page, 0) for page in pages]
            num_computed, chain = seq.num_computed_tokens, seq.chain
            self.release(seq)
            seq.num_computed_tokens, seq.chain = num_computed, chain

    def num_host_pages(self, seqs: Iterable[Sequence]) -> int:
        """Pages that `swap_in` takes."""
        return len({page for seq in seqs for page in seq.host_pages if page})

    def swap_in(self, seqs: list[Sequence]) -> None:
        """Brings sequences back; they share what they shared.

        Raises:
          OutOfPagesError: there are too few pages; nothing was changed.
        """
        holders = Counter(page for seq in seqs for page in seq.host_pages if page)
        host_pages = sorted(holders)
        to_device = dict(zip(host_pages, self.allocator.allocate(len(host_pages)), strict=True))
        self._swapped_in += to_device.items()
        self._host_sources += holders.elements()
        for host_page, count in holders.items():
            self.allocator.share([to_device[host_page]] * (count - 1))
        for seq in seqs:
            seq.pages = [to_device.get(page, 0) for page in seq.host_pages]
            seq.host_pages = []
            seq.pages_version += 1
            seq.writable_end = seq.num_computed_tokens  # asks first: the last page may be shared

    def drop_host_pages(self, seq: Sequence) -> None:
        """Gives up what a swapped-out sequence has on the host."""
        pages = [page for page in seq.host_pages if page]
        if self.host_allocator is not None:
            self.host_allocator.free(pages)
        seq.host_pages = []
        seq.num_computed_tokens = 0

    # ------------------------------------------------------------------------------------------ pins and weights

    def pin(self, name: str, seq: Sequence) -> None:
        """Keeps the pages of a sequence beyond its end, under a name."""
        pages = [page for page in seq.pages if page]
        self.allocator.share(pages)
        self._pins[name] = pages

    def unpin(self, name: str) -> bool:
        """Lets pinned pages go; False if there are none of that name."""
        pages = self._pins.pop(name, None)
        if pages is None:
            return False
        self.allocator.free(pages)
        return True

    def weights_changed(self, seqs: Iterable[Sequence]) -> None:
        """From now on nothing that was computed before is found.

        Pins are dropped. Sequences that hold pages, here or on the host, mix both and are not found either.

        Args:
          seqs: these sequences.
        """
        self.weight_version += 1
        for name in list(self._pins):
            self.unpin(name)
        self.reset_prefix_cache(seqs)

    def reset_prefix_cache(self, seqs: Iterable[Sequence]) -> None:
        """Forgets everything; what `seqs`, all that hold pages, have so far will not be found either."""
        for seq in seqs:
            seq.chain = []
        if self.prefix_cache is not None:
            self.prefix_cache.reset()

    # ------------------------------------------------------------------------------------------ the device's part

    def start_plan(self) -> None:
        """A step is about to be planned; all steps before it have been handed to the device."""
        if self.prefix_cache is not None:
            self.prefix_cache.start_plan()

    def take_transfers(self) -> PageTransfers:
        """What the device must do before the step that is being planned: in the order of the fields."""
        transfers = PageTransfers(tuple(self._swapped_out), tuple(self._swapped_in), tuple(self._copies))
        if self._copy_sources:
            self.allocator.free(list(self._copy_sources.elements()))
            self._copy_sources.clear()
        if self._host_sources and self.host_allocator is not None:
            self.host_allocator.free(self._host_sources)
        self.num_copied_pages += len(self._copies)
        self._swapped_out, self._swapped_in, self._copies, self._host_sources = [], [], [], []
        return transfers

    def check_invariants(self, running: Iterable[Sequence], swapped: Iterable[Sequence] = ()) -> None:
        """Checks, between two plans, that all pages are accounted for.

        Raises:
          PageStateError: they are not.
        """
        holders = [[page for page in seq.pages if page] for seq in running]
        self.allocator.check_invariants([*holders, *self._pins.values(), self._copy_sources.elements()])
        if self.host_allocator is not None:
            holders = [[page for page in seq.host_pages if page] for seq in swapped]
            self.host_allocator.check_invariants([*holders, self._host_sources])
        if self.prefix_cache is not None:
            self.prefix_cache.check_invariants()

    def _key(self, seq: Sequence) -> CacheKey:
        return CacheKey(salt=seq.request.cache_salt, weight_version=self.weight_version)

    def _holders(self, page: int) -> int:
        """Sequences and pins that hold a page; copies that will be made of it do not count."""
        return self.allocator.ref_count(page) - self._copy_sources[page]

    def _hold_source(self, page: int) -> None:
        self.allocator.share([page])
        self._copy_sources[page] += 1

    def _trim(self, seq: Sequence) -> None:
        """Gives back the pages that no token at or after `num_computed_tokens` sees."""
        assert self.sliding_window is not None
        end = max(seq.num_computed_tokens - self.sliding_window + 1, 0) // self.allocator.page_size
        start = end
        while start > 0 and seq.pages[start - 1]:
            start -= 1
        if start < end:
            self.commit(seq)
            self.allocator.free(seq.pages[start:end])
            seq.pages[start:end] = [0] * (end - start)
            seq.pages_version += 1
