"""Pinned prefixes, and what a change of the weights does to them and to all others."""

import pytest

from jpaged.errors import PageStateError
from jpaged.memory_manager import MemoryManager
from jpaged.sequence import Sequence
from tests.memory_driver import compute, end, found, make, new_seq, run


def pin(memory: MemoryManager, tokens, name: str = "p", **more) -> Sequence:
    memory.promise_pin(name, len(tokens))
    seq = new_seq(tokens, **more)
    memory.start_plan()
    memory.start(seq, memory.find(seq))
    compute(memory, seq)
    memory.pin(name, seq)
    memory.take_transfers()
    return seq


def test_pins_hold_pages_and_lower_the_capacity():
    memory = make(num_pages=10)
    assert memory.capacity == 9
    memory.promise_pin("p", 6)
    assert memory.capacity == 7
    seq = pin(memory, range(6))
    pages = list(seq.pages)
    end(memory, seq)
    memory.check_invariants([])
    assert (memory.capacity, memory.pins.num_pages, memory.allocator.num_used) == (7, 2, 2)
    others = memory.allocator.allocate(7)
    hit = found(memory, range(7))
    assert (hit.pages, hit.partial_page) == (pages[:1], pages[1])  # all that was pinned is found, the tail too
    memory.allocator.free(others)
    pin(memory, range(4), "q")
    assert memory.pins.num_pages == 2  # its page is pinned already
    assert memory.pins.unpin("p")
    assert memory.pins.num_pages == 1
    assert not memory.pins.unpin("p")
    assert memory.pins.unpin("q")
    assert memory.capacity == 9


def test_a_request_that_shares_pinned_pages_may_have_them_beside_the_capacity():
    memory = make(num_pages=10)
    end(memory, pin(memory, range(24), salt="a"))
    assert memory.capacity == 3
    more = [*range(24), 50]
    assert memory.capacity_for(new_seq(more, salt="a").request) == 9
    assert memory.capacity_for(new_seq(range(9), salt="a").request) == 5
    assert memory.capacity_for(new_seq(more).request) == 3
    assert memory.capacity_for(new_seq(more, salt="a", prompt_logprobs=0).request) == 3
    seq = run(memory, [*range(24), *range(50, 62)], salt="a")  # nine pages, of nine
    memory.check_invariants([seq])


def test_a_promise_ends_when_it_is_taken_back_or_cannot_be_kept():
    memory = make(num_pages=10)
    memory.promise_pin("p", 6)
    assert memory.pins.unpin("p")
    memory.promise_pin("p", 6)
    memory.pins.drop_promise("p")
    seq = run(memory, range(6))
    memory.pin("p", seq)
    assert memory.pins.num_pages == 0
    memory.promise_pin("p", 6)
    memory.weights_changed([seq])
    memory.pin("p", seq)
    assert (memory.pins.num_pages, memory.capacity) == (0, 9)


def test_weights_change():
    memory = make(num_pages=20, host_pages=8)
    running, swapped = run(memory, range(9)), run(memory, range(50, 59))
    pinned, ended = pin(memory, range(70, 75)), run(memory, range(80, 89))
    end(memory, pinned, ended)
    memory.swap_out([swapped])
    memory.take_transfers()
    memory.weights_changed([running, swapped])
    assert (memory.weight_version, memory.prefix_cache.num_entries, memory.pins.num_pages) == (1, 0, 0)
    assert (memory.allocator.num_cached, memory.allocator.num_used) == (0, 3)
    memory.swap_in([swapped])
    memory.take_transfers()
    for seq in (running, swapped):
        for token in range(3):
            seq.append(token)
        memory.start_plan()
        compute(memory, seq)
    end(memory, running, swapped)
    assert memory.prefix_cache.num_entries == 0  # both mix old and new weights
    assert memory.allocator.num_free == 19
    memory.check_invariants([])


@pytest.mark.parametrize("where", ["device", "host", "cache"])
def test_check_invariants_sees_what_nobody_holds(where):
    memory = make(host_pages=4)
    seq = run(memory, range(6))
    memory.check_invariants([seq])
    if where == "device":
        memory.allocator.allocate(1)
    elif where == "host":
        seq.host_pages = [1]
    else:
        memory.prefix_cache._newest.clear()
    with pytest.raises(PageStateError):
        memory.check_invariants([seq], [seq])
