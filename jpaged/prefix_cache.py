"""`PrefixCache`: finds pages that already hold the KV of a prompt's beginning.

A page's KV depends on its tokens, on all tokens before them and on the weights. So cached pages form a tree: its roots
stand for what must be equal beside the tokens (`CacheKey`), and the path to an entry spells the tokens:

    root(salt, adapter, weights) ── "The quick b" ── "rown fox ju" ── "mps over th"     full pages
                                                └── "rown bea"                          a partly filled last page

An entry is looked up by a SHA-256 digest chained along the path, which other processes can compute too. The digest is
never trusted: a hit also needs the same parent entry and the same tokens, and a root the same key, so that not even an
injected collision can return foreign KV.

Which page goes first when pages are needed is the allocator's order; the cache only hears of it (`on_evict`).
"""

import hashlib
import itertools
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from jpaged.errors import PageStateError
from jpaged.page_allocator import PageAllocator

TOKEN_BYTES = 4
# So many of the newest entries that begin with the same token are looked at for a part of their tokens.
_MAX_PARTIAL_CANDIDATES = 16


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as 32-bit integers, the form in which the cache hashes and compares them.

    Example:
      >>> token_bytes([1, 258]).hex()
      '0100000002010000'
    """
    return array("i", tokens).tobytes()


@dataclass(frozen=True)
class CacheKey:
    """What must be equal, beside the tokens, for KV to be shared.

    Attributes:
      salt: of the tenant; `None` is a tenant too.
      adapter: name of the adapter that changes the weights.
      weight_version: grows with each change of the weights.
    """

    salt: str | None = None
    adapter: str | None = None
    weight_version: int = 0

    def encode(self) -> bytes:
        """The key spelled out; tagged and with lengths, so that no two keys spell the same."""
        parts = [b"jpaged prefix 1"]
        for tag, value in (("salt", self.salt), ("adapter", self.adapter), ("weights", str(self.weight_version))):
            text = b"" if value is None else value.encode("utf-8", "surrogatepass")
            parts.append(f"{tag}:{-1 if value is None else len(text)}:".encode() + text)
        return b"|".join(parts)


@dataclass(eq=False, slots=True)
class CachedPage:
    """An entry of the tree.

    Attributes:
      digest: chained SHA-256.
      parent: the entry before it; `None` for a root.
      tokens: its tokens (`token_bytes`), as many as the page holds, fewer if it is partly filled; of a root, its key.
      page: the page that holds their KV; `None` once it was evicted (its descendants may still be there).
      attached: it can be found from its root.
      num_children: attached entries after it.
      older, newer: its neighbours among the entries with the same parent and the same first token.
    """

    digest: bytes
    parent: "CachedPage | None" = field(repr=False)
    tokens: bytes
    page: int | None = None
    attached: bool = True
    num_children: int = 0
    older: "CachedPage | None" = field(default=None, repr=False)
    newer: "CachedPage | None" = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What the cache has of a prompt.

    Attributes:
      chain: the root, then an entry for each leading full page that hit.
      pages: the pages to share, one an entry; 0 where a page left the window and is not needed.
      partial_page: a page of whose tokens only the first are those of the prompt, to be copied; 0 if there is none.
      num_partial_tokens: how many.
      num_tokens: tokens that need not be computed, those of the partial page included.
    """

    chain: list[CachedPage]
    pages: list[int] = field(default_factory=list)
    partial_page: int = 0
    num_partial_tokens: int = 0
    num_tokens: int = 0


