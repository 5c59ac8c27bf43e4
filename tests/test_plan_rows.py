"""The rows of a step, in their order."""

import numpy as np

from jpaged.plan_rows import PlanRows
from jpaged.request import Request, SamplingParams
from jpaged.running_table import RunningRows, RunningTable
from jpaged.sequence import Sequence, SequenceGroup
from jpaged.step_plan import PageTransfers


class Run:
    """Sequences that run, and the rows of a step that is planned of them."""

    def __init__(self, max_num_tokens: int) -> None:
        self.table = RunningTable(num_entries=8)
        self.rows = PlanRows(self.table)
        self.rows.leave(max_num_tokens)
        self.seqs: list[Sequence] = []

    def add(self, num_prompt: int, num_computed: int = 0) -> Sequence:
        request = Request(request_id="a", prompt_token_ids=tuple(range(num_prompt)), params=SamplingParams())
        return self.begin(SequenceGroup(request).seqs[0], num_computed)

    def fork(self, parent: Sequence) -> Sequence:
        return self.begin(Sequence(parent.group, 1, tokens=parent.tokens), parent.num_computed_tokens)

    def begin(self, seq: Sequence, num_computed: int) -> Sequence:
        self.table.begin(seq, len(self.seqs))
        seq.num_computed_tokens = num_computed
        self.seqs.append(seq)
        return seq

    def decode(self, *seqs: Sequence) -> None:
        self.rows.decode(RunningRows(self.seqs[:]), np.array([seq in seqs for seq in self.seqs]))


def counts(*seqs: Sequence) -> list[tuple[int, int]]:
    return [(seq.num_computed_tokens, seq.num_pending) for seq in seqs]


def test_rows_of_one_token_stand_first_then_others_then_forks():
    run = Run(20)
    rows, long, short, resumed, last = run.rows, run.add(9), run.add(3), run.add(8, 7), run.add(5, 4)
    run.decode(last)
    rows.count_decoding()
    rows.add(long, 6, samples=False)
    rows.add(resumed, 1, samples=True)
    rows.add(short, 3, samples=True)
    child = run.fork(short)
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
    assert plan.entries.tolist() == [3, 2, 0, 1, 4]
    assert plan.versions.tolist() == [[0, seq.run] for seq in (last, resumed, long, short, child)]
    assert not plan.from_device.any()
    assert (plan.num_decode, plan.num_tokens, plan.num_seqs, rows.budget) == (2, 11, 5, 9)
    assert (plan.transfers, plan.admitted, plan.preempted) == (transfers, (short, child), (long.group,))


def test_rows_count_as_computed_and_samples_as_pending():
    run = Run(8)
    rows, seq = run.rows, run.add(6)
    rows.add(seq, 4, samples=False)
    assert counts(seq) == [(4, 0)]
    rows.add(seq, 2, samples=True)
    assert (counts(seq), rows.budget) == ([(6, 1)], 2)


def test_the_device_knows_what_it_sampled_itself():
    run = Run(8)
    run.add(4)
    seq, other = run.add(4, 3), run.add(6, 5)
    run.decode(seq, other)
    run.rows.count_decoding()
    assert run.rows.build(PageTransfers()).from_device.tolist() == [False, False]
    run.rows = PlanRows(run.table)
    seq.tokens.append(7)  # it was read, which changes nothing
    run.decode(seq, other)
    run.rows.count_decoding()
    plan = run.rows.build(PageTransfers())
    assert ([row.start for row in plan.rows], plan.from_device.tolist()) == ([4, 6], [True, True])


def test_decoding_rows_can_be_taken_back_and_others_hold_their_group():
    run = Run(8)
    rows, first, second, third, chunk = run.rows, run.add(4, 3), run.add(5, 4), run.add(7, 6), run.add(3)
    sibling = run.fork(first)
    assert not rows
    run.decode(first, second, third, sibling)
    rows.drop_decoding(third.group)  # before they are counted
    rows.count_decoding()
    rows.add(chunk, 2, samples=False)
    assert [rows.holds_chunk_of(seq.group) for seq in (first, second, chunk)] == [False, False, True]
    assert counts(first, sibling, second, third) == [(4, 1), (4, 1), (5, 1), (6, 0)]
    assert rows.budget == 3
    rows.drop_decoding(first.group)
    assert counts(first, sibling, second, third) == [(3, 0), (3, 0), (5, 1), (6, 0)]
    assert rows.budget == 5
    rows.drop_decoding(second.group)
    assert rows
    plan = rows.build(PageTransfers())
    assert (plan.seqs, plan.starts.tolist(), plan.q_lens.tolist(), plan.num_decode) == ([chunk], [0], [2], 0)


def test_what_is_left_is_beside_the_rows_so_far():
    run = Run(8)
    rows, first, second, chunk = run.rows, run.add(4, 3), run.add(5, 4), run.add(9)
    run.decode(first, second)
    rows.count_decoding()
    assert (rows.num_tokens, rows.budget) == (2, 6)
    rows.leave(20)  # more than before
    assert (rows.num_tokens, rows.budget) == (2, 20)
    rows.leave(5)
    rows.add(chunk, 4, samples=False)
    assert (rows.num_tokens, rows.budget) == (6, 1)
    rows.drop_decoding(first.group)
    assert (rows.num_tokens, rows.budget) == (5, 2)
