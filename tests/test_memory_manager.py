"""The memory manager: pages of sequences from start to release, copies, forks and windows."""

import pytest

from jpaged.sequence import Sequence
from tests.memory_driver import SIZE, compute, end, found, make, new_seq, run

# ---------------------------------------------------------------------------------------------- the prefix cache


def test_a_prompt_finds_what_an_ended_sequence_left():
    memory = make()
    first = run(memory, range(10))
    pages = list(first.pages)
    end(memory, first)
    memory.check_invariants([])
    assert memory.allocator.num_cached == 3
    second = new_seq([*range(9), 50, 51])
    memory.start_plan()
    memory.start(second, memory.find(second))
    assert (second.pages[:2], second.num_computed_tokens, second.num_cached_tokens) == (pages[:2], 9, 9)
    copy = second.pages[2]
    compute(memory, second)
    transfers = memory.take_transfers()
    assert transfers.copies == ((pages[2], copy),)
    assert (memory.num_queried_tokens, memory.num_hit_tokens, memory.num_copied_pages) == (21, 9, 1)
    memory.check_invariants([second])


@pytest.mark.parametrize("length", [8, 9, 11, 12])
def test_a_prompt_that_is_cached_as_a_whole_computes_one_token(length):
    memory = make()
    end(memory, run(memory, range(length)))
    again = new_seq(range(length))
    memory.start_plan()
    memory.start(again, memory.find(again))
    assert again.num_tokens - again.num_computed_tokens == 1
    compute(memory, again)
    copies = memory.take_transfers().copies
    assert len(copies) == (length % SIZE != 1)  # the token alone in its page needs none of the old page
    assert all(copy == again.pages[-1] for _, copy in copies)


def test_two_prompts_in_one_plan_share_what_is_written_in_it_but_copy_nothing_of_it():
    memory = make()
    memory.start_plan()
    first, second = new_seq([*range(10)]), new_seq([*range(6), 50])
    memory.start(first, memory.find(first))
    compute(memory, first)
    memory.start(second, memory.find(second))
    assert (second.pages, second.num_computed_tokens) == (first.pages[:1], 4)  # tokens 4 and 5 are not there yet
    compute(memory, second)
    assert memory.take_transfers().copies == ()
    memory.start_plan()
    third = new_seq([*range(6), 50])
    memory.start(third, memory.find(third))
    assert third.num_computed_tokens == 6
    memory.check_invariants([first, second, third])


def test_a_page_written_by_an_earlier_plan_can_be_copied_though_it_became_known_in_this_one():
    memory = make()
    first = new_seq(range(8))
    memory.start_plan()
    memory.start(first, None)
    memory.append(first, 8)
    first.num_computed_tokens = 8
    memory.take_transfers()
    memory.start_plan()
    memory.commit(first)
    second = new_seq([0, 1, 50])
    assert memory.find(second).partial_page == first.pages[0]


@pytest.mark.parametrize(("length", "num_found"), [(8, 2), (9, 0), (12, 0)])
def test_without_room_for_a_copy_and_its_source_the_tokens_are_computed_again(length, num_found):
    memory = make(num_pages=4)
    end(memory, run(memory, [1, 2, 3]))
    seq = new_seq([1, 2, *range(50, 48 + length)])
    memory.start_plan()
    memory.start(seq, memory.find(seq))
    assert seq.num_computed_tokens == seq.num_cached_tokens == num_found
    compute(memory, seq)  # in one step, whatever it takes
    memory.take_transfers()
    memory.check_invariants([seq])


def test_prompt_logprobs_need_every_token_computed():
    memory = make()
    end(memory, run(memory, range(10)))
    seq = run(memory, range(10), prompt_logprobs=0)
    assert seq.num_cached_tokens == 0


def test_salts_do_not_meet_and_neither_do_weights():
    memory = make(num_pages=40)
    for salt in (None, "", "a", "a|b"):
        assert run(memory, range(10), salt=salt).num_cached_tokens == 0
    for salt in (None, "", "a", "a|b"):
        assert run(memory, range(10), salt=salt).num_cached_tokens == 8
    memory.weights_changed([])
    assert run(memory, range(10)).num_cached_tokens == 0


def test_cached_tokens_are_those_of_the_first_start():
    memory = make()
    end(memory, run(memory, range(8)))
    seq = run(memory, [*range(8), 50, 51])
    assert seq.num_cached_tokens == 8
    memory.release(seq)
    seq.group.num_preemptions = 1
    memory.start_plan()
    memory.start(seq, memory.find(seq))
    assert (seq.num_computed_tokens, seq.num_cached_tokens, memory.num_hit_tokens) == (9, 8, 8)


def test_without_a_prefix_cache_nothing_is_kept():
    memory = make(cache=False)
    seq = run(memory, range(10))
    assert memory.find(seq) is None
    end(memory, seq)
    assert (memory.allocator.num_free, memory.num_queried_tokens) == (19, 0)


