"""Chains of sequences that compute the same tokens, when pages of one of them go."""

from jpaged.memory_manager import MemoryManager
from jpaged.prefix_chain import cut_chain, extend_chain, key_of
from jpaged.request import Request, SamplingParams
from jpaged.sequence import Sequence, SequenceGroup

PAGE = 2


def computed(memory: MemoryManager, *tokens: int, salt: str | None = None) -> Sequence:
    """A sequence with pages of its own, all tokens computed, whose chain has only begun."""
    request = Request(request_id="a", prompt_token_ids=tokens, params=SamplingParams(), cache_salt=salt)
    (seq,) = SequenceGroup(request).seqs
    memory.start(seq, None)
    assert memory.append(seq, len(tokens))
    seq.num_computed_tokens = len(tokens)
    return seq


def extend(memory: MemoryManager, seq: Sequence) -> list[int | None]:
    assert memory.prefix_cache is not None
    extend_chain(memory.prefix_cache, seq, PAGE, memory.weight_version)
    return [entry.page for entry in seq.chain[1:]]


def test_full_pages_are_entered_once_they_are_computed_and_known():
    memory = MemoryManager.for_pool(9, PAGE)
    seq = computed(memory, 1, 2, 3, 4, 5)
    assert extend(memory, seq) == seq.pages[:2]
    seq.num_tokens += 1  # sampled, and not read
    seq.num_computed_tokens += 1
    assert extend(memory, seq) == seq.pages[:2]
    seq.tokens.append(6)
    assert extend(memory, seq) == extend(memory, seq) == seq.pages


def test_the_pages_of_whoever_was_first_are_entered_until_they_go():
    memory = MemoryManager.for_pool(9, PAGE)
    first, second = computed(memory, 1, 2, 3, 4), computed(memory, 1, 2, 3, 4)
    assert extend(memory, first) == extend(memory, second) == first.pages
    memory.release(first)
    memory.allocator.free(memory.allocator.allocate(memory.allocator.num_available))  # evicts them
    cut_chain(second)
    assert len(second.chain) == 1
    assert extend(memory, second) == second.pages


def test_a_salt_and_other_weights_are_other_keys():
    memory = MemoryManager.for_pool(17, PAGE)
    plain, salted = computed(memory, 1, 2), computed(memory, 1, 2, salt="x")
    assert [extend(memory, seq) for seq in (plain, salted)] == [plain.pages, salted.pages]
    keys = {key_of(seq.request, version) for seq in (plain, salted) for version in (0, 1)}
    assert len(keys) == 4
