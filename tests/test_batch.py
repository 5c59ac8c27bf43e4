"""A packed plan, unpacked on the device, says the same as the plan."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.batch import MAX_IN_FLIGHT, BatchPacker, packed_size, unpack
from jpaged.config import SchedulerConfig, StepShape
from jpaged.drafts import Drafts
from jpaged.memory_manager import MemoryManager
from jpaged.request import Request, SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.sequence import Sequence, SequenceGroup
from jpaged.step_plan import PlannedRow
from jpaged.step_programs import StepNeeds
from tests.plans import plan_of_rows

PAGE, SEQS = 8, 4
SHAPES = (StepShape(4, 4, 2), StepShape(4, 4, 6), StepShape(32, 4, 6))


def make_scheduler() -> Scheduler:
    config = SchedulerConfig(max_num_seqs=SEQS, max_num_batched_tokens=32)
    return Scheduler(config, MemoryManager.for_pool(40, PAGE), max_model_len=48)


def add(scheduler: Scheduler, name: str, tokens: list[int], **params) -> Sequence:
    options = {"temperature": 0.0, "max_tokens": 8, **params}
    request = Request(request_id=name, prompt_token_ids=tuple(tokens), params=SamplingParams(**options), seed=7)
    group = SequenceGroup(request)
    scheduler.add(group)
    return group.seqs[0]


def check(plan, inputs, shape):
    """Compares the unpacked inputs with the plan, row by row and token by token."""
    meta = inputs.meta
    rows = list(plan.rows)
    attending = [row for row in rows if row.num_tokens]  # forks stand behind them
    assert int(meta.num_seqs) == len(attending)
    assert int(meta.num_decode) == plan.num_decode
    cu_q_lens = np.asarray(meta.cu_q_lens)
    at, ends = 0, []
    for index, row in enumerate(rows):
        seq, end = row.seq, at + row.num_tokens
        assert cu_q_lens[index : index + 2].tolist() == [at, end]
        positions = list(range(row.start, row.start + row.num_tokens))
        assert meta.positions[at:end].tolist() == positions
        assert meta.slot_mapping[at:end].tolist() == [seq.pages[p // PAGE] * PAGE + p % PAGE for p in positions]
        if index < len(attending):
            assert int(meta.kv_lens[index]) == row.start + row.num_tokens
            table = np.asarray(meta.page_table[index]).tolist()
            assert table == seq.pages + [0] * (shape.pages_per_row - len(seq.pages))
        ends.append(end)
        assert int(inputs.source[index]) == ends[row.source] - 1
        assert int(inputs.sampling.state_index[index]) == seq.state_index
        assert int(inputs.sampling.position[index]) == row.kv_len
        at = end
    assert cu_q_lens[len(rows) :].tolist() == [at] * (shape.num_rows + 1 - len(rows))
    for padding in (inputs.tokens, meta.positions, meta.slot_mapping, inputs.next_tokens):
        assert not np.asarray(padding)[at:].any()
    assert not np.asarray(meta.page_table)[len(attending) :].any()
    assert not np.asarray(meta.kv_lens)[len(attending) :].any()
    assert np.asarray(inputs.source)[len(rows) :].tolist() == [0] * (shape.num_rows - len(rows))


def test_plans_survive_packing_through_a_whole_run():
    scheduler = make_scheduler()
    packer = BatchPacker(SHAPES, page_size=PAGE, max_num_seqs=SEQS)
    for index, length in enumerate([3, 9, 20, 1, 5, 17, 12]):
        add(scheduler, f"{index}", list(range(10 * index + 1, 10 * index + 1 + length)))
    shapes = set()
    while (plan := scheduler.plan()) is not None:
        packed, shape = packer.pack(plan)
        shapes.add(shape)
        assert packed.shape == (packed_size(shape),)
        inputs = unpack(jnp.asarray(packed), shape)
        known = []
        for row in plan.rows:
            known += row.seq.tokens[row.start : row.kv_len]
            if row.kv_len > row.seq.num_prompt_tokens:  # sampled on the device, which need not be told
                known[-1] = -1 - row.seq.state_index
        assert inputs.tokens[: plan.num_tokens].tolist() == known
        check(plan, inputs, shape)
        scheduler.update(plan, [50] * plan.num_seqs)
    assert shapes == {SHAPES[1], SHAPES[2]}


def test_a_token_in_flight_is_named_by_its_state_entry():
    scheduler = make_scheduler()
    packer = BatchPacker(SHAPES, page_size=PAGE, max_num_seqs=SEQS)
    add(scheduler, "a", [1, 2])
    add(scheduler, "b", [3])
    first, ahead = scheduler.plan(), scheduler.plan()
    packer.pack(first)
    packed, shape = packer.pack(ahead)
    inputs = unpack(jnp.asarray(packed), shape)
    assert inputs.tokens[:2].tolist() == [-1 - row.seq.state_index for row in ahead.rows]
    check(ahead, inputs, shape)


def test_next_tokens_stop_at_the_end_of_the_prompt():
    scheduler = make_scheduler()
    packer = BatchPacker(SHAPES, page_size=PAGE, max_num_seqs=SEQS)
    add(scheduler, "plain", [1, 2])
    add(scheduler, "asks", list(range(5, 45)), prompt_logprobs=1)
    following = []
    while len(following) < 40:
        plan = scheduler.plan()
        packed, shape = packer.pack(plan)
        inputs = unpack(jnp.asarray(packed), shape)
        at = 0
        for row in plan.rows:
            if row.seq.request.request_id == "asks":
                assert StepNeeds.read(packed, shape).prompt_logprobs
                following += inputs.next_tokens[at : at + row.num_tokens].tolist()
            else:
                assert not inputs.next_tokens[at : at + row.num_tokens].any()
            at += row.num_tokens
        scheduler.update(plan, [50] * plan.num_seqs)
    assert following == [*range(6, 45), 0]
    packed, shape = packer.pack(scheduler.plan())
    assert not StepNeeds.read(packed, shape).prompt_logprobs


def test_a_reused_state_entry_shows_none_of_its_former_pages():
    scheduler = make_scheduler()
    packer = BatchPacker(SHAPES, page_size=PAGE, max_num_seqs=SEQS)
    long = add(scheduler, "long", list(range(1, 20)))
    packer.pack(scheduler.plan())
    entry = long.state_index
    scheduler.abort("long")
    short = add(scheduler, "long", [1])  # the same id may come back
    plan = scheduler.plan()
    assert short.state_index == entry
    packed, shape = packer.pack(plan)
    check(plan, unpack(jnp.asarray(packed), shape), shape)


def test_an_array_comes_again_when_its_step_has_read_it():
    scheduler = make_scheduler()
    packer = BatchPacker(SHAPES[2:], page_size=PAGE, max_num_seqs=SEQS)
    for index in range(3):
        add(scheduler, f"{index}", list(range(1, 15 - 5 * index)), max_tokens=20 - 8 * index, min_tokens=2)
    packed = []
    for _ in range(2 * MAX_IN_FLIGHT):
        plan = scheduler.plan()
        packed.append(packer.pack(plan)[0])
        # Whatever an array held before: one that is new holds the same.
        fresh = BatchPacker(SHAPES[2:], page_size=PAGE, max_num_seqs=SEQS).pack(plan)[0]
        np.testing.assert_array_equal(packed[-1], fresh)
        scheduler.update(plan, [50] * plan.num_seqs)
    assert len({id(array) for array in packed}) == MAX_IN_FLIGHT
    assert all(packed[index] is packed[index + MAX_IN_FLIGHT] for index in range(MAX_IN_FLIGHT))


def test_a_plan_that_fits_no_shape_is_named():
    scheduler = make_scheduler()
    packer = BatchPacker(SHAPES[:1], page_size=PAGE, max_num_seqs=SEQS)
    add(scheduler, "a", [1] * 9)
    with pytest.raises(RuntimeError, match="9 tokens, 1 rows and 2 pages"):
        packer.pack(scheduler.plan())


def test_forks_sample_after_their_parents_last_token_and_attend_to_nothing():
    scheduler = make_scheduler()
    packer = BatchPacker(SHAPES, page_size=PAGE, max_num_seqs=SEQS)
    alone = add(scheduler, "alone", [1, 2])
    parent = add(scheduler, "forks", list(range(5, 16)), temperature=1.0, n=3)
    plan = scheduler.plan()
    packed, shape = packer.pack(plan)
    inputs = unpack(jnp.asarray(packed), shape)
    assert [row.seq.index for row in plan.rows] == [0, 0, 1, 2]
    assert plan.seqs[:2] == [alone, parent]
    check(plan, inputs, shape)
    assert inputs.source.tolist() == [1, 12, 12, 12]
    seeds = (inputs.sampling.seed_high.astype(jnp.uint32), inputs.sampling.seed_low)
    assert [seed.tolist() for seed in seeds] == [[0] * 4, [7, 7, 8, 9]]
    # The tokens that they sampled go into pages of their own: the table follows the copy of the last one.
    scheduler.update(plan, [50] * plan.num_seqs)
    plan = scheduler.plan()
    assert len(plan.transfers.copies) == 2
    packed, shape = packer.pack(plan)
    inputs = unpack(jnp.asarray(packed), shape)
    check(plan, inputs, shape)
    assert len(set(inputs.meta.slot_mapping[:4].tolist())) == 4


def test_a_prompt_of_one_token_with_forks_takes_a_shape_with_rows_for_them():
    scheduler = make_scheduler()
    packer = BatchPacker((StepShape(1, 1, 6), *SHAPES[1:]), page_size=PAGE, max_num_seqs=SEQS)
    add(scheduler, "forks", [5], temperature=1.0, n=4)
    plan = scheduler.plan()
    packed, shape = packer.pack(plan)
    assert (plan.num_tokens, plan.num_seqs, shape) == (1, 4, SHAPES[1])
    check(plan, unpack(jnp.asarray(packed), shape), shape)


def test_of_shapes_of_as_many_tokens_the_one_of_fewest_rows_that_holds_the_plan_is_taken():
    few = (StepShape(32, 2, 2), StepShape(32, 2, 6))

    def shape_of(*lengths: int, **params) -> StepShape:
        scheduler = make_scheduler()
        for index, length in enumerate(lengths):
            add(scheduler, f"{index}", list(range(10, 10 + length)), **params)
        packer = BatchPacker((StepShape(4, 4, 6), *few, SHAPES[2]), page_size=PAGE, max_num_seqs=SEQS)
        plan = scheduler.plan()
        assert plan is not None
        packed, shape = packer.pack(plan)
        check(plan, unpack(jnp.asarray(packed), shape), shape)
        return shape

    assert shape_of(5) == shape_of(9, 9) == few[0]
    assert shape_of(20) == few[1]  # three pages
    assert shape_of(1, 1) == StepShape(4, 4, 6)
    assert shape_of(3, 3, 3) == shape_of(9, 9, 9) == SHAPES[2]
    assert shape_of(20, temperature=1.0, n=2) == few[1]
    assert shape_of(20, temperature=1.0, n=3) == SHAPES[2]  # forks sample too


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, -1),
        ({"logprobs": 0}, 0),
        ({"logprobs": 3}, 3),
        ({"temperature": 1.0, "n": 2}, -1),
        ({"temperature": 1.0, "n": 1, "best_of": 2}, 0),
        ({"temperature": 1.0, "n": 1, "best_of": 2, "logprobs": 2}, 2),
        ({"n": 2, "use_beam_search": True}, 4),
        ({"n": 2, "use_beam_search": True, "stop_token_ids": [1, 2]}, 6),
    ],
    ids=str,
)
def test_as_many_log_probabilities_as_somebody_reads(params, expected):
    scheduler = make_scheduler()
    seq = add(scheduler, "a", [1], **params)
    assert seq.num_logprobs == expected
    packed, shape = BatchPacker(SHAPES, page_size=PAGE, max_num_seqs=SEQS).pack(scheduler.plan())
    assert int(unpack(jnp.asarray(packed), shape).sampling.num_logprobs[0]) == expected


def test_guesses_are_tokens_of_their_row_and_rows_of_the_sampler():
    scheduler = make_scheduler()
    a = add(scheduler, "a", [3, 4, 5], min_tokens=3, temperature=0.5)
    b = add(scheduler, "b", list(range(10, 17)))
    first = scheduler.plan()
    assert first is not None
    scheduler.update(first, [6, 7])
    a.num_computed_tokens += 3  # as if it computed its last token and two guesses
    b.num_computed_tokens += 1
    rows = [PlannedRow(b, 7, 1, True, 0), PlannedRow(a, 3, 3, True, 1)]
    plan = replace(plan_of_rows(rows), drafts=Drafts(np.array([0, 2]), np.array([40, 41])))
    plan = replace(plan, from_device=np.array([True, False]))
    packed, shape = BatchPacker(SHAPES, page_size=PAGE, max_num_seqs=SEQS).pack(plan)
    assert shape == SHAPES[0]
    inputs = unpack(jnp.asarray(packed), shape)
    assert inputs.tokens.tolist() == [-1 - int(plan.entries[0]), 6, 40, 41]
    assert inputs.meta.positions.tolist() == [7, 3, 4, 5]
    assert (inputs.meta.cu_q_lens.tolist(), inputs.meta.kv_lens.tolist()) == ([0, 1, 4, 4, 4], [8, 6, 0, 0])
    assert (int(inputs.meta.num_seqs), int(inputs.meta.num_decode)) == (2, 1)
    assert not np.asarray(inputs.meta.page_table)[2:].any()
    sampling = inputs.sampling
    assert inputs.source.tolist() == [0, 1, 2, 3]
    assert sampling.position.tolist() == [8, 4, 5, 6]
    assert sampling.samples.tolist() == [True] * 4
    assert sampling.state_index.tolist() == [b.state_index, *[a.state_index] * 3]
    assert sampling.bans_stops.tolist() == [False, True, True, False]
    assert sampling.temperature.tolist() == [0.0, 0.5, 0.5, 0.5]


def test_samples_beyond_the_rows_of_every_shape_fit_none():
    scheduler = make_scheduler()
    a = add(scheduler, "a", [3, 4, 5])
    plan = scheduler.plan()
    assert plan is not None
    plan = replace(plan, drafts=Drafts(np.array([SEQS]), np.arange(SEQS)))
    with pytest.raises(RuntimeError, match="a plan of 3 tokens, 5 rows and 1 pages a row fits no step shape"):
        BatchPacker(SHAPES, page_size=PAGE, max_num_seqs=SEQS).pack(plan)
    assert a.pages
