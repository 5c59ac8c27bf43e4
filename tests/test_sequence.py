"""What a sequence and its group count."""

import pytest

from jpaged.request import Request, SamplingParams
from jpaged.sequence import Sequence, SequenceGroup, SequenceStatus


def make_group(seed: int = 0) -> SequenceGroup:
    return SequenceGroup(Request(request_id="a", prompt_token_ids=(5, 6, 7), params=SamplingParams(), seed=seed))


def test_a_sequence_counts_read_and_pending_output():
    [seq], [other] = make_group().seqs, make_group().seqs
    assert (seq.num_prompt_tokens, seq.num_tokens, seq.num_output_tokens, seq.output_token_ids) == (3, 3, 0, [])
    seq.append(8)
    seq.num_tokens += 2
    assert seq.num_pending == 2
    assert (seq.num_prompt_tokens, seq.num_tokens, seq.num_output_tokens, seq.output_token_ids) == (3, 6, 3, [8])
    assert other.tokens == list(other.request.prompt_token_ids) == [5, 6, 7]
    assert seq != other  # two sequences are never equal, whatever they hold
    assert len({seq, other}) == 2
    assert not seq.is_finished
    seq.status = SequenceStatus.FINISHED
    assert seq.is_finished


@pytest.mark.parametrize(("seed", "seeds"), [(7, [7, 8, 9]), (2**63 - 2, [2**63 - 2, 2**63 - 1, 0])])
def test_each_answer_samples_with_a_seed_of_its_own(seed, seeds):
    group = make_group(seed)
    assert [Sequence(group, index).seed for index in range(3)] == seeds


def test_a_group_is_live_as_long_as_one_of_its_sequences():
    group = make_group()
    group.seqs.append(Sequence(group, 1, num_tokens=2))
    group.seqs[0].num_tokens += 1
    assert (group.live, group.num_pending) == (group.seqs, 3)
    group.seqs[0].status = SequenceStatus.FINISHED
    assert group.live == group.seqs[1:]
    assert not group.is_finished  # whoever finishes the last one says so
    group.status = SequenceStatus.FINISHED
    assert group.is_finished


def test_their_representation_ends():
    group = make_group()
    assert group.seqs[0].request is group.request
    assert len(repr(group)) < 3000
    assert "tokens=[5, 6, 7]" in repr(group.seqs[0])
