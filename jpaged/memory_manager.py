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

import itertools
from collections.abc import Iterable

from jpaged.errors import PageStateError
from jpaged.host_pool import HostPool
from jpaged.page_allocator import PageAllocator, pages_at_most
from jpaged.pending_transfers import PendingTransfers
from jpaged.pins import Pins
from jpaged.prefix_cache import CacheKey, PrefixCache, PrefixHit, token_bytes
from jpaged.prefix_chain import cut_chain, extend_chain, key_of
from jpaged.request import Request
from jpaged.sequence import WRITABLE_END, Sequence
from jpaged.step_plan import PageTransfers


class MemoryManager:
    """Gives sequences their pages.

    Args:
      allocator: of the device's pages.
      prefix_cache: `None`: pages are never found again.
      host_allocator: of the host's pages, for `swap_out`; `None`: there are none.
      sliding_window: positions that every layer of the model sees at most; pages left of it are given back. `None`:
        all.

    Attributes:
      pins: prefixes that are kept, by name.
      weight_version: how often the weights have changed.
      num_copied_pages: pages that were copied on the device, since others hold or may find them.
      num_queried_tokens, num_hit_tokens: of sequences that began, and those of them that were found in the cache.
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
        self.weight_version = 0
        self.sliding_window = sliding_window
        self._page_size = allocator.page_size
        self._pending = PendingTransfers(allocator, host_allocator)
        self._host = None if host_allocator is None else HostPool(allocator, host_allocator, self._pending)
        self.pins = Pins(allocator)
        self._unwritten: set[int] = set()  # pages that the step being planned writes
        self._versions = itertools.count(1)  # of the pages of sequences
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
        """Pages that sequences can have: all but the null page and those that are, or will be, pinned."""
        return self.allocator.num_pages - 1 - self.pins.num_pages - self.pins.num_promised

    def capacity_for(self, request: Request) -> int:
        """Pages that the sequences of a request can have: `capacity`, and the pinned ones that it shares to its end."""
        pinned, prompt = self.pins.pages, request.prompt_token_ids
        if not pinned or self.prefix_cache is None or request.params.prompt_logprobs is not None or self.sliding_window:
            return self.capacity
        hit = self.prefix_cache.find(self._key(request), token_bytes(prompt), max_tokens=len(prompt) - 1)
        return self.capacity + sum(page in pinned for page in hit.pages)

    def pages_at_most(self, num_tokens: int, chunk: int) -> int:
        """Pages that a sequence of `num_tokens` holds at once at the most, if it is computed `chunk` tokens a step."""
        size = self.allocator.page_size
        return pages_at_most(num_tokens, size, sliding_window=self.sliding_window, chunk=chunk)

    # ------------------------------------------------------------------------------------------ a sequence's life

    def find(self, seq: Sequence) -> PrefixHit | None:
        """What the prefix cache has of a sequence that holds no pages; `None`: nothing, or it must not be used."""
        params = seq.request.params
        if self.prefix_cache is None or params.prompt_logprobs is not None:
            return None
        tokens, most = token_bytes(seq.tokens), len(seq.tokens) - 1
        return self.prefix_cache.find(self._key(seq.request), tokens, max_tokens=most, unwritten=self._unwritten)

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
        seq.pages_version = next(self._versions)
        if self.prefix_cache is None:
            return
        first_time = not seq.group.num_preemptions
        self.num_queried_tokens += len(seq.tokens) if first_time else 0
        if hit is None:
            seq.chain = [self.prefix_cache.root(self._key(seq.request))]
            return
        allocator, num_tokens, partial = self.allocator, hit.num_tokens, hit.partial_page
        held = [page for page in hit.pages if page]
        allocator.share(held)
        seq.pages, seq.chain = list(hit.pages), hit.chain
        if partial:
            # The source may be a cached page: held, so that it counts as used until it is copied. In a small pool that
            # page may be the very one that the sequence needs: then its tokens are computed again.
            available = allocator.num_available - (allocator.ref_count(partial) == 0)
            if available >= allocator.pages_for(len(seq.tokens)) - len(seq.pages):
                source = self._pending.hold(partial)
                seq.pages += allocator.allocate(1)
                self._pending.copy(source, seq.pages[-1])
            else:
                num_tokens -= hit.num_partial_tokens
        seq.num_computed_tokens = num_tokens
        seq.writable_end = len(seq.pages) * allocator.page_size
        if first_time:
            self.num_hit_tokens += num_tokens
            seq.num_cached_tokens = min(num_tokens, seq.num_prompt_tokens)

    def append(self, seq: Sequence, num_tokens: int) -> bool:
        """Makes room for the next `num_tokens` tokens, which this step writes, on pages of the sequence alone.

        A last page that others hold, or may find, is copied first; pages that left the window are given back.

        Returns:
          False if there are not enough pages; none have been taken then.
        """
        allocator, start = self.allocator, seq.num_computed_tokens
        if self.sliding_window is not None:
            self._trim(seq)
        last, filled = divmod(start, allocator.page_size)
        copies = filled > 0 and (self._holders(seq.pages[last]) > 1 or allocator.is_retained(seq.pages[last]))
        needed = max(allocator.pages_for(start + num_tokens) - len(seq.pages), 0)
        if needed + copies > allocator.num_available:
            return False
        pages = allocator.allocate(needed + copies)
        if copies:
            source, copy = seq.pages[last], pages.pop(0)
            self._pending.copy(self._pending.hold(source), copy)
            allocator.free([source])
            seq.pages[last] = copy
            seq.pages_version = next(self._versions)
        seq.pages += pages
        self._unwritten.update(seq.pages[last:])
        seq.writable_end = len(seq.pages) * allocator.page_size
        return True

    def grow(self, seqs: list[Sequence]) -> None:
        """Gives each of these sequences, whose pages are full, another page: `commit` and `append`, for many at once.

        There are enough pages, and no window.
        """
        for seq in seqs:
            self.commit(seq)
        pages = self.allocator.allocate(len(seqs))
        for seq, page in zip(seqs, pages, strict=True):
            seq.pages.append(page)
            seq.counters[WRITABLE_END] += self._page_size
        self._unwritten.update(pages)

    def shrink(self, seq: Sequence) -> None:
        """Takes back the last pages of a sequence that hold none of its computed tokens, which have become fewer."""
        end = self.allocator.pages_for(seq.num_computed_tokens)
        if end < len(seq.pages):
            self.allocator.free(seq.pages[end:])
            del seq.pages[end:]
            seq.pages_version = next(self._versions)  # another page will stand there
            seq.writable_end = end * self._page_size

    def commit(self, seq: Sequence) -> None:
        """Lets others find the full pages that are computed, by steps that ran or that are planned.

        What the step being planned computes must have been given room by `append`.
        """
        if self.prefix_cache is not None and seq.chain:
            extend_chain(self.prefix_cache, seq, self._page_size, self.weight_version)

    def fork(self, parent: Sequence, child: Sequence, *, num_tokens: int | None = None) -> None:
        """Gives a sequence without pages those of another one, up to `num_tokens` tokens (default: all computed ones).

        Both hold them from now on; whoever writes to a page that is not full copies it first.
        """
        size = self.allocator.page_size
        num_tokens = parent.num_computed_tokens if num_tokens is None else num_tokens
        child.pages = parent.pages[: self.allocator.pages_for(num_tokens)]
        self.allocator.share([page for page in child.pages if page])
        child.pages_version = next(self._versions)
        child.chain = parent.chain[: num_tokens // size + 1]
        if self._host is not None:
            self._host.share(parent, child, self.allocator.pages_for(num_tokens))
        child.num_computed_tokens = num_tokens
        child.writable_end = num_tokens  # asks first
        parent.writable_end = min(parent.writable_end, parent.num_computed_tokens)

    def release(self, seq: Sequence) -> None:
        """Takes a sequence's pages back. The prefix cache keeps what others may want, until the pages are needed."""
        cut_chain(seq)
        self.commit(seq)
        size, end = self.allocator.page_size, min(seq.num_computed_tokens, len(seq.tokens))
        full, rest = divmod(end, size)
        if self.prefix_cache is not None and rest and len(seq.chain) == full + 1:
            page = seq.pages[full]
            # Others that hold it may write to it.
            if self._holders(page) == 1 and not self._pending.is_copy(page):
                self.prefix_cache.insert_partial(seq.chain[-1], token_bytes(seq.tokens[full * size : end]), page)
        pages = [page for page in seq.pages if page]
        self.allocator.free(pages)
        self._pending.drop_copies(pages)
        seq.pages, seq.chain = [], []
        seq.pages_version = next(self._versions)
        seq.num_computed_tokens = seq.writable_end = 0

    # ------------------------------------------------------------------------------------------ swapping

    def can_swap_out(self, seqs: Iterable[Sequence]) -> bool:
        """Whether the host has room for their pages, and nothing that they hold is filled by the plan being made."""
        return self._host is not None and self._host.can_take(seqs, self._unwritten)

    def swap_out(self, seqs: list[Sequence]) -> None:
        """Moves sequences to the host; pages that they share are moved once. Asks `can_swap_out` first.

        Raises:
          PageStateError: there is no host memory.
          OutOfPagesError: there is too little; nothing was changed.
        """
        if self._host is None:
            raise PageStateError("sequences cannot be swapped out: there are no host pages (CacheConfig.host_pages)")
        self._host.take(seqs)
        for seq in seqs:
            num_computed, chain = seq.num_computed_tokens, seq.chain
            self.release(seq)
            seq.num_computed_tokens, seq.chain = num_computed, chain

    def num_host_pages(self, seqs: Iterable[Sequence]) -> int:
        """Available pages that `swap_in` takes."""
        return 0 if self._host is None else self._host.num_pages_for(list(seqs))

    def swap_in(self, seqs: list[Sequence]) -> None:
        """Brings sequences back; they share what they shared, and what the prefix cache still has is not moved.

        Raises:
          PageStateError: there is no host memory.
          OutOfPagesError: there are too few pages; nothing was changed.
        """
        if self._host is None:
            raise PageStateError("sequences cannot be swapped in: there are no host pages (CacheConfig.host_pages)")
        self._host.give_back(seqs)
        for seq in seqs:
            seq.pages_version = next(self._versions)
            seq.writable_end = seq.num_computed_tokens  # asks first: the last page may be shared

    def drop_host_pages(self, seq: Sequence) -> None:
        """Gives up what a swapped-out sequence has on the host."""
        if self._host is not None:
            self._host.drop(seq)
        seq.chain = []
        seq.num_computed_tokens = 0

    # ------------------------------------------------------------------------------------------ pins and weights

    def promise_pin(self, name: str, num_tokens: int) -> None:
        """So many tokens will be pinned: nobody else may count on their pages (`capacity`)."""
        self.pins.promise(name, self.allocator.pages_for(num_tokens))

    def pin(self, name: str, seq: Sequence) -> None:
        """Keeps a promise: pages with the KV of a sequence's tokens stay beyond its end, until `unpin`.

        Those are pinned that the prefix cache finds for these tokens; they need not be the sequence's own. Nothing is
        pinned if the promise was taken back, or if the sequence's pages must not be found (`weights_changed`).
        """
        if self.prefix_cache is None or not seq.chain:
            self.pins.drop_promise(name)
            return
        self.commit(seq)
        pages = [entry.page for entry, own in zip(seq.chain[1:], seq.pages, strict=False) if own]
        full, rest = divmod(seq.num_computed_tokens, self.allocator.page_size)
        if rest and len(seq.chain) == full + 1:
            tail = token_bytes(seq.tokens[-rest:])
            pages.append(self.prefix_cache.insert_partial(seq.chain[-1], tail, seq.pages[full]))
        self.pins.keep_promise(name, [page for page in pages if page])

    def weights_changed(self, seqs: Iterable[Sequence]) -> None:
        """From now on nothing that was computed before is found; pins are dropped.

        `seqs`, all that hold pages, here or on the host, mix both and are not found either.
        """
        self.weight_version += 1
        self.reset_prefix_cache(seqs)

    def reset_prefix_cache(self, seqs: Iterable[Sequence]) -> None:
        """Forgets everything, pins too; what `seqs`, all that hold pages, have so far will not be found either."""
        self.pins.unpin_all()
        for seq in seqs:
            seq.chain = []
        if self.prefix_cache is not None:
            self.prefix_cache.reset()

    # ------------------------------------------------------------------------------------------ the device's part

    def start_plan(self) -> None:
        """A step is about to be planned; all steps before it have been handed to the device."""
        self._unwritten.clear()

    def take_transfers(self) -> PageTransfers:
        """What the device must do before the step that is being planned: in the order of the fields."""
        transfers = self._pending.take()
        self.num_copied_pages += len(transfers.copies)
        return transfers

    def check_invariants(self, running: Iterable[Sequence], swapped: Iterable[Sequence] = ()) -> None:
        """Checks, between two plans, that all pages are accounted for.

        Raises:
          PageStateError: they are not.
        """
        holders = [[page for page in seq.pages if page] for seq in running]
        self.allocator.check_invariants([*holders, *self.pins.holders, self._pending.sources])
        if self._host is not None:
            self._host.check_invariants(swapped)
        if self.prefix_cache is not None:
            self.prefix_cache.check_invariants()

    def _key(self, request: Request) -> CacheKey:
        return key_of(request, self.weight_version)

    def _holders(self, page: int) -> int:
        """Sequences and pins that hold a page; copies that will be made of it do not count."""
        return self.allocator.ref_count(page) - self._pending.num_held(page)

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
            seq.pages_version = next(self._versions)
