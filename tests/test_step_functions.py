"""Several steps in one program, looked at on the device: which rows go on, and what they write."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.batch import BatchPacker
from jpaged.config import StepShape
from jpaged.pallas_kernels import make_pages
from jpaged.request import Request, SamplingParams
from jpaged.sampler_state import make_sampler_state
from jpaged.sampler_tuning import TUNINGS
from jpaged.sequence import SequenceGroup
from jpaged.step import StepRunner
from jpaged.step_functions import decode_steps
from jpaged.step_plan import PlannedRow, StepPlan
from tests.fakes import dense_logits, tiny_llama
from tests.plans import plan_of_rows

SHAPE = StepShape(4, 4, 1, num_steps=4)
PROMPTS = ([3], [7], [9])


def greedy_answer(model, prompt, length: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(dense_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def plan_of_prompts(prompts, stop_ids, num_more: np.ndarray) -> StepPlan:
    """Several steps of greedy rows, each from a prompt of one token and with a page of its own."""
    rows = []
    for entry, (prompt, stops) in enumerate(zip(prompts, stop_ids, strict=True)):
        params = SamplingParams(temperature=0.0)
        (seq,) = SequenceGroup(Request(request_id=f"{entry}", prompt_token_ids=tuple(prompt), params=params)).seqs
        seq.pages, seq.state_index, seq.run = [entry + 1], entry, entry + 1
        seq.stop_ids = frozenset(stops)
        rows.append(PlannedRow(seq, 0, 1, samples=True, source=entry))
    return dataclasses.replace(plan_of_rows(rows), num_steps=SHAPE.num_steps, num_more=num_more)


def packed_plan(plan: StepPlan) -> tuple[np.ndarray, StepShape]:
    packed, shape = BatchPacker((StepShape(4, 4, 1), SHAPE), page_size=8, max_num_seqs=4).pack(plan)
    assert shape == SHAPE
    return packed, shape


def test_rows_end_where_they_stop_or_may_go_no_further():
    model = tiny_llama(num_hidden_layers=1)
    answers = [greedy_answer(model, prompt, 4) for prompt in PROMPTS]
    num_more = np.array([3, 1, 3])
    stop = next(i for i, token in enumerate(answers[2]) if token not in answers[2][:i] and i < 3)
    others = [token for token in range(64) if token not in answers[2]]
    stop_ids = [*others[:4], answers[2][stop], *others[-3:]]  # as many as the device knows
    plan = plan_of_prompts(PROMPTS, [[], [], stop_ids], num_more)
    packed, shape = packed_plan(plan)
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


class SumModel:
    """Rows whose next token is how many tokens all have together, so that a row that goes on is seen in all.

    Attributes:
      broken: the row whose logits are NaN in the first step; none.
    """

    vocab_size = 64

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken

    def __call__(self, tokens, kv_pages, meta, implementation):
        return jnp.broadcast_to(meta.kv_lens.sum(), tokens.shape), kv_pages

    def logits(self, hidden):
        logits = jax.nn.one_hot(hidden, self.vocab_size, dtype=jnp.float32)
        if self.broken is None:
            return logits
        breaks = (hidden == len(PROMPTS)) & (jnp.arange(len(hidden)) == self.broken)
        return jnp.where(breaks[:, None], jnp.nan, logits)


@pytest.mark.parametrize("broken", [None, 1])
def test_a_row_that_stopped_or_broke_stays_though_it_samples_another_token_later(broken):
    # As many as the device knows: a place that is left empty would stop a broken row too.
    stop_ids = [*range(40, 47), 50 if broken else len(PROMPTS)]
    plan = plan_of_prompts(PROMPTS, [[], stop_ids, []], np.array([3, 3, 1]))
    packed, shape = packed_plan(plan)
    specs = tiny_llama(num_hidden_layers=1).page_specs(
        num_pages=5, page_size=8, dtype=jnp.dtype(jnp.float32), implementation="xla"
    )
    pages, last_token = [make_pages(spec) for spec in specs], jnp.full(5, 9, jnp.int32)
    program = jax.jit(decode_steps, static_argnums=(0, 4, 5, 6))
    sampled, last, _ = program(SumModel(broken), pages, last_token, packed, shape, TUNINGS["cpu"], "xla")
    # Rows 0 and 2 have one token more after the first step, row 0 after each.
    expected = np.array([3, 5, 6, 7])
    assert sampled[:, 0].tolist() == expected.tolist()
    assert sampled[:, 1].tolist() == [-1 if broken else 3, *expected[1:]]
    assert last.tolist() == [7, 0 if broken else 3, 5, 9, 9]
