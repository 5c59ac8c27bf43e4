"""The prefix cache: what is found, and what never is."""

import hashlib
import itertools
from types import SimpleNamespace

import pytest

from jpaged import prefix_cache
from jpaged.errors import PageStateError
from jpaged.page_allocator import PageAllocator
from jpaged.prefix_cache import CachedPage, CacheKey, PrefixCache, token_bytes
from tests.memory_driver import num_lines_run

SIZE = 4
KEY = CacheKey()


def make(num_pages: int = 20, window: int | None = None) -> tuple[PageAllocator, PrefixCache]:
    allocator = PageAllocator(num_pages, SIZE)
    return allocator, PrefixCache(allocator, sliding_window=window)


def enter(cache: PrefixCache, tokens, pages, key: CacheKey = KEY) -> list[CachedPage]:
    """Enters the pages of a sequence, the last one partly filled if the tokens end there."""
    chain = [cache.root(key)]
    for start, page in zip(range(0, len(tokens), SIZE), pages, strict=True):
        chain.append(cache.insert(chain[-1], token_bytes(tokens[start : start + SIZE]), page))
    return chain


def find(cache: PrefixCache, tokens, key: CacheKey = KEY, **more):
    """(pages, partial page, its tokens) that a prompt hits."""
    hit = cache.find(key, token_bytes(tokens), max_tokens=len(tokens) - 1, **more)
    assert hit.num_tokens == len(hit.pages) * SIZE + hit.num_partial_tokens
    assert len(hit.chain) == len(hit.pages) + 1
    assert bool(hit.partial_page) == bool(hit.num_partial_tokens)
    cache.check_invariants()
    return hit.pages, hit.partial_page, hit.num_partial_tokens


# ---------------------------------------------------------------------------------------------- what is found


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([*range(8), 50], ([1, 2], 0, 0)),
        ([*range(12), 50], ([1, 2, 3], 0, 0)),
        ([*range(8), 8, 9, 50], ([1, 2], 3, 2)),  # differs in the middle of a page
        ([*range(12)], ([1, 2], 3, 3)),  # all of it is there: one token is computed again, not a page
        ([*range(11)], ([1, 2], 3, 2)),
        ([*range(14)], ([1, 2, 3], 4, 1)),  # the last page of the other one is partly filled
        ([*range(14), 50], ([1, 2, 3], 4, 2)),  # all of it, and less than a page
        ([0, 1, 50], ([], 1, 2)),
        ([0], ([], 0, 0)),
        ([50, 1, 2, 3, 4], ([], 0, 0)),  # KV depends on all tokens before
        ([4, 5, 6, 7, 8], ([], 0, 0)),
    ],
)
def test_the_longest_beginning_is_found(prompt, expected):
    allocator, cache = make()
    enter(cache, [*range(14)], allocator.allocate(4))
    assert find(cache, prompt) == expected


def test_the_page_with_most_of_the_tokens_is_copied_and_the_newest_among_equals():
    allocator, cache = make()
    pages = allocator.allocate(4)
    for tail, page in zip(([1, 2, 3, 4], [1, 2, 9, 9], [1, 2, 3, 5], [7, 7, 7, 7]), pages, strict=True):
        enter(cache, tail, [page])
    assert find(cache, [1, 2, 3, 6, 0]) == ([], pages[2], 3)
    assert find(cache, [1, 2, 9, 0]) == ([], pages[1], 3)
    assert find(cache, [1, 2, 0]) == ([], pages[2], 2)


def test_a_partly_filled_page_is_not_entered_beside_one_that_holds_more():
    allocator, cache = make()
    first, second, third = allocator.allocate(3)
    root = cache.root(KEY)
    assert cache.insert_partial(root, token_bytes([1, 2, 3]), first) == first
    assert cache.insert_partial(root, token_bytes([1, 2]), second) == first
    assert cache.insert_partial(root, token_bytes([1, 2, 4]), third) == third
    assert cache.num_entries == 2
    assert not allocator.is_retained(second)


def test_the_first_page_with_the_same_tokens_stays():
    allocator, cache = make()
    first, second = allocator.allocate(2)
    [_, one], [_, two] = enter(cache, [1, 2, 3, 4], [first]), enter(cache, [1, 2, 3, 4], [second])
    assert one is two
    assert (one.page, cache.num_entries, allocator.is_retained(second)) == (first, 1, False)