def test_a_chain_that_lost_its_pages_is_healed_by_whoever_still_has_them():
    memory = make(num_pages=8)
    first = run(memory, range(9))
    second = run(memory, range(9), prompt_logprobs=0)  # with pages of its own
    assert set(first.pages).isdisjoint(second.pages)
    for token in range(9, 13):
        second.append(token)
    own = list(second.pages)
    compute(memory, second)
    memory.take_transfers()
    end(memory, first)
    assert memory.allocator.num_available == 3
    others = memory.allocator.allocate(3)
    assert found(memory, range(14)).pages == []
    end(memory, second)
    assert found(memory, range(14)).pages[:2] == own[:2]
    memory.allocator.free(others)


# ---------------------------------------------------------------------------------------------- append, fork, release


def test_append_takes_all_or_nothing():
    memory = make(num_pages=4, cache=False)
    seq = new_seq(range(8))
    assert not memory.append(seq, 13)
    assert (seq.pages, memory.allocator.num_free) == ([], 3)
    assert memory.append(seq, 12)
    seq.num_computed_tokens = 12
    other = new_seq([1])
    assert not memory.append(other, 1)
    assert other.pages == []


@pytest.mark.parametrize("holders", [2, 3, 5])
@pytest.mark.parametrize("length", [8, 10])
def test_k_holders_of_a_page_make_k_minus_1_copies(holders, length):
    memory = make(num_pages=40)
    first = run(memory, range(length))
    seqs = [first]
    for index in range(1, holders):
        seqs.append(Sequence(first.group, index, tokens=list(first.tokens)))
        memory.fork(first, seqs[-1])
        assert seqs[-1].writable_end == length
    assert first.writable_end == length
    memory.check_invariants(seqs)
    shared = list(first.pages)
    assert memory.allocator.num_used == len(shared)
    memory.start_plan()
    for index, seq in enumerate(seqs):
        seq.append(50 + index)
        compute(memory, seq)
    copies = memory.take_transfers().copies
    partly = length % SIZE > 0
    assert [source for source, _ in copies] == [shared[-1]] * (holders - 1) * partly
    assert len({seq.pages[-1] for seq in seqs}) == holders  # each writes to its own
    assert all(seq.pages[:2] == shared[:2] for seq in seqs)
    assert not partly or seqs[-1].pages == shared  # the last one needs no copy
    assert memory.num_copied_pages == len(copies)
    memory.check_invariants(seqs)


def test_a_fork_may_end_within_a_page_and_never_writes_to_what_others_may_find():
    memory = make()
    parent = run(memory, range(12))
    pages = list(parent.pages)
    child = Sequence(parent.group, 1, tokens=[*range(6), 50])
    memory.fork(parent, child, num_tokens=6)
    assert (child.pages, child.num_computed_tokens, len(child.chain)) == (pages[:2], 6, 2)
    end(memory, parent)  # its pages stay, since the cache may give them to others; one of them is the child's alone
    memory.start_plan()
    compute(memory, child)
    assert memory.take_transfers().copies == ((pages[1], child.pages[1]),)
    assert found(memory, range(13)).pages == pages
    memory.check_invariants([child])


def test_the_source_of_a_copy_is_kept_until_the_plan_is_made():
    memory = make(num_pages=4)
    first = run(memory, [1, 2])
    second = Sequence(first.group, 1, tokens=[1, 2, 3])
    memory.fork(first, second)
    memory.start_plan()
    source = first.pages[0]
    compute(memory, second)
    end(memory, first)
    other = new_seq(range(50, 62))
    assert not memory.append(other, 8)  # two pages: the source is not one of them
    memory.append(other, 4)
    assert source not in other.pages
    assert memory.take_transfers().copies == ((source, second.pages[0]),)
    assert memory.append(other, 8)
    memory.check_invariants([second, other])


def test_a_copy_for_a_sequence_that_is_released_in_the_same_plan_is_not_made():
    memory = make()
    first = run(memory, [1, 2])
    second, third = (Sequence(first.group, index, tokens=[1, 2, 3]) for index in (1, 2))
    memory.fork(first, second)
    memory.fork(first, third)
    memory.start_plan()
    for seq in (second, third):
        assert memory.append(seq, 1)
    dropped, kept = second.pages[0], third.pages[0]
    end(memory, second)
    assert memory.allocator.ref_count(dropped) == 0
    assert memory.take_transfers().copies == ((first.pages[0], kept),)
    memory.check_invariants([first, third])


def test_a_copy_that_a_fork_still_wants_is_made_and_a_copy_of_it_has_the_same_source():
    memory = make()
    ended = run(memory, [1, 2, 3])
    [source] = ended.pages
    end(memory, ended)
    first = new_seq([1, 2, 50])
    memory.start_plan()
    memory.start(first, memory.find(first))
    second = Sequence(first.group, 1, tokens=[1, 2, 51])
    memory.fork(first, second)
    compute(memory, first)  # writes to a copy of what is a copy itself
    assert memory._pending.take().copies == ((source, second.pages[0]), (source, first.pages[0]))
    memory.check_invariants([first, second])


