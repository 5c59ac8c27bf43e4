"""The rows of a step, in their order."""

from jpaged.plan_rows import PlanRows
from jpaged.request import Request, SamplingParams
from jpaged.sequence import Sequence, SequenceGroup
from jpaged.step_plan import PageTransfers


def make_seq(num_prompt: int, num_computed: int = 0) -> Sequence:
    request = Request(request_id="a", prompt_token_ids=tuple(range(num_prompt)), params=SamplingParams())
    seq = SequenceGroup(request).seqs[0]
    seq.num_computed_tokens = num_computed
    return seq


def decode(rows: PlanRows, seq: Sequence) -> None:
    seq.num_computed_tokens += 1
    seq.num_pending += 1
    rows.decoding.append(seq)


def test_rows_of_one_token_stand_first_then_others_then_forks():
    rows = PlanRows(20)
    long, short, resumed, last = make_seq(9), make_seq(3), make_seq(8, 7), make_seq(5, 4)
    decode(rows, last)
    rows.add(long, 6, samples=False)
    rows.add(resumed, 1, samples=True)
    rows.add(short, 3, samples=True)
    child = Sequence(short.group, 1, tokens=list(short.tokens), num_computed_tokens=short.num_computed_tokens)
    rows.add_fork(child, short)
    rows.admitted += [short, child]
    rows.preempted.append(long.group)
    transfers = PageTransfers(copies=((1, 2),))
    plan = rows.build(transfers)
    assert [row[:4] for row in plan.rows] == [
        (last, 4, 1, True),
        (resumed, 7, 1, True),
        (long, 0, 6, False),
        (short, 0, 3, True),
        (child, 3, 0, True),
    ]
    assert [row.source for row in plan.rows] == [0, 1, 2, 3, 3]  # the fork samples from its parent's last token
    assert [row.kv_len for row in plan.rows] == [5, 8, 6, 3, 3]
    assert (plan.num_decode, plan.num_tokens, plan.num_seqs, rows.budget) == (2, 11, 5, 9)
    assert (plan.transfers, plan.admitted, plan.preempted) == (transfers, (short, child), (long.group,))


def test_rows_count_as_computed_and_samples_as_pending():
    rows, seq = PlanRows(8), make_seq(6)
    rows.add(seq, 4, samples=False)
    assert (seq.num_computed_tokens, seq.num_pending) == (4, 0)
    rows.add(seq, 2, samples=True)
    assert (seq.num_computed_tokens, seq.num_pending, rows.budget) == (6, 1, 2)


def test_decoding_rows_can_be_taken_back_and_others_hold_their_group():
    rows, first, second, chunk = PlanRows(8), make_seq(4, 3), make_seq(5, 4), make_seq(3)
    assert not rows
    for seq in (first, second):
        decode(rows, seq)
    sibling = Sequence(first.group, 1, tokens=list(first.tokens), num_computed_tokens=3)
    decode(rows, sibling)
    rows.add(chunk, 2, samples=False)
    assert [rows.holds_chunk_of(seq.group) for seq in (first, second, chunk)] == [False, False, True]
    rows.drop_decoding(first.group)
    assert rows.decoding == [second]
    assert [(seq.num_computed_tokens, seq.num_pending) for seq in (first, sibling, second)] == [(3, 0), (3, 0), (5, 1)]
    assert rows.budget == 5
    rows.drop_decoding(second.group)
    assert rows
    plan = rows.build(PageTransfers())
    assert (plan.seqs, plan.starts, plan.q_lens, plan.num_decode) == ([chunk], [0], [2], 0)
