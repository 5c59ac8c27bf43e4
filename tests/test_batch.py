"""A packed plan, unpacked on the device, says the same as the plan."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.batch import BatchPacker, packed_size, unpack
from jpaged.config import SchedulerConfig, StepShape
from jpaged.page_allocator import PageAllocator
from jpaged.request import Request, SamplingParams, Sequence
from jpaged.scheduler import Scheduler

PAGE, SEQS = 8, 4
SHAPES = (StepShape(4, 4, 2), StepShape(4, 4, 6), StepShape(32, 4, 6))


def make_scheduler() -> Scheduler:
    config = SchedulerConfig(max_num_seqs=SEQS, max_num_batched_tokens=32)
    return Scheduler(config, PageAllocator(40, PAGE), max_model_len=48)


def add(scheduler: Scheduler, name: str, tokens: list[int], **params) -> Sequence:
    options = {"temperature": 0.0, "max_tokens": 8, **params}
    seq = Sequence(Request(request_id=name, prompt_token_ids=tuple(tokens), params=SamplingParams(**options), seed=7))
    scheduler.add(seq)
    return seq


def check(plan, inputs, shape):
    """Compares the unpacked inputs with the plan, row by row and token by token."""
    meta = inputs.meta
    assert int(meta.num_seqs) == len(plan.rows)
    assert int(meta.num_decode) == plan.num_decode
    cu_q_lens = np.asarray(meta.cu_q_lens)
    at = 0
    for index, row in enumerate(plan.rows):
        seq, end = row.seq, at + row.num_tokens
        assert cu_q_lens[index : index + 2].tolist() == [at, end]
        positions = list(range(row.start, row.start + row.num_tokens))
        assert meta.positions[at:end].tolist() == positions
        assert meta.slot_mapping[at:end].tolist() == [seq.pages[p // PAGE] * PAGE + p % PAGE for p in positions]
        assert int(meta.kv_lens[index]) == row.start + row.num_tokens
        table = np.asarray(meta.page_table[index]).tolist()
        assert table == seq.pages + [0] * (shape.pages_per_row - len(seq.pages))
        assert int(inputs.last_token_index[index]) == end - 1
        assert int(inputs.sampling.state_index[index]) == seq.state_index
        at = end
    assert cu_q_lens[len(plan.rows) :].tolist() == [at] * (shape.num_rows + 1 - len(plan.rows))
    for padding in (inputs.tokens, meta.positions, meta.slot_mapping, inputs.next_tokens):
        assert not np.asarray(padding)[at:].any()
    assert not np.asarray(meta.page_table)[len(plan.rows) :].any()
    assert not np.asarray(meta.kv_lens)[len(plan.rows) :].any()
    assert np.asarray(inputs.count_entry)[at:].tolist() == [SEQS] * (shape.num_tokens - at)


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
        known = [seq for row in plan.rows for seq in row.seq.tokens[row.start : row.start + row.num_tokens]]
        assert inputs.tokens[: plan.num_tokens].tolist() == known
        check(plan, inputs, shape)
        scheduler.update(plan, [50] * len(plan.rows))
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


def test_penalty_counts_name_entry_and_kind_of_token():
    scheduler = make_scheduler()
    packer = BatchPacker(SHAPES, page_size=PAGE, max_num_seqs=SEQS)
    plain = add(scheduler, "plain", [1, 2])
    counted = add(scheduler, "counted", [3, 4, 5], presence_penalty=0.5)
    counted.tokens.append(6)  # as if it had been preempted after its first output token
    plan = scheduler.plan()
    packed, shape = packer.pack(plan)
    inputs = unpack(jnp.asarray(packed), shape)
    assert [row.seq for row in plan.rows] == [plain, counted]
    assert inputs.count_entry[:6].tolist() == [SEQS] * 2 + [counted.state_index] * 4
    assert inputs.is_output[2:6].tolist() == [False, False, False, True]


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
                assert bool(inputs.wants_prompt_logprobs)
                following += inputs.next_tokens[at : at + row.num_tokens].tolist()
            else:
                assert not inputs.next_tokens[at : at + row.num_tokens].any()
            at += row.num_tokens
        scheduler.update(plan, [50] * len(plan.rows))
    assert following == [*range(6, 45), 0]
    packed, shape = packer.pack(scheduler.plan())
    assert not bool(unpack(jnp.asarray(packed), shape).wants_prompt_logprobs)


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


def test_a_plan_that_fits_no_shape_is_named():
    scheduler = make_scheduler()
    packer = BatchPacker(SHAPES[:1], page_size=PAGE, max_num_seqs=SEQS)
    add(scheduler, "a", [1] * 9)
    with pytest.raises(RuntimeError, match="9 tokens, 1 rows and 2 pages"):
        packer.pack(scheduler.plan())