def test_a_copy_that_a_fork_holds_is_made_though_the_first_sequence_is_released():
    memory = make()
    end(memory, run(memory, [1, 2, 3]))
    first = new_seq([1, 2, 50])
    memory.start_plan()
    memory.start(first, memory.find(first))
    second = Sequence(first.group, 1, tokens=[1, 2, 51])
    memory.fork(first, second)
    end(memory, first)
    assert [copy for _, copy in memory.take_transfers().copies] == second.pages
    memory.check_invariants([second])


def test_release_enters_the_tail_unless_somebody_may_write_to_it():
    memory = make()
    first = run(memory, range(6))
    second = Sequence(first.group, 1, tokens=list(first.tokens))
    memory.fork(first, second)
    end(memory, first)
    assert found(memory, range(7)).num_tokens == 4
    end(memory, second)
    assert found(memory, range(7)).num_tokens == 6
    assert memory.allocator.num_cached == 2


def test_tokens_in_flight_are_not_entered():
    memory = make()
    seq = run(memory, range(7))
    memory.start_plan()
    for _ in range(3):
        seq.num_tokens += 1
        compute(memory, seq)
    assert len(seq.chain) == 2  # the eighth token is computed, and not known
    seq.tokens.append(7)
    memory.take_transfers()
    end(memory, seq)
    assert found(memory, range(12)).num_tokens == 8


# ---------------------------------------------------------------------------------------------- windows


def test_pages_left_of_the_window_are_given_back_and_null_pages_stand_in_their_place():
    memory = make(window=5)
    seq = run(memory, range(12))
    pages, version = list(seq.pages), seq.pages_version
    assert len(pages) == 3
    seq.append(12)
    memory.start_plan()
    compute(memory, seq)
    assert seq.pages[:3] == [0, 0, pages[2]]  # token 12 sees 8 to 12
    assert seq.pages_version > version
    assert memory.allocator.num_used == 2
    assert memory.allocator.num_cached == 2
    memory.take_transfers()
    memory.check_invariants([seq])
    assert found(memory, range(13)).pages == [0, 0, pages[2]]
    end(memory, seq)
    assert memory.allocator.num_used == 0


@pytest.mark.parametrize(("window", "chunk"), [(1, 1), (3, 1), (4, 4), (5, 3), (9, 7), (16, 1)])
def test_a_sequence_never_holds_more_than_it_is_said_to(window, chunk):
    memory = make(num_pages=40, window=window)
    seq = new_seq(range(60))
    memory.start(seq, None)
    most = 0
    while seq.num_computed_tokens < 60:
        memory.start_plan()
        compute(memory, seq, min(chunk, 60 - seq.num_computed_tokens))
        most = max(most, sum(page > 0 for page in seq.pages))
        first_seen = max(seq.num_computed_tokens - window, 0) // SIZE
        assert all(seq.pages[first_seen:])
    assert most <= memory.pages_at_most(60, chunk) <= 15
    assert memory.pages_at_most(60, chunk) <= most + 1  # and no promise that is far too high
    assert make(window=None).pages_at_most(60, chunk) == 15


def test_a_fork_and_a_swap_keep_the_null_pages():
    memory = make(window=5, host_pages=8)
    parent = run(memory, range(13))
    parent.append(13)
    memory.start_plan()
    compute(memory, parent)
    child = Sequence(parent.group, 1, tokens=list(parent.tokens))
    memory.fork(parent, child)
    assert child.pages == parent.pages == [0, 0, *parent.pages[2:]]
    memory.start_plan()
    memory.swap_out([parent, child])
    assert parent.host_pages == child.host_pages == [0, 0, 1, 2]
    memory.take_transfers()
    memory.prefix_cache.reset()
    memory.swap_in([parent, child])
    memory.take_transfers()
    assert parent.pages[:2] == child.pages[:2] == [0, 0]
    memory.check_invariants([parent, child])


# ---------------------------------------------------------------------------------------------- numbers for admission


def test_num_pages_taken_counts_new_and_revived_pages():
    memory = make()
    first = run(memory, range(8))
    seq = new_seq([*range(8), 50])
    assert memory.num_pages_taken(None, 9, chunk=16) == 3
    assert memory.num_pages_taken(memory.find(seq), 9, chunk=16) == 1  # two are in use already
    end(memory, first)
    available = memory.allocator.num_available
    taken = memory.num_pages_taken(memory.find(seq), 9, chunk=16)
    assert taken == 3  # cached ones are available no more
    memory.start_plan()
    memory.start(seq, memory.find(seq))
    compute(memory, seq)
    assert memory.allocator.num_available == available - taken


def test_num_pages_taken_with_a_window():
    memory = make(num_pages=40, window=5)
    end(memory, run(memory, range(40)))
    seq = new_seq([*range(40), *range(60, 100)])
    hit = memory.find(seq)
    assert sum(page > 0 for page in hit.pages) == 1
    assert memory.num_pages_taken(None, 80, chunk=4) == memory.pages_at_most(80, 4) == 4
    assert memory.num_pages_taken(hit, 80, chunk=4) == 4  # one of them is there: it is revived