class PrefixCache:
    """The tree of cached pages.

    Args:
      allocator: of the pages; the cache becomes its `on_evict`.
      sliding_window: positions that the model sees at most, its own included; pages left of it need not be there for a
        hit. `None`: all.

    Example:
      >>> allocator = PageAllocator(num_pages=9, page_size=2)
      >>> cache = PrefixCache(allocator)
      >>> root, pages = cache.root(CacheKey()), allocator.allocate(2)
      >>> first = cache.insert(root, token_bytes([5, 6]), pages[0])
      >>> second = cache.insert(first, token_bytes([7, 8]), pages[1])
      >>> hit = cache.find(CacheKey(), token_bytes([5, 6, 7, 9]), max_tokens=3)
      >>> hit.pages, hit.partial_page, hit.num_tokens
      ([1], 2, 3)
    """

    def __init__(self, allocator: PageAllocator, *, sliding_window: int | None = None) -> None:
        self._allocator = allocator
        self._page_bytes = allocator.page_size * TOKEN_BYTES
        self._window = sliding_window
        self._roots: dict[bytes, CachedPage] = {}  # by their keys
        self._entries: dict[bytes, CachedPage] = {}  # by their digests
        self._newest: dict[bytes, CachedPage] = {}  # of entries that begin alike (`_start`)
        self._entry_of_page: dict[int, CachedPage] = {}
        self.num_evictions = 0
        allocator.on_evict = self._evicted

    @property
    def num_entries(self) -> int:
        """Entries that hold a page, held by sequences or not."""
        return len(self._entry_of_page)

    def root(self, key: CacheKey) -> CachedPage:
        """Where the pages of a key begin. It is kept from the first page on that is inserted after it."""
        spelled = key.encode()
        root = self._roots.get(spelled)
        return root or CachedPage(hashlib.sha256(spelled).digest(), None, spelled, attached=False)

    def find(self, key: CacheKey, tokens: bytes, *, max_tokens: int, unwritten: Set[int] = frozenset()) -> PrefixHit:
        """The longest beginning of a prompt that is cached; nothing is changed, and no page is held.

        Args:
          key: what must be equal beside the tokens.
          tokens: of the prompt (`token_bytes`).
          max_tokens: tokens of it that may hit; one less than the prompt's, since one must be computed to sample.
          unwritten: pages that the step being planned writes. They may be shared, since a step writes before it reads,
            but not copied.
        """
        size, width, window = self._allocator.page_size, self._page_bytes, self._window
        entries, sha256 = self._entries, hashlib.sha256
        parent = self.root(key)
        chain, best, present_from = [parent], 0, 0
        for start in range(0, max_tokens // size * width, width):
            chunk = tokens[start : start + width]
            entry = entries.get(sha256(parent.digest + chunk).digest())
            if entry is None or entry.parent is not parent or entry.tokens != chunk:
                break
            chain.append(entry)
            parent = entry
            if entry.page is None:
                if window is None:
                    break
                present_from = len(chain) - 1
            if window is None or present_from <= self._first_seen((len(chain) - 1) * size):
                best = len(chain) - 1
        del chain[best + 1 :]
        partial, length = self._best_partial(chain[-1], tokens[best * width : max_tokens * TOKEN_BYTES], unwritten)
        num_tokens = best * size + length
        first = self._first_seen(num_tokens)
        pages = [(entry.page or 0) if index >= first else 0 for index, entry in enumerate(chain[1:])]
        return PrefixHit(chain, pages, partial, length, num_tokens)

    def insert(self, parent: CachedPage, tokens: bytes, page: int) -> CachedPage:
        """Enters a page that holds, or will hold before anybody reads it, the KV of `tokens` after `parent`.

        If the same tokens are there already with a page, that one stays; `page` is then nobody's but its holder's.

        Args:
          parent: the entry before it. If it is detached, so is the new one, which can then not be found.
          tokens: of the page (`token_bytes`), at least one; fewer than a page holds if it is partly filled.
          page: in use.

        Returns:
          The entry of these tokens, which need not be the one of `page`.
        """
        if parent.parent is None and not parent.attached:
            parent.attached = self._roots.setdefault(parent.tokens, parent) is parent
        digest = hashlib.sha256(parent.digest + tokens).digest()
        entry = self._entries.get(digest)
        is_other = entry is not None and (entry.parent is not parent or entry.tokens != tokens)  # digests collide
        is_taken = page in self._entry_of_page  # by other tokens, if `entry` does not hold it
        if not parent.attached or is_other or (entry is None and is_taken):
            return CachedPage(digest, parent, tokens, attached=False)
        if entry is None:
            entry = self._entries[digest] = CachedPage(digest, parent, tokens)
            self._link(entry, parent)
        if entry.page is None and not is_taken:
            self._allocator.retain(page)
            entry.page = page
            self._entry_of_page[page] = entry
        return entry

    def insert_partial(self, parent: CachedPage, tokens: bytes, page: int) -> int:
        """Enters a partly filled page, unless another one holds the same tokens and perhaps more.

        Returns:
          The page that is found for these tokens; 0 if there is none.
        """
        best, length = self._best_partial(parent, tokens, frozenset())
        return best if length * TOKEN_BYTES >= len(tokens) else self.insert(parent, tokens, page).page or 0

    def reset(self) -> None:
        """Forgets everything. Pages that nobody holds are free at once."""
        for page in self._entry_of_page:
            self._allocator.forget(page)
        for entry in itertools.chain(self._entries.values(), self._roots.values()):
            entry.attached, entry.page, entry.num_children = False, None, 0
            entry.older = entry.newer = None
        for index in (self._roots, self._entries, self._newest, self._entry_of_page):
            index.clear()

    def check_invariants(self) -> None:
        """Checks that entries and pages point at each other, that each entry can be found, and leads to a page.

        Raises:
          PageStateError: they do not; the message names the page or the entry.
        """
        children: Counter[CachedPage] = Counter()
        for page, entry in self._entry_of_page.items():
            if entry.page != page or self._entries.get(entry.digest) is not entry:
                raise PageStateError(f"page {page} belongs to an entry of page {entry.page}, {entry.attached=}")
        for digest, entry in self._entries.items():
            parent, page = entry.parent, entry.page
            what = f"the entry {digest.hex()[:16]} of page {page}"
            if parent is None or not (entry.attached and parent.attached):
                raise PageStateError(f"{what} cannot be found from its root")
            if digest != hashlib.sha256(parent.digest + entry.tokens).digest():
                raise PageStateError(f"{what} has not the digest of its tokens")
            if page is None and not entry.num_children:
                raise PageStateError(f"{what} leads to no page")
            if page is not None and self._entry_of_page.get(page) is not entry:
                raise PageStateError(f"{what} is not the one of its page")
            if entry not in self._alike(parent, entry.tokens):
                raise PageStateError(f"{what} is not among those that begin alike")
            children[parent] += 1
        for entry in itertools.chain(self._entries.values(), self._roots.values()):
            if children[entry] != entry.num_children:
                raise PageStateError(f"an entry counts {entry.num_children} children, expected {children[entry]}")

    def _first_seen(self, num_tokens: int) -> int:
        """The first page that the token after `num_tokens` cached ones sees."""
        return 0 if self._window is None else max(num_tokens - self._window + 1, 0) // self._allocator.page_size

    def _best_partial(self, parent: CachedPage, tokens: bytes, unwritten: Set[int]) -> tuple[int, int]:
        """The page after `parent` that begins with most of `tokens`, and how many; (0, 0) if there is none."""
        best, most = 0, 0
        for entry in itertools.islice(self._alike(parent, tokens), _MAX_PARTIAL_CANDIDATES):
            if entry.page is not None and entry.page not in unwritten:
                length = _num_common_tokens(entry.tokens, tokens)
                if length > most:
                    best, most = entry.page, length
        return best, most

    def _alike(self, parent: CachedPage, tokens: bytes) -> Iterator[CachedPage]:
        """The entries after `parent` whose first token is that of `tokens`, the newest first."""
        entry = self._newest.get(_start(parent, tokens))
        while entry is not None:
            if entry.parent is parent:  # else digests collide
                yield entry
            entry = entry.older

    def _link(self, entry: CachedPage, parent: CachedPage) -> None:
        start = _start(parent, entry.tokens)
        older = entry.older = self._newest.get(start)
        if older is not None:
            older.newer = entry
        self._newest[start] = entry
        parent.num_children += 1

    def _unlink(self, entry: CachedPage, parent: CachedPage) -> None:
        older, newer = entry.older, entry.newer
        if older is not None:
            older.newer = newer
        if newer is not None:
            newer.older = older
        elif older is not None:
            self._newest[_start(parent, entry.tokens)] = older
        else:
            del self._newest[_start(parent, entry.tokens)]
        entry.older = entry.newer = None
        parent.num_children -= 1

    def _evicted(self, page: int) -> None:
        entry = self._entry_of_page.pop(page)
        entry.page = None
        self.num_evictions += 1
        # Entries that lead to no page are of no use.
        while entry.page is None and not entry.num_children:
            entry.attached, parent = False, entry.parent
            if parent is None:
                del self._roots[entry.tokens]
                return
            del self._entries[entry.digest]
            self._unlink(entry, parent)
            entry = parent


def _start(parent: CachedPage, tokens: bytes) -> bytes:
    """Under which entries that begin alike are kept."""
    return parent.digest + tokens[:TOKEN_BYTES]


def _num_common_tokens(a: bytes, b: bytes) -> int:
    """Tokens that two runs of them have in common from the start."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES  # [0, low) is equal, [0, high + 1) is not or does not exist
    while low < high:
        middle = (low + high + 1) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