def test_a_page_cannot_stand_for_two_texts():
    allocator, cache = make()
    [page] = allocator.allocate(1)
    enter(cache, [1, 2, 3, 4], [page])
    [_, other] = enter(cache, [5, 6, 7, 8], [page])
    assert not other.attached
    assert find(cache, [5, 6, 7, 8, 9]) == ([], 0, 0)
    assert find(cache, [1, 2, 3, 4, 5]) == ([page], 0, 0)


def test_a_page_that_this_step_writes_is_shared_but_not_copied():
    allocator, cache = make()
    pages = allocator.allocate(2)
    enter(cache, [*range(8)], pages)
    assert find(cache, [*range(9)], unwritten={*pages}) == (pages, 0, 0)
    assert find(cache, [*range(6)], unwritten={pages[1]}) == (pages[:1], 0, 0)
    assert find(cache, [*range(6)], unwritten={pages[0]}) == (pages[:1], pages[1], 1)


# ---------------------------------------------------------------------------------------------- what never is


def test_salts_adapters_and_weights_are_apart():
    salts = (None, "", "a", "a|b", "a|adapter:1:b", "-1", "0", "None", "b", "ü", "\ud800")
    keys = [CacheKey(*parts) for parts in itertools.product(salts, (None, "", "b", "b|weights:1:1"), (0, 1, 11))]
    assert len({key.encode() for key in keys}) == len(keys)
    allocator, cache = make(num_pages=len(keys) + 1)
    for key, page in zip(keys, allocator.allocate(len(keys)), strict=True):
        enter(cache, [1, 2, 3, 4], [page], key)
    for page, key in enumerate(keys, 1):
        assert cache.find(key, token_bytes([1, 2, 3, 4, 5]), max_tokens=4).pages == [page]
        assert cache.find(key, token_bytes([1, 2, 3, 4]), max_tokens=3).partial_page == page
    cache.check_invariants()
    assert find(cache, [1, 2, 3, 4, 5], CacheKey(salt="c")) == ([], 0, 0)


def collide(monkeypatch, collides) -> None:
    """Gives everything that `collides` says the same digest."""

    def sha256(data: bytes):
        return SimpleNamespace(digest=lambda: b"x" * 32) if collides(data) else hashlib.sha256(data)

    monkeypatch.setattr(prefix_cache, "hashlib", SimpleNamespace(sha256=sha256))


def test_if_all_digests_are_equal_no_foreign_page_is_found(monkeypatch):
    collide(monkeypatch, lambda data: True)
    allocator, cache = make()
    mine, other = allocator.allocate(3), allocator.allocate(3)
    enter(cache, [*range(12)], mine)
    enter(cache, [*range(4), *range(60, 68)], other)
    assert find(cache, [*range(13)]) == (mine[:1], 0, 0)  # what collides is not entered: it is computed again
    assert find(cache, [*range(4), *range(60, 68), 1]) == (mine[:1], 0, 0)
    for key in (CacheKey(salt="a"), CacheKey(adapter="a"), CacheKey(weight_version=1)):
        assert find(cache, [*range(13)], key) == ([], 0, 0)
        [_, entry] = enter(cache, [*range(4)], allocator.allocate(1), key)
        assert not entry.attached
        assert find(cache, [*range(13)], key) == ([], 0, 0)
    allocator.free(mine)
    allocator.free(other)
    allocator.allocate(allocator.num_available)
    cache.check_invariants()
    assert cache.num_entries == 0


@pytest.mark.parametrize("parents", ["same", "other"])
def test_a_page_whose_digest_collides_with_another_ones_is_not_found(monkeypatch, parents):
    mine, foreign = token_bytes([5, 6, 7, 8]), token_bytes([5, 6, 7, 9] if parents == "same" else [5, 6, 7, 8])
    collide(monkeypatch, lambda data: data.endswith((mine, foreign)))
    allocator, cache = make()
    first, second = allocator.allocate(2), allocator.allocate(2)
    start = [1, 2, 3, 4] if parents == "same" else [1, 2, 3, 0]
    enter(cache, [1, 2, 3, 4, 5, 6, 7, 8], first)
    enter(cache, [*start, 5, 6, 7, 9 if parents == "same" else 8], second)
    assert find(cache, [1, 2, 3, 4, 5, 6, 7, 8, 0]) == (first, 0, 0)
    pages, partial, length = find(cache, [*start, 5, 6, 7, 9 if parents == "same" else 8, 0])
    assert second[1] not in (*pages, partial)
    # The same three tokens after the same text are there; after another text they are not.
    assert (pages, partial, length) == ((first[:1], first[1], 3) if parents == "same" else (second[:1], 0, 0))


