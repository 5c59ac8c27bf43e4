"""What is collected for the device, in which order, and what is held meanwhile."""

import pytest

from jpaged.page_allocator import PageAllocator
from jpaged.pending_transfers import PendingTransfers
from jpaged.step_plan import PageTransfers


@pytest.fixture
def pool() -> tuple[PageAllocator, PageAllocator, PendingTransfers]:
    allocator, host = PageAllocator(10, 4), PageAllocator(10, 4)
    return allocator, host, PendingTransfers(allocator, host)


def test_everything_is_taken_once(pool):
    allocator, host, pending = pool
    source, copy, loaded = allocator.allocate(3)
    saved, host_page = host.allocate(2)
    pending.swap_out([(source, saved)])
    pending.swap_in({loaded: host_page}, [host_page])
    pending.copy(pending.hold(source), copy)
    assert pending.fills_any({copy})
    assert pending.fills_any({loaded, 9})
    assert not pending.fills_any({source})
    assert (pending.is_copy(copy), pending.is_copy(loaded)) == (True, False)
    assert pending.take() == PageTransfers(((source, saved),), ((host_page, loaded),), ((source, copy),))
    assert not pending.fills_any({copy, loaded})
    assert pending.take() == PageTransfers()
    allocator.check_invariants([[source, copy, loaded]])
    host.check_invariants([[saved]])


def test_a_source_is_held_once_for_each_copy_until_it_is_taken(pool):
    allocator, _, pending = pool
    source, *copies = allocator.allocate(3)
    for copy in copies:
        pending.copy(pending.hold(source), copy)
    allocator.free([source])
    assert (pending.num_held(source), list(pending.sources)) == (2, [source, source])
    allocator.check_invariants([copies, pending.sources])
    pending.take()
    allocator.check_invariants([copies])
    assert pending.num_held(source) == 0


def test_a_copy_of_a_copy_is_made_of_the_first_source(pool):
    allocator, _, pending = pool
    source, first, second = allocator.allocate(3)
    pending.copy(pending.hold(source), first)
    pending.copy(pending.hold(first), second)
    assert pending.take().copies == ((source, first), (source, second))


def test_only_copies_that_nobody_wants_are_dropped(pool):
    allocator, _, pending = pool
    source, gone, held, kept = allocator.allocate(4)
    for copy in (gone, held, kept):
        pending.copy(pending.hold(source), copy)
    allocator.retain(kept)
    allocator.free([gone, kept])
    pending.drop_copies([source, gone, held, kept])
    assert pending.num_held(source) == 2
    assert pending.take().copies == ((source, held), (source, kept))
    allocator.check_invariants([[source, held]])


def test_a_page_that_is_given_out_again_is_filled_once(pool):
    allocator, host, pending = pool
    [page] = allocator.allocate(1)
    first, second = host.allocate(2)
    pending.swap_in({page: first}, [first])
    allocator.free([page])
    assert allocator.allocate(1) == [page]
    pending.swap_in({page: second}, [second])
    assert pending.take().swapped_in == ((second, page),)
    host.check_invariants([])
