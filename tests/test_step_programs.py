"""What a packed plan asks for, and that all that can be asked for is compiled at start."""

import itertools

import pytest

from jpaged.batch import BatchPacker
from jpaged.config import StepShape
from jpaged.request import Request, SamplingParams
from jpaged.sampling_rows import SAMPLING_KINDS
from jpaged.sequence import SequenceGroup
from jpaged.step_plan import PlannedRow, StepPlan
from jpaged.step_programs import Program, StepNeeds, all_programs
from tests.plans import plan_of_rows

SHAPES = (StepShape(2, 2, 2), StepShape(8, 4, 2), StepShape(16, 4, 2))


def plan_of(*requests: dict, num_tokens: int = 3, samples: bool = True) -> StepPlan:
    """Whole prompts, a row a request."""
    rows = []
    for index, fields in enumerate(requests):
        params = SamplingParams(**{"temperature": 0.0, **fields})
        (seq,) = SequenceGroup(Request(request_id="r", prompt_token_ids=(1, 2, 3), params=params)).seqs
        seq.pages, seq.state_index = [1 + index], index
        rows.append(PlannedRow(seq, 0, num_tokens, samples, index))
    return plan_of_rows(rows)


def needs_of(plan: StepPlan, kinds=SAMPLING_KINDS) -> StepNeeds:
    return StepNeeds.read(*BatchPacker(SHAPES, page_size=8, max_num_seqs=4).pack(plan), kinds)


DRAW, FILTER = {"temperature": 1.0}, {"temperature": 1.0, "min_p": 0.1}


@pytest.mark.parametrize(
    ("requests", "kind"),
    [
        ([{}], "greedy"),
        ([{"temperature": 1e-9}, {"temperature": 1.0, "top_k": 1}], "greedy"),
        ([{"top_p": 0.5}], "greedy"),
        ([{}, DRAW], "draw"),
        ([FILTER, {"temperature": 0.0}], "filter"),
        ([DRAW, FILTER], "full"),
        ([{"temperature": 1.0, "top_k": 5}], "filter"),
        ([{"temperature": 1.0, "top_p": 0.5}], "filter"),
        ([{"presence_penalty": 0.1}, DRAW], "full"),
        ([{"repetition_penalty": 1.1}], "full"),
        ([{"frequency_penalty": 0.1}], "full"),
        ([{"logit_bias": {1: 1.0}}], "full"),
        ([{"min_tokens": 1}], "full"),
        ([{"allowed_token_ids": [4]}], "full"),
    ],
    ids=str,
)
def test_the_least_kind_of_sampling_that_does_for_all_rows(requests, kind):
    assert needs_of(plan_of(*requests)) == StepNeeds(SHAPES[1], kind)
    # Padding and rows that do not sample yet ask for nothing.
    assert needs_of(plan_of(*requests, num_tokens=2, samples=False)).sampling == "greedy"


@pytest.mark.parametrize(("samples", "num_tokens"), [(True, 3), (False, 2)])
@pytest.mark.parametrize("prompt", [None, 0, 2])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_log_probabilities_that_are_asked_for(samples, num_tokens, prompt, logprobs):
    needs = needs_of(
        plan_of({}, {"logprobs": logprobs, "prompt_logprobs": prompt}, samples=samples, num_tokens=num_tokens)
    )
    assert needs.logprobs == (logprobs is not None and samples)
    assert needs.prompt_logprobs == (prompt is not None)


def test_programs_run_in_order_and_all_are_known():
    known = all_programs(SHAPES)
    assert len(set(known)) == len(known) == 3 + 2 * 4 + 2 + 3
    for shape, kind, *asked in itertools.product(SHAPES, SAMPLING_KINDS, (False, True), (False, True)):
        programs = list(StepNeeds(shape, kind, *asked).programs())
        assert programs[:2] == [Program("forward", shape), Program("sampling", shape.num_rows, kind)]
        assert [one.part for one in programs[2:]] == ["logprobs"] * asked[0] + ["prompt logprobs"] * asked[1]
        assert set(programs) <= set(known)


def test_shapes_of_few_rows_add_no_sampling_programs_and_the_largest_come_first():
    few = StepShape(16, 2, 2)
    added = [Program(part, few) for part in ("forward", "prompt logprobs")]
    programs = all_programs((*SHAPES[:2], few, SHAPES[2]))
    assert [one for one in programs if one not in all_programs(SHAPES)] == added
    assert [one.size for one in programs if one.part == "forward"] == [SHAPES[2], few, SHAPES[1], SHAPES[0]]
    assert [one.size for one in programs if one.kind == "full"] == [4, 2]


def test_a_back_end_with_few_kinds_takes_the_fullest_for_the_others():
    few = ("greedy", "full")
    assert [needs_of(plan_of(fields), few).sampling for fields in ({}, DRAW, FILTER)] == ["greedy", "full", "full"]
    assert {one.kind for one in all_programs(SHAPES, few)} == {None, *few}