def test_colliding_roots_are_apart(monkeypatch):
    collide(monkeypatch, lambda data: data.startswith(b"jpaged"))
    allocator, cache = make()
    enter(cache, [1, 2, 3, 4, 5, 6], allocator.allocate(2), CacheKey(salt="a"))
    assert find(cache, [1, 2, 3, 4, 5, 6], CacheKey(salt="b")) == ([], 0, 0)
    enter(cache, [1, 2, 0, 0], allocator.allocate(1), CacheKey(salt="b"))
    assert find(cache, [1, 2, 3, 4, 5, 6], CacheKey(salt="b")) == ([], 3, 2)
    assert find(cache, [1, 2, 3, 4, 5, 6], CacheKey(salt="a")) == ([1], 2, 1)


def test_reset_forgets_everything():
    allocator, cache = make()
    used, cached = allocator.allocate(2), allocator.allocate(3)
    chain = enter(cache, [*range(8)], used)
    enter(cache, [*range(50, 62)], cached)
    allocator.free(cached)
    cache.reset()
    assert (cache.num_entries, allocator.num_cached, allocator.num_used) == (0, 0, 2)
    assert find(cache, [*range(9)]) == ([], 0, 0)
    late = cache.insert(chain[-1], token_bytes([1, 2, 3, 4]), allocator.allocate(1)[0])
    assert not late.attached  # it could not be found
    assert not any(entry.attached for entry in chain)
    allocator.free(used)
    assert allocator.num_cached == 0
    enter(cache, [*range(8)], allocator.allocate(2))
    assert find(cache, [*range(9)])[0]


# ---------------------------------------------------------------------------------------------- eviction


def test_eviction_prunes_what_leads_to_no_page():
    allocator, cache = make(num_pages=5)
    pages = allocator.allocate(3)
    chain = enter(cache, [*range(12)], pages)
    allocator.free(pages)
    allocator.allocate(2)  # the free page and the leaf
    assert find(cache, [*range(13)]) == (pages[:2], 0, 0)
    assert [entry.attached for entry in chain] == [True, True, True, False]
    allocator.allocate(2)
    assert find(cache, [*range(13)]) == ([], 0, 0)
    assert not any(entry.attached for entry in chain)
    assert (cache.num_entries, cache.num_evictions) == (0, 3)
    assert [len(index) for index in (cache._roots, cache._entries, cache._newest)] == [0, 0, 0]


def test_a_chain_that_lost_a_page_is_healed_by_whoever_computes_it_again():
    allocator, cache = make(num_pages=4)
    pages = allocator.allocate(3)
    chain = enter(cache, [*range(12)], pages)
    allocator.free(pages[:2])
    assert allocator.allocate(1) == [pages[1]]
    assert find(cache, [*range(13)]) == (pages[:1], 0, 0)
    assert (chain[2].page, chain[2].attached) == (None, True)  # it leads to the third page
    again = enter(cache, [*range(8)], [pages[0], pages[1]])
    assert again[2] is chain[2]
    assert find(cache, [*range(13)]) == (pages, 0, 0)


def test_siblings_that_begin_alike_are_unlinked_one_by_one():
    for order in itertools.permutations(range(3)):
        allocator, cache = make(num_pages=4)
        pages = allocator.allocate(3)
        for last, page in enumerate(pages):
            enter(cache, [1, 2, 3, last], [page])
        left = set(range(3))
        for last in order:
            allocator.free([pages[last]])
            allocator.allocate(1)
            left.remove(last)
            expected = pages[max(left)] if left else 0
            assert find(cache, [1, 2, 3, 9, 9]) == ([], expected, 3 if left else 0)


