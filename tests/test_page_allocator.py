"""The page allocator against a dictionary of counts, and its refusals one by one."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jpaged.errors import ConfigError, OutOfPagesError, PageStateError
from jpaged.page_allocator import PageAllocator
from tests.memory_driver import num_lines_run


class PageAllocatorMachine(RuleBasedStateMachine):
    """Any mix of calls, right and wrong ones, with pools so small that they run out all the time.

    The model is `holders`: page lists, each of them one reference to each of its pages; `free_list`; `cached`: the
    cached pages, the longest cached first; and `retained`.
    """

    @initialize(num_pages=st.integers(2, 9), page_size=st.integers(1, 5))
    def make(self, num_pages: int, page_size: int) -> None:
        self.evicted: list[int] = []
        self.allocator = PageAllocator(num_pages, page_size)
        self.allocator.on_evict = self.evicted.append
        self.holders: list[list[int]] = []
        self.free_list = list(range(num_pages - 1, 0, -1))
        self.cached: list[int] = []
        self.retained: set[int] = set()

    @property
    def counts(self) -> Counter[int]:
        return Counter(page for pages in self.holders for page in pages)

    def state(self) -> tuple:
        allocator = self.allocator
        counts = [allocator.ref_count(page) for page in range(allocator.num_pages)]
        retained = [allocator.is_retained(page) for page in range(allocator.num_pages)]
        return counts, retained, allocator.num_free, allocator.num_cached, len(self.evicted)

    def refuses(self, call, *args, match: str, error: type[Exception] = PageStateError) -> None:
        """The call raises, and nothing has changed."""
        before = self.state()
        with pytest.raises(error, match=match):
            call(*args)
        assert self.state() == before

    @rule(n=st.integers(0, 5))
    def allocate(self, n: int) -> None:
        note(f"allocate {n}")
        available = len(self.free_list) + len(self.cached)
        if n > available:
            match = f"{n} pages asked for, {available} available"
            self.refuses(self.allocator.allocate, n, match=match, error=OutOfPagesError)
            return
        before = len(self.evicted)
        pages = self.allocator.allocate(n)
        evicted = self.cached[: max(n - len(self.free_list), 0)]  # free pages first, then the longest cached
        assert self.evicted[before:] == evicted
        self.free_list += evicted
        del self.cached[: len(evicted)]
        self.retained -= set(evicted)
        assert pages == self.free_list[len(self.free_list) - n :][::-1]
        del self.free_list[len(self.free_list) - n :]
        self.holders.append(pages[::-1])

    @precondition(lambda self: self.holders or self.cached)
    @rule(data=st.data())
    def share(self, data) -> None:
        pages = data.draw(st.lists(st.sampled_from([*self.counts, *self.cached] or [0]), max_size=5))
        pages = [page for page in pages if page]
        note(f"share {pages}")
        self.allocator.share(pages)
        self.cached = [page for page in self.cached if page not in pages]
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data) -> None:
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        note(f"free {pages}")
        self.allocator.free(pages)
        left = self.counts
        for page in self.last_drops(pages):
            if page not in left:
                (self.cached if page in self.retained else self.free_list).append(page)

    @staticmethod
    def last_drops(pages: list[int]) -> list[int]:
        """Pages in the order in which a list drops its last reference to them: from its end, so by first occurrence."""
        return sorted(set(pages), key=pages.index, reverse=True)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def retain(self, data) -> None:
        if not self.counts:
            return
        page = data.draw(st.sampled_from(sorted(self.counts)))
        note(f"retain {page}")
        self.allocator.retain(page)
        self.retained.add(page)

    @precondition(lambda self: self.retained)
    @rule(data=st.data())
    def forget(self, data) -> None:
        page = data.draw(st.sampled_from(sorted(self.retained)))
        note(f"forget {page}")
        self.allocator.forget(page)
        self.retained.remove(page)
        if page in self.cached:
            self.cached.remove(page)
            self.free_list.append(page)

    @rule(data=st.data())
    def misuse(self, data) -> None:
        counts, allocator = self.counts, self.allocator
        good = data.draw(st.lists(st.sampled_from(sorted(counts)), unique=True)) if counts else []
        outside = st.one_of(st.integers(-3, -1), st.integers(allocator.num_pages, allocator.num_pages + 2))
        bad = data.draw(st.one_of(st.just(0), outside))
        note(f"misuse {good} and {bad}")
        self.refuses(allocator.free, [*good, bad], match=f"page {bad} cannot be freed")
        self.refuses(allocator.share, [*good, bad], match=f"page {bad} cannot be shared")
        self.refuses(allocator.retain, bad, match=f"page {bad} cannot be retained")
        self.refuses(allocator.forget, bad, match=f"page {bad} cannot be forgotten")
        for page in (self.free_list[:1]) + self.cached[:1]:
            self.refuses(allocator.free, [*good, page], match=f"page {page} cannot be freed 1x: it has 0 holders")
            self.refuses(allocator.retain, page, match=f"page {page} cannot be retained 1x: it has 0 holders")
        for page in self.free_list[:1]:
            self.refuses(allocator.share, [*good, *self.cached, page], match=f"page {page} cannot be shared")
        for page in good[:1]:
            too_often = [page] * (counts[page] + 1)
            self.refuses(allocator.free, too_often, match=f"page {page} cannot be freed {len(too_often)}x")

    @invariant()
    def equals_model(self) -> None:
        counts, allocator = self.counts, self.allocator
        allocator.check_invariants(self.holders)
        numbers = (allocator.num_free, allocator.num_cached, allocator.num_used)
        assert numbers == (len(self.free_list), len(self.cached), len(counts))
        assert sum(numbers) + 1 == allocator.num_pages
        assert allocator.num_available == len(self.free_list) + len(self.cached)
        for page in range(allocator.num_pages):
            assert allocator.ref_count(page) == counts[page]
            assert allocator.is_retained(page) == (page in self.retained)

    def teardown(self) -> None:
        if hasattr(self, "allocator"):
            for pages in self.holders:
                self.allocator.free(pages)
            self.allocator.check_invariants([])
            every = self.allocator.allocate(self.allocator.num_pages - 1)
            assert sorted(every) == list(range(1, self.allocator.num_pages))


TestPageAllocatorMachine = PageAllocatorMachine.TestCase
TestPageAllocatorMachine.settings = settings(
    max_examples=40,
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


def test_free_pages_go_first_then_the_longest_cached_and_leaves_before_roots():
    evicted: list[int] = []
    allocator = PageAllocator(7, 16)
    allocator.on_evict = evicted.append
    old, new = allocator.allocate(2), allocator.allocate(3)  # page 6 is free
    for page in (*old, *new):
        allocator.retain(page)
    allocator.free(old)
    allocator.free(new)
    assert allocator.allocate(1) == [6]
    assert evicted == []
    allocator.share(old[:1])  # somebody comes back for it
    allocator.free(old[:1])
    allocator.allocate(5)
    assert evicted == [2, 5, 4, 3, 1]  # the later page of a list before the earlier one; what was used last is last
    assert (allocator.num_cached, allocator.num_used) == (0, 6)
    assert not any(map(allocator.is_retained, range(7)))  # the new holder's contents are not those that were kept


def test_a_retained_page_that_is_forgotten_is_an_ordinary_one():
    allocator = PageAllocator(4, 16)
    used, cached = allocator.allocate(2)
    allocator.retain(used)
    allocator.retain(cached)
    allocator.free([cached])
    allocator.forget(used)
    allocator.forget(cached)
    assert (allocator.num_used, allocator.num_cached, allocator.num_free) == (1, 0, 2)
    allocator.free([used])
    assert (allocator.num_cached, allocator.num_free) == (0, 3)
    with pytest.raises(PageStateError, match=f"page {used} cannot be forgotten: it is not retained"):
        allocator.forget(used)


def test_what_a_call_costs_does_not_depend_on_the_pool():
    costs = []
    for num_pages in (20, 5_000):
        allocator = PageAllocator(num_pages, 16)
        pages = allocator.allocate(num_pages - 1)
        for page in pages[:-5]:
            allocator.retain(page)
        allocator.free(pages[3:])
        calls = (
            lambda a=allocator: a.share([4, 5]),
            lambda a=allocator: a.free([4, 5]),
            lambda a=allocator: a.allocate(5),  # free ones
            lambda a=allocator: a.allocate(5),  # cached ones
            lambda a=allocator: a.retain(1),
            lambda a=allocator: a.forget(4),
        )
        costs.append([num_lines_run(call) for call in calls])
        assert allocator.num_free == 1
    assert costs[0] == costs[1]
    assert all(costs[0])


def test_out_of_pages_says_how_many_and_what_to_do():
    allocator = PageAllocator(4, 16)
    allocator.allocate(1)
    with pytest.raises(OutOfPagesError, match=r"3 pages asked for, 2 available of 3 .*enlarge the pool"):
        allocator.allocate(3)


def test_a_negative_number_of_pages_is_refused():
    with pytest.raises(PageStateError, match="allocate got -1 pages"):
        PageAllocator(4, 16).allocate(-1)


def test_the_null_page_is_named():
    allocator = PageAllocator(4, 16)
    for call in (allocator.free, allocator.share):
        with pytest.raises(PageStateError, match=r"page 0 cannot be .*: it is the null page"):
            call([0])
    with pytest.raises(PageStateError, match=r"page 0 cannot be retained: it is the null page"):
        allocator.retain(0)
    assert allocator.ref_count(0) == 0


@pytest.mark.parametrize("page", [-1, 4])
def test_ref_count_of_a_foreign_page(page):
    with pytest.raises(PageStateError, match=f"page {page} is not in the pool"):
        PageAllocator(4, 16).ref_count(page)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda a: a._free.append(a._free[0]), "page 4 is on the free list twice"),
        (lambda a: a._free.append(0), "page 0, the null page"),
        (lambda a: a._cached.__setitem__(0, None), "page 0, the null page"),
        (lambda a: a._ref_counts.__setitem__(0, 1), "page 0, the null page"),
        (lambda a: a._free.append(9), "page 9 is free or cached, and is not in the pool"),
        (lambda a: a._cached.__setitem__(-1, None), "page -1 is free or cached, and is not in the pool"),
        (lambda a: a._free.pop(), r"page 3 has 0 holders, retained=False and \(free, cached\) is \(False, False\)"),
        (lambda a: a._free.append(1), r"page 1 has 1 holders, retained=False and \(free, cached\) is \(True, False\)"),
        (lambda a: a._free.append(2), r"page 2 has 0 holders, retained=True and \(free, cached\) is \(True, True\)"),
        (lambda a: a._cached.clear(), r"page 2 has 0 holders, retained=True and \(free, cached\) is \(False, False\)"),
        (lambda a: a._retained.__setitem__(2, 0), "page 2 has 0 holders, retained=False"),
        (lambda a: a._ref_counts.__setitem__(3, 1), "page 3 has 1 holders"),
        (lambda a: a._ref_counts.__setitem__(1, -1), "page 1 has -1 holders"),
        (lambda a: a.share([1]), "page 1 counts 2 holders, expected 1"),
    ],
)
def test_check_invariants_sees_damage(damage, match):
    allocator = PageAllocator(5, 16)
    page, cached = allocator.allocate(2)
    allocator.retain(cached)
    allocator.free([cached])
    allocator.check_invariants([[page]])
    damage(allocator)
    with pytest.raises(PageStateError, match=match):
        allocator.check_invariants([[page]])


@pytest.mark.parametrize(
    ("holders", "match"),
    [([], "page 1 counts 1 holders, expected 0"), ([[1], [2]], "page 2 counts 0"), ([[1], [9]], "page 9 is held")],
)
def test_check_invariants_compares_with_the_holders(holders, match):
    allocator = PageAllocator(4, 16)
    allocator.allocate(1)
    with pytest.raises(PageStateError, match=match):
        allocator.check_invariants(holders)
