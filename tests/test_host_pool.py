"""Sequences that are moved to the host and back, as a memory manager does it."""

import pytest

from jpaged.errors import OutOfPagesError, PageStateError
from jpaged.sequence import Sequence
from tests.memory_driver import compute, end, make, new_seq, run


def test_swapping_keeps_sharing():
    memory = make(host_pages=6)
    first = run(memory, range(10))
    second = Sequence(first.group, 1, tokens=list(first.tokens))
    memory.fork(first, second)
    chain, pages = first.chain, list(first.pages)
    memory.start_plan()
    assert memory.can_swap_out([first, second])
    memory.swap_out([first, second])
    assert (first.pages, second.pages, first.num_computed_tokens) == ([], [], 10)
    transfers = memory.take_transfers()
    assert set(transfers.swapped_out) == set(zip(pages, first.host_pages, strict=True))
    assert first.host_pages == second.host_pages
    memory.check_invariants([], [first, second])
    memory.weights_changed([])  # so that the device has nothing of it any more
    first.chain, second.chain = chain, list(chain)
    assert memory.num_host_pages([first, second]) == 3
    hosts = list(first.host_pages)
    memory.start_plan()
    memory.swap_in([first, second])
    assert first.pages == second.pages
    assert memory.allocator.num_used == 3
    assert not memory.can_swap_out([first])  # what is being loaded cannot be saved
    other = new_seq([1])
    memory.append(other, 1)
    assert set(memory.take_transfers().swapped_in) == set(zip(hosts, first.pages, strict=True))
    memory.check_invariants([first, second, other])
    memory.start_plan()
    first.append(50)
    compute(memory, first)
    assert memory.take_transfers().copies == ((second.pages[-1], first.pages[-1]),)


def test_what_the_prefix_cache_still_has_is_not_loaded_again():
    memory = make(num_pages=10, host_pages=8)
    first, second = run(memory, [*range(8), 50, 51]), run(memory, [*range(8), 60])
    memory.swap_out([first])
    memory.take_transfers()
    assert memory.allocator.ref_count(second.pages[0]) == 1
    assert memory.num_host_pages([first]) == 1
    memory.swap_in([first])
    [(_, loaded)] = memory.take_transfers().swapped_in
    assert first.pages == [*second.pages[:2], loaded]
    memory.check_invariants([first, second])
    end(memory, second)
    memory.swap_out([first])
    memory.take_transfers()
    available = memory.allocator.num_available
    assert memory.num_host_pages([first]) == 3  # two of them are cached: revived, they are available no more
    memory.swap_in([first])
    assert memory.allocator.num_available == available - 3
    assert len(memory.take_transfers().swapped_in) == 1


def test_host_pages_are_not_overwritten_before_they_are_read():
    memory = make(host_pages=1)
    first, second = run(memory, [1, 2]), run(memory, [3, 4])
    memory.swap_out([first])
    memory.take_transfers()
    memory.start_plan()
    memory.swap_in([first])
    assert not memory.can_swap_out([second])
    memory.check_invariants([first, second])
    memory.take_transfers()
    assert memory.can_swap_out([second])


def test_the_host_pool_is_bounded_and_swapping_is_all_or_nothing():
    memory = make(host_pages=4)
    first, second = run(memory, range(9)), run(memory, range(50, 58))
    assert not memory.can_swap_out([first, second])
    with pytest.raises(OutOfPagesError, match="5 pages asked for, 4 available"):
        memory.swap_out([first, second])
    memory.check_invariants([first, second])
    assert memory.take_transfers().swapped_out == ()
    assert memory.can_swap_out([first])
    memory.swap_out([first])
    memory.take_transfers()
    memory.prefix_cache.reset()
    first.chain = []
    memory.allocator.allocate(memory.allocator.num_available - 2)
    with pytest.raises(OutOfPagesError, match="3 pages are needed to swap in, 2 available"):
        memory.swap_in([first])
    assert (first.pages, len(first.host_pages), memory.allocator.num_available) == ([], 3, 2)


def test_what_this_step_writes_cannot_be_saved_before_it():
    memory = make(host_pages=8)
    first = new_seq(range(8))
    memory.start_plan()
    memory.start(first, None)
    compute(memory, first)
    second = new_seq(range(9))
    memory.start(second, memory.find(second))
    assert second.pages == first.pages
    assert not memory.can_swap_out([second])
    memory.take_transfers()
    memory.start_plan()
    assert memory.can_swap_out([second])


def test_a_page_given_for_a_token_that_is_not_computed_is_not_saved():
    memory = make(host_pages=2)
    seq = run(memory, range(8))
    memory.start_plan()
    assert memory.append(seq, 1)  # for a row that is taken back
    assert memory.can_swap_out([seq])
    memory.swap_out([seq])
    assert len(memory.take_transfers().swapped_out) == 2
    memory.check_invariants([], [seq])


def test_a_swapped_out_sequence_can_be_dropped_and_forked():
    memory = make(host_pages=4)
    first = run(memory, range(6))
    memory.swap_out([first])
    memory.take_transfers()
    second = Sequence(first.group, 1, tokens=list(range(4)))
    memory.fork(first, second, num_tokens=4)
    assert second.host_pages == first.host_pages[:1]
    memory.check_invariants([], [first, second])
    memory.drop_host_pages(first)
    assert (first.host_pages, first.num_computed_tokens, first.chain) == ([], 0, [])
    memory.check_invariants([], [second])
    memory.drop_host_pages(second)
    other = run(memory, range(16))
    memory.start_plan()
    assert memory.can_swap_out([other])


def test_without_host_pages_nothing_is_swapped():
    memory = make()
    seq = run(memory, [1])
    assert not memory.can_swap_out([seq])
    assert memory.num_host_pages([seq]) == 0
    for call in (memory.swap_out, memory.swap_in):
        with pytest.raises(PageStateError, match=r"there are no host pages \(CacheConfig.host_pages\)"):
            call([seq])