def test_what_a_call_costs_does_not_depend_on_the_number_of_cached_pages():
    costs = []
    for num_texts in (20, 1_000):
        allocator, cache = make(num_pages=2 * num_texts + 4)
        for number in range(num_texts):
            pages = allocator.allocate(2)
            enter(cache, [1, 2, 3, 10 + number, 5, 6, 7, 8], pages)  # all of them begin alike
            allocator.free(pages)
        pages = allocator.allocate(2)
        calls = (
            lambda c=cache: c.find(KEY, token_bytes([1, 2, 3, 12, 5, 6, 0]), max_tokens=6),
            lambda c=cache: c.find(KEY, token_bytes([1, 2, 3, 0]), max_tokens=3),
            lambda c=cache, p=pages: enter(c, [1, 2, 3, 9, 9, 9, 9, 9], p),
            lambda a=allocator: a.allocate(6),
        )
        costs.append([num_lines_run(call) for call in calls])
        assert cache.num_evictions == 5
    assert costs[0] == costs[1]
    assert all(costs[0])


# ---------------------------------------------------------------------------------------------- windows


def test_a_window_needs_its_own_pages_only():
    allocator, cache = make(num_pages=5, window=5)
    pages = allocator.allocate(4)
    enter(cache, [*range(16)], pages)
    assert find(cache, [*range(17)]) == ([0, 0, 0, pages[3]], 0, 0)  # token 16 sees 12 to 16
    assert find(cache, [*range(16)]) == ([0, 0, pages[2]], pages[3], 3)  # token 15 sees 11 to 15
    allocator.free(pages[:2])
    allocator.allocate(2)
    assert find(cache, [*range(17)]) == ([0, 0, 0, pages[3]], 0, 0)
    assert find(cache, [*range(12), 50]) == ([0, 0, pages[2]], 0, 0)
    assert find(cache, [*range(9)]) == ([], 0, 0)  # token 8 sees 4 to 8, which are gone
    allocator.free(pages[3:])
    allocator.allocate(1)
    assert find(cache, [*range(16), 50, 51]) == ([0, 0, pages[2]], 0, 0)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9, 100])
@pytest.mark.parametrize("lost", [(), (0,), (1,), (2,), (0, 1), (0, 2)])
def test_a_hit_has_every_page_that_its_next_token_sees(window, lost):
    allocator, cache = make(num_pages=5, window=window)
    pages = allocator.allocate(4)
    enter(cache, [*range(16)], pages)
    for index in lost:
        allocator.free([pages[index]])
        allocator.allocate(1)
    lengths = []
    for end in range(1, 18):
        hit = cache.find(KEY, token_bytes([*range(end), 50]), max_tokens=end)
        held = [*hit.pages, hit.partial_page]
        seen = range(max(hit.num_tokens - window + 1, 0), hit.num_tokens)
        assert all(held[token // SIZE] == pages[token // SIZE] for token in seen)
        assert all(not page or token_page * SIZE + SIZE > seen.start for token_page, page in enumerate(hit.pages))
        complete = [
            length
            for length in range(min(end, 16) // SIZE * SIZE + 1)
            if length % SIZE == 0
            and all(token // SIZE not in lost for token in range(max(length - window + 1, 0), length))
        ]
        assert len(hit.pages) * SIZE == max(complete)  # the longest there is
        lengths.append(hit.num_tokens)
    assert lost or lengths == [*range(1, 17), 16]


# ---------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda cache, chain: setattr(chain[1], "page", 7), "page 1 belongs to an entry of page 7"),
        (lambda cache, chain: cache._entry_of_page.pop(1), "is not the one of its page"),
        (lambda cache, chain: setattr(chain[0], "attached", False), "cannot be found from its root"),
        (lambda cache, chain: setattr(chain[1], "tokens", b"abcd"), "has not the digest of its tokens"),
        (lambda cache, chain: cache._newest.clear(), "is not among those that begin alike"),
        (lambda cache, chain: setattr(chain[1], "num_children", 3), "counts 3 children, expected 1"),
        (lambda cache, chain: cache._entries.pop(chain[2].digest), "page 2 belongs to an entry of page 2"),
    ],
)
def test_check_invariants_sees_damage(damage, match):
    allocator, cache = make()
    chain = enter(cache, [*range(8)], allocator.allocate(2))
    cache.check_invariants()
    damage(cache, chain)
    with pytest.raises(PageStateError, match=match):
        cache.check_invariants()
