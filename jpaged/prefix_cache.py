"""`PrefixCache`: finds pages that already hold the KV of a prompt's beginning.

A page's KV depends on its tokens, on all tokens before them and on the weights. So cached pages form a tree: its roots
stand for what must be equal beside the tokens (`CacheKey`), and the path to an entry spells the tokens:

    root(salt, adapter, weights) ── "The quick b" ── "rown fox ju" ── "mps over th"     full pages
                                                └── "rown bea"                          a partly filled last page

An entry is looked up by a SHA-256 digest chained along the path, which other processes can compute too. The digest is
never trusted: a hit also needs the same parent entry and the same tokens, so that not even an injected collision can
return foreign KV.

Which page goes first when pages are needed is the allocator's order; the cache only hears of it (`on_evict`).
"""

import hashlib
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

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

    def digest(self) -> bytes:
        """32 bytes; tagged and with lengths, so that no two keys spell the same."""
        digest = hashlib.sha256(b"jpaged prefix 1")
        for tag, value in (("salt", self.salt), ("adapter", self.adapter), ("weights", str(self.weight_version))):
            text = b"" if value is None else value.encode("utf-8", "surrogatepass")
            digest.update(f"|{tag}:{-1 if value is None else len(text)}:".encode() + text)
        return digest.digest()


