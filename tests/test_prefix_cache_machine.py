"""Allocator and prefix cache against a list of what every page holds."""

from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jpaged.page_allocator import PageAllocator
from jpaged.prefix_cache import CachedPage, CacheKey, PrefixCache, token_bytes

KEY = CacheKey()


class PrefixCacheMachine(RuleBasedStateMachine):
    """Sequences over three tokens, in a tiny pool, start with what they find, grow, and are released.

    The model is `contents`: of each page, the text up to its end that its KV stands for, with the key. What is found
    must be what is in the pages.
    """

    @initialize(num_pages=st.integers(3, 10), window=st.sampled_from([None, 2, 5]))
    def make(self, num_pages: int, window: int | None) -> None:
        self.allocator = PageAllocator(num_pages, 2)
        self.cache = PrefixCache(self.allocator, sliding_window=window)
        self.window = window
        self.seqs: list[tuple[CacheKey, list[int], list[int], list[CachedPage]]] = []  # key, tokens, pages, chain
        self.contents: dict[int, tuple[CacheKey, list[int]]] = {}

    @rule(
        key=st.sampled_from([KEY, CacheKey(salt="a")]),
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=7),
    )
    def start(self, key: CacheKey, prompt: list[int]) -> None:
        note(f"start {key} {prompt}")
        hit = self.cache.find(key, token_bytes(prompt), max_tokens=len(prompt) - 1)
        first_seen = 0 if self.window is None else max(hit.num_tokens - self.window + 1, 0) // 2
        for index, page in enumerate(hit.pages):
            assert page or index < first_seen
            assert not page or self.contents[page] == (key, prompt[: index * 2 + 2])
        if hit.partial_page:
            its_key, text = self.contents[hit.partial_page]
            assert its_key == key
            assert text[: hit.num_tokens] == prompt[: hit.num_tokens]
        self.allocator.share([page for page in hit.pages if page])
        self.seqs.append((key, prompt[: len(hit.pages) * 2], list(hit.pages), hit.chain))

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), min_size=2, max_size=2), enters=st.booleans())
    def grow(self, data, more: list[int], enters: bool) -> None:
        key, tokens, pages, chain = data.draw(st.sampled_from(self.seqs))
        if not self.allocator.num_available:
            return
        note(f"grow {tokens} by {more}")
        [page] = self.allocator.allocate(1)
        tokens += more
        pages.append(page)
        self.contents[page] = (key, list(tokens))
        if len(chain) == 1:
            chain[0] = self.cache.root(key)  # another one may be known by now
        if enters and len(chain) == len(pages):
            chain.append(self.cache.insert(chain[-1], token_bytes(more), page))

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), tail=st.lists(st.integers(0, 2), max_size=1))
    def release(self, data, tail: list[int]) -> None:
        key, tokens, pages, chain = self.seqs.pop(data.draw(st.integers(0, len(self.seqs) - 1)))
        note(f"release {tokens}")
        if tail and len(chain) == len(pages) + 1 and self.allocator.num_available:
            pages += self.allocator.allocate(1)
            self.contents[pages[-1]] = (key, tokens + tail)
            self.cache.insert_partial(chain[-1], token_bytes(tail), pages[-1])
        self.allocator.free([page for page in pages if page])

    @rule()
    def reset(self) -> None:
        if self.cache.num_entries > 5:
            note("reset")
            self.cache.reset()
            for _, _, _, chain in self.seqs:
                assert not any(entry.attached for entry in chain[1:])
                chain.clear()  # there is nothing to go on from: what it computes is not entered any more

    @invariant()
    def agrees(self) -> None:
        self.cache.check_invariants()
        self.allocator.check_invariants([[page for page in pages if page] for _, _, pages, _ in self.seqs])
        retained = [page for page in range(self.allocator.num_pages) if self.allocator.is_retained(page)]
        assert self.cache.num_entries == len(retained)
        for page, entry in self.cache._entry_of_page.items():
            path = []
            while entry is not None and entry.parent is not None:
                path.append(entry.tokens)
                entry = entry.parent
            key, text = self.contents[page]
            assert b"".join(reversed(path)) == token_bytes(text)
            assert entry.tokens == key.encode()


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
