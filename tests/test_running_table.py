"""One copy of what is counted of a sequence, wherever it is."""

import pytest

from jpaged.errors import PageStateError
from jpaged.request import Request, SamplingParams
from jpaged.running_table import RunningRows, RunningTable
from jpaged.sequence import COUNTERS, LIMIT, NUM_TOKENS, RUN, Sequence, SequenceGroup


def make_seq(num_prompt: int = 3) -> Sequence:
    request = Request(request_id="a", prompt_token_ids=tuple(range(num_prompt)), params=SamplingParams())
    return SequenceGroup(request).seqs[0]


def test_counters_come_and_go_with_the_sequence():
    table, seq, other = RunningTable(4), make_seq(), make_seq(5)
    seq.limit = 9
    table.begin(seq, 2)
    table.begin(other, 0)
    assert table.counters[[2, 0], NUM_TOKENS].tolist() == [3, 5]
    assert table.num_running == 2
    assert table.counters[2, LIMIT] == 9
    seq.append(7)
    table.add(NUM_TOKENS, RunningRows([other, seq]).entries, 2)
    assert (seq.num_tokens, seq.num_pending, other.num_tokens, other.num_pending) == (6, 2, 7, 2)
    assert table.end(seq) == 2
    assert table.num_running == 1
    assert not table.counters[2].any()
    assert (seq.num_tokens, seq.limit, seq.run, seq.state_index) == (6, 9, 0, None)
    table.counters[2] += 1  # is nobody's
    assert seq.num_tokens == 6


def test_no_two_runs_are_alike():
    table, seq, other = RunningTable(2), make_seq(), make_seq()
    runs = set()
    for index in (0, 1, 0):
        table.begin(seq, index)
        table.begin(other, 1 - index)
        assert table.counters[[index, 1 - index], RUN].tolist() == [seq.run, other.run]
        runs |= {seq.run, other.run}
        table.end(seq)
        table.end(other)
    assert len(runs) == 6
    assert 0 not in runs


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda table, seq: setattr(seq, "state_index", None), "without a state index"),
        (lambda table, seq: setattr(seq, "state_index", 0), "row 0 of the table is not its own"),
        (lambda table, seq: setattr(seq, "counters", list(seq.counters)), "row 1 of the table is not its own"),
        (lambda table, seq: setattr(seq, "run", 0), "'a' runs as Sequence"),
        (lambda table, seq: seq.tokens.append(9), "num_tokens=3"),
        (lambda table, seq: table.counters.__setitem__((0, LIMIT), 1), "rows of nobody are not empty"),
    ],
)
def test_check_invariants_sees_damage(damage, match):
    table, seq = RunningTable(2), make_seq()
    table.begin(seq, 1)
    table.check_invariants([seq])
    damage(table, seq)
    with pytest.raises(PageStateError, match=match):
        table.check_invariants([seq])


def test_rows_without_one():
    table, seqs = RunningTable(4), [make_seq() for _ in range(3)]
    for index, seq in zip((3, 0, 2), seqs, strict=True):
        table.begin(seq, index)
    seqs[2].mask_position = -1
    rows = RunningRows(seqs)
    fewer = rows.without(seqs[1])
    assert (rows.seqs, rows.entries.tolist(), rows.masked.tolist()) == (seqs, [3, 0, 2], [2])
    assert (fewer.seqs, fewer.entries.tolist(), fewer.masked.tolist()) == ([seqs[0], seqs[2]], [3, 2], [1])


def test_a_counter_that_there_is_not_is_refused():
    with pytest.raises(TypeError, match="has no num_pages"):
        Sequence(make_seq().group, num_pages=1)
    assert Sequence(make_seq().group, limit=4).counters[COUNTERS.index("limit")] == 4