@dataclass(eq=False, slots=True)
class CachedPage:
    """An entry of the tree.

    Attributes:
      digest: chained SHA-256.
      parent: the entry before it; `None` for a root.
      tokens: its tokens (`token_bytes`), as many as the page holds; fewer for a partly filled page.
      page: the page that holds their KV; `None` once it was evicted (its descendants may still be there).
      attached: it can be found from its root.
      children: the entries after it, by their first token, then by digest, the newest last.
    """

    digest: bytes
    parent: "CachedPage | None"
    tokens: bytes
    page: int | None = None
    attached: bool = True
    children: "dict[bytes, dict[bytes, CachedPage]] | None" = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


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
        self._roots: dict[bytes, CachedPage] = {}
        self._entries: dict[bytes, CachedPage] = {}
        self._entry_of_page: dict[int, CachedPage] = {}
        self._unwritten: set[int] = set()
        self.num_evictions = 0
        allocator.on_evict = self._evicted

    @property
    def num_entries(self) -> int:
        """Entries that hold a page, held by sequences or not."""
        return len(self._entry_of_page)

    def root(self, key: CacheKey) -> CachedPage:
        """Where the pages of a key begin. It is kept from the first page on that is inserted after it."""
        digest = key.digest()
        return self._roots.get(digest) or CachedPage(digest, None, b"", attached=False)

    def find(self, key: CacheKey, tokens: bytes, *, max_tokens: int) -> PrefixHit:
        """The longest beginning of a prompt that is cached; nothing is changed, and no page is held.

        Args:
          key: what must be equal beside the tokens.
          tokens: of the prompt (`token_bytes`).
          max_tokens: tokens of it that may hit; one less than the prompt's, since one must be computed to sample.
        """
        size, width = self._allocator.page_size, self._page_bytes
        chain, best, present_from = [self.root(key)], 0, 0
        for index in range(max_tokens // size):
            entry = self._child(chain[-1], tokens[index * width : (index + 1) * width])
            if entry is None or (entry.page is None and self._window is None):
                break
            chain.append(entry)
            if entry.page is None:
                present_from = index + 1
            elif present_from <= self._first_seen((index + 1) * size):
                best = index + 1
        del chain[best + 1 :]
        partial, length = self._best_partial(chain[-1], tokens[best * width : max_tokens * TOKEN_BYTES])
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
        digest = hashlib.sha256(parent.digest + tokens).digest()
        if parent.parent is None and not parent.attached:
            self._roots.setdefault(parent.digest, parent)
            parent.attached = self._roots[parent.digest] is parent
        owner = self._entry_of_page.get(page)
        entry = self._entries.get(digest)
        collides = entry is not None and (entry.parent is not parent or entry.tokens != tokens)
        if not parent.attached or collides or (entry is None and owner is not None):
            return CachedPage(digest, parent, tokens, attached=False)
        if entry is None:
            entry = self._entries[digest] = CachedPage(digest, parent, tokens)
            if parent.children is None:
                parent.children = {}
            parent.children.setdefault(tokens[:TOKEN_BYTES], {})[digest] = entry
        if entry.page is None and owner is None:
            entry.page = page
            self._entry_of_page[page] = entry
            self._unwritten.add(page)
            self._allocator.retain(page)
        return entry

    def insert_partial(self, parent: CachedPage, tokens: bytes, page: int) -> None:
        """Enters a partly filled page, unless another one holds the same tokens and perhaps more."""
        if tokens and self._best_partial(parent, tokens)[1] * TOKEN_BYTES < len(tokens):
            self.insert(parent, tokens, page)

    def start_plan(self) -> None:
        """A step is about to be planned: what was inserted before is written by the time this step's copies are made.

        Pages that are inserted from now on may be shared at once, since a step writes before it reads, but not copied.
        """
        self._unwritten.clear()

    def reset(self) -> None:
        """Forgets everything. Pages that nobody holds are free at once."""
        for page in self._entry_of_page:
            self._allocator.forget(page)
        for entry in itertools.chain(self._entries.values(), self._roots.values()):
            entry.attached, entry.page, entry.children = False, None, None
        self._roots.clear()
        self._entries.clear()
        self._entry_of_page.clear()

    def check_invariants(self) -> None:
        """Checks that entries and pages point at each other, and that each entry can be found.

        Raises:
          AssertionError: they do not; this is for tests and debugging.
        """
        for page, entry in self._entry_of_page.items():
            assert entry.page == page, f"page {page} belongs to an entry of page {entry.page}"
            assert entry.attached, f"page {page} belongs to a detached entry"
        for digest, entry in self._entries.items():
            parent = entry.parent
            assert parent is not None, "an entry is a root"
            assert parent.attached, "an entry lost its parent"
            assert parent.children is not None, "an entry's parent has no children"
            assert parent.children[entry.tokens[:TOKEN_BYTES]][digest] is entry, "an entry is not among the children"
            assert digest == hashlib.sha256(parent.digest + entry.tokens).digest(), "a digest is not that of its tokens"
            assert entry.page is not None or entry.children, "an entry holds no page and leads to none"

    def _first_seen(self, num_tokens: int) -> int:
        """The first page that the token after `num_tokens` cached ones sees."""
        return 0 if self._window is None else max(num_tokens - self._window + 1, 0) // self._allocator.page_size

    def _child(self, parent: CachedPage, chunk: bytes) -> CachedPage | None:
        entry = self._entries.get(hashlib.sha256(parent.digest + chunk).digest())
        if entry is None or entry.parent is not parent or entry.tokens != chunk:
            return None
        return entry

    def _best_partial(self, parent: CachedPage, tokens: bytes) -> tuple[int, int]:
        """The page after `parent` that begins with most of `tokens`, and how many; (0, 0) if there is none."""
        best, most = 0, 0
        alike = (parent.children or {}).get(tokens[:TOKEN_BYTES]) or {}
        for entry in itertools.islice(reversed(alike.values()), _MAX_PARTIAL_CANDIDATES):
            if entry.page is not None and entry.page not in self._unwritten:
                length = _num_common_tokens(entry.tokens, tokens)
                if length > most:
                    best, most = entry.page, length
        return best, most

    def _evicted(self, page: int) -> None:
        entry = self._entry_of_page.pop(page)
        entry.page = None
        self.num_evictions += 1
        # Entries that lead to no page are of no use.
        while entry.page is None and not entry.children:
            entry.attached, parent = False, entry.parent
            if parent is None:
                del self._roots[entry.digest]
                return
            del self._entries[entry.digest]
            children, first = parent.children or {}, entry.tokens[:TOKEN_BYTES]
            del children[first][entry.digest]
            if not children[first]:
                del children[first]
            entry = parent


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
