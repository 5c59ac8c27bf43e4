"""The page allocator against a dictionary of counts, and its refusals one by one."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jpaged.errors import ConfigError, OutOfPagesError, PageStateError
from jpaged.page_allocator import PageAllocator


class PageAllocatorMachine(RuleBasedStateMachine):
    """Any mix of calls, right and wrong ones, with pools so small that they run out all the time.

    The model is `holders`: page lists, each of them one reference to each of its pages.
    """

    @initialize(num_pages=st.integers(2, 9), page_size=st.integers(1, 5))
    def make(self, num_pages: int, page_size: int) -> None:
        self.allocator = PageAllocator(num_pages, page_size)
        self.holders: list[list[int]] = []

    @property
    def counts(self) -> Counter[int]:
        return Counter(page for pages in self.holders for page in pages)

    def refuses(self, call, *args, match: str, error: type[Exception] = PageStateError) -> None:
        """The call raises, and nothing has changed."""
        before = [self.allocator.ref_count(page) for page in range(self.allocator.num_pages)]
        free = self.allocator.num_free
        with pytest.raises(error, match=match):
            call(*args)
        assert [self.allocator.ref_count(page) for page in range(self.allocator.num_pages)] == before
        assert self.allocator.num_free == free

    @rule(n=st.integers(0, 5))
    def allocate(self, n: int) -> None:
        note(f"allocate {n}")
        used = self.counts
        free = self.allocator.num_pages - 1 - len(used)
        assert self.allocator.can_allocate(n) == (n <= free)
        if n > free:
            self.refuses(self.allocator.allocate, n, match=f"{n} pages asked for, {free} free", error=OutOfPagesError)
            return
        pages = self.allocator.allocate(n)
        assert len(set(pages)) == len(pages) == n
        assert not used.keys() & set(pages)
        assert all(0 < page < self.allocator.num_pages for page in pages)
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data) -> None:
        pages = data.draw(st.lists(st.sampled_from(data.draw(st.sampled_from(self.holders)) or [None])))
        if None in pages:
            return
        note(f"share {pages}")
        self.allocator.share(pages)
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data) -> None:
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        note(f"free {pages}")
        self.allocator.free(pages)

    @rule(data=st.data())
    def misuse(self, data) -> None:
        counts = self.counts
        good = data.draw(st.lists(st.sampled_from(sorted(counts)), unique=True)) if counts else []
        outside = st.one_of(st.integers(-3, -1), st.integers(self.allocator.num_pages, self.allocator.num_pages + 2))
        bad = data.draw(st.one_of(st.just(0), outside))
        note(f"misuse {good} and {bad}")
        self.refuses(self.allocator.free, [*good, bad], match=f"page {bad} cannot be freed")
        self.refuses(self.allocator.share, [*good, bad], match=f"page {bad} cannot be shared")
        unused = set(range(1, self.allocator.num_pages)) - counts.keys()
        for page in sorted(unused)[:1]:
            self.refuses(self.allocator.free, [*good, page], match=f"page {page} cannot be freed 1x: it has 0 holders")
            self.refuses(self.allocator.share, [*good, page], match=f"page {page} cannot be shared")
        for page in good[:1]:
            too_often = [page] * (counts[page] + 1)
            self.refuses(self.allocator.free, too_often, match=f"page {page} cannot be freed {len(too_often)}x")

    @invariant()
    def equals_model(self) -> None:
        counts = self.counts
        self.allocator.check_invariants(self.holders)
        assert self.allocator.num_used == len(counts)
        assert self.allocator.num_free + self.allocator.num_used + 1 == self.allocator.num_pages
        assert [self.allocator.ref_count(page) for page in range(self.allocator.num_pages)] == [
            counts[page] for page in range(self.allocator.num_pages)
        ]

    def teardown(self) -> None:
        if hasattr(self, "allocator"):
            for pages in self.holders:
                self.allocator.free(pages)
            self.allocator.check_invariants([])
            every = self.allocator.allocate(self.allocator.num_pages - 1)
            assert sorted(every) == list(range(1, self.allocator.num_pages))


TestPageAllocatorMachine = PageAllocatorMachine.TestCase
TestPageAllocatorMachine.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize(
    ("num_pages", "page_size", "match"),
    [(1, 16, "num_pages is 1, expected at least 2"), (0, 16, "num_pages is 0"), (4, 0, "page_size is 0")],
)
def test_a_pool_needs_a_page_beside_the_null_page(num_pages, page_size, match):
    with pytest.raises(ConfigError, match=match):
        PageAllocator(num_pages, page_size)


def test_the_order_of_pages_depends_on_the_calls_only():
    allocator = PageAllocator(7, 8)
    first, second = allocator.allocate(2), allocator.allocate(3)
    assert (first, second) == ([1, 2], [3, 4, 5])
    allocator.free(first)
    allocator.free(second)
    assert allocator.allocate(4) == [3, 4, 5, 1]  # freed last, given out first, each list in its own order


@pytest.mark.parametrize(("num_tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for(num_tokens, pages):
    assert PageAllocator(2, 16).pages_for(num_tokens) == pages


def test_a_shared_page_counts_once_and_is_freed_by_its_last_holder():
    allocator = PageAllocator(4, 16)
    pages = allocator.allocate(2)
    allocator.share(pages)
    assert (allocator.num_used, allocator.ref_count(pages[0])) == (2, 2)
    allocator.free(pages)
    assert (allocator.num_used, allocator.ref_count(pages[0])) == (2, 1)
    allocator.free(pages)
    assert (allocator.num_used, allocator.ref_count(pages[0])) == (0, 0)


def test_out_of_pages_says_how_many_and_what_to_do():
    allocator = PageAllocator(4, 16)
    allocator.allocate(1)
    with pytest.raises(OutOfPagesError, match=r"3 pages asked for, 2 free of 3 .*enlarge the pool"):
        allocator.allocate(3)


def test_a_negative_number_of_pages_is_refused():
    with pytest.raises(PageStateError, match="allocate got -1 pages"):
        PageAllocator(4, 16).allocate(-1)


def test_the_null_page_is_named():
    allocator = PageAllocator(4, 16)
    for call in (allocator.free, allocator.share):
        with pytest.raises(PageStateError, match=r"page 0 cannot be .*: it is the null page"):
            call([0])
    assert allocator.ref_count(0) == 0


@pytest.mark.parametrize("page", [-1, 4])
def test_ref_count_of_a_foreign_page(page):
    with pytest.raises(PageStateError, match=f"page {page} is not in the pool"):
        PageAllocator(4, 16).ref_count(page)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda a: a._free.append(a._free[0]), "page 3 is on the free list twice"),
        (lambda a: a._free.append(0), "page 0, the null page"),
        (lambda a: a._ref_counts.__setitem__(0, 1), "page 0, the null page"),
        (lambda a: a._free.pop(), "page 2 has 0 holders and is not on the free list"),
        (lambda a: a._free.append(1), "page 1 has 1 holders and is on the free list"),
        (lambda a: a._ref_counts.__setitem__(3, 1), "page 3 has 1 holders and is on the free list"),
        (lambda a: a.share([1]), "page 1 counts 2 holders, expected 1"),
    ],
)
def test_check_invariants_sees_damage(damage, match):
    allocator = PageAllocator(4, 16)
    pages = allocator.allocate(1)
    allocator.check_invariants([pages])
    damage(allocator)
    with pytest.raises(PageStateError, match=match):
        allocator.check_invariants([pages])


@pytest.mark.parametrize(
    ("holders", "match"),
    [([], "page 1 counts 1 holders, expected 0"), ([[1], [2]], "page 2 counts 0"), ([[1], [9]], "page 9 is held")],
)
def test_check_invariants_compares_with_the_holders(holders, match):
    allocator = PageAllocator(4, 16)
    allocator.allocate(1)
    with pytest.raises(PageStateError, match=match):
        allocator.check_invariants(holders)
