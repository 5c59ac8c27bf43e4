"""Several steps in one program, looked at on the device: which rows go on, and what they write."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jpaged.batch import BatchPacker
from jpaged.config import StepShape
from jpaged.pallas_kernels import make_pages
from jpaged.request import Request, SamplingParams
from jpaged.sampler_state import make_sampler_state
from jpaged.sequence import SequenceGroup
from jpaged.step import StepRunner
from jpaged.step_plan import PlannedRow
from tests.fakes import dense_logits, tiny_llama
from tests.plans import plan_of_rows

SHAPE = StepShape(4, 4, 1, num_steps=4)
PROMPTS = ([3], [7], [9])


def greedy_answer(model, prompt, length: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(dense_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_rows_end_where_they_stop_or_may_go_no_further():
    model = tiny_llama(num_hidden_layers=1)
    answers = [greedy_answer(model, prompt, 4) for prompt in PROMPTS]
    num_more = np.array([3, 1, 3])
    stop = next(i for i, token in enumerate(answers[2]) if token not in answers[2][:i] and i < 3)
    rows = []
    for entry, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.0)
        (seq,) = SequenceGroup(Request(request_id=f"{entry}", prompt_token_ids=tuple(prompt), params=params)).seqs
        seq.pages, seq.state_index, seq.run = [entry + 1], entry, entry + 1
        seq.stop_ids = frozenset([answers[2][stop]] if entry == 2 else [])
        rows.append(PlannedRow(seq, 0, 1, samples=True, source=entry))
    plan = dataclasses.replace(plan_of_rows(rows), num_steps=4, num_more=num_more)
    packed, shape = BatchPacker((StepShape(4, 4, 1), SHAPE), page_size=8, max_num_seqs=4).pack(plan)
    assert shape == SHAPE
    specs = model.page_specs(num_pages=5, page_size=8, dtype=jnp.dtype(jnp.float32), implementation="xla")
    runner = StepRunner(model, max_logprobs=2, implementation="xla")
    pages = [make_pages(spec) for spec in specs]
    pool, needs = (pages, make_sampler_state(4, 64)), runner.needs(packed, shape)
    runner.prepare(*pool, needs)
    outputs, pages, state = runner.run(*pool, packed, needs)
    sampled = np.asarray(outputs.token_ids)
    assert sampled.shape == (4, 4)
    assert sampled[:, 0].tolist() == answers[0]
    assert sampled[:2, 1].tolist() == answers[1][:2]
    assert sampled[: stop + 1, 2].tolist() == answers[2][: stop + 1]
    assert plan.new_tokens(sampled)[1].tolist() == [*answers[1][:2], -2, -2]
    short = dataclasses.replace(plan, num_more=np.array([1, 1, 1]))
    assert short.is_even
    assert not plan.is_even
    assert short.new_tokens(sampled).tolist() == sampled[:2, :3].T.tolist()
    # As many tokens are in the pages as were computed, each once: the row's prompt, and all that it went on from.
    written = np.count_nonzero(np.asarray(pages[0].data).reshape(5, 8, -1), axis=2) > 0
    assert written[1:4].sum(axis=1).tolist() == [4, 2, stop + 1]
    assert state.last_token[:3].tolist() == [answers[0][3], answers[1][1], answers[2][stop]]
