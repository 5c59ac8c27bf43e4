"""The jitted step: compiled once a shape, pages in place, weights that can be swapped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.batch import BatchPacker
from jpaged.config import StepShape
from jpaged.errors import ConfigError, RecompileError
from jpaged.pallas_kernels import make_pages
from jpaged.request import Request, SamplingParams
from jpaged.sampler_state import make_sampler_state
from jpaged.sequence import SequenceGroup, SequenceStatus
from jpaged.step import StepRunner, read_logprobs, read_prompt_logprobs
from jpaged.step_plan import StepPlan
from tests.fakes import dense_logits, tiny_llama

SHAPE, OTHER = StepShape(8, 2, 1), StepShape(1, 1, 1)
PROMPT = [3, 1, 4, 1, 5]


def make_model(seed: int = 0, **changes):
    return tiny_llama(seed, num_hidden_layers=1, **changes)


def make_runner(model=None, **options) -> StepRunner:
    return StepRunner(model or make_model(), max_logprobs=2, implementation="xla", **options)


def make_pool(model) -> tuple:
    specs = model.page_specs(num_pages=4, page_size=8, dtype=jnp.dtype(jnp.float32), implementation="xla")
    return [make_pages(spec) for spec in specs], make_sampler_state(2, model.vocab_size)


def make_plan(prompt=PROMPT, **params) -> StepPlan:
    """A step that computes a whole prompt on page 2 and samples."""
    params = SamplingParams(**{"temperature": 0.0, **params})
    (seq,) = SequenceGroup(Request(request_id="r", prompt_token_ids=tuple(prompt), params=params)).seqs
    seq.pages, seq.state_index = [2], 1
    return StepPlan([seq], [0], [len(prompt)], [True], [0], num_decode=0, num_tokens=len(prompt))


def pack(plan: StepPlan) -> np.ndarray:
    return BatchPacker((SHAPE,), page_size=8, max_num_seqs=2).pack(plan)[0]


@pytest.fixture(scope="module")
def seen() -> list[StepShape]:
    return []


@pytest.fixture(scope="module")
def runner(seen) -> StepRunner:
    """One for all tests that run the step; each leaves the weights as they were."""
    return make_runner(on_compile=seen.append)


class FakeLowered:
    """Stands for a program, where only the bookkeeping around it is tested."""

    def compile(self):
        return lambda params, kv_pages, state, packed: ("outputs", kv_pages, state)


@pytest.fixture
def fake_runner(monkeypatch):
    def make(**options) -> StepRunner:
        runner = make_runner(**options)
        monkeypatch.setattr(runner, "lower", lambda *args: FakeLowered())
        return runner

    return make


def test_a_shape_compiles_once_and_pages_are_updated_in_place(runner, seen):
    model = make_model()
    expected = dense_logits(model, PROMPT)[-1]
    for _ in range(2):
        pages, state = make_pool(model)
        before = pages[0].data
        outputs, pages, state = runner.run(pages, state, pack(make_plan()), SHAPE)
        assert outputs.token_ids[0] == expected.argmax() == state.last_token[1]
        assert before.is_deleted()
        rows = np.asarray(pages[0].data).reshape(4, 8, -1)
        assert rows[2, :5].any(axis=1).all()
        assert not rows[2, 5:].any()
        assert not rows[[1, 3]].any()
    assert seen == [SHAPE] == [done.shape for done in runner.compilations]
    assert runner.compilations[0].seconds > 0
    assert not runner.compilations[0].after_warmup


def test_log_probabilities_are_read_where_they_were_asked_for(runner):
    model = make_model()
    expected = np.asarray(jax.nn.log_softmax(dense_logits(model, PROMPT)))
    plan = make_plan(logprobs=1, prompt_logprobs=2)
    outputs, _, _ = runner.run(*make_pool(model), pack(plan), SHAPE)
    sampled = read_logprobs(plan, outputs)(0)
    best = int(expected[-1].argmax())
    assert (sampled.token_id, [token for token, _ in sampled.top]) == (best, [best])
    assert sampled.logprob == pytest.approx(expected[-1, best], abs=2e-5)
    found = list(read_prompt_logprobs(plan, outputs))
    assert [(position, entry.token_id) for _, position, entry in found] == [(1, 1), (2, 4), (3, 1), (4, 5)]
    for seq, position, entry in found:
        assert seq is plan.seqs[0]
        assert entry.logprob == pytest.approx(expected[position - 1, entry.token_id], abs=2e-5)
        assert [token for token, _ in entry.top] == np.argsort(-expected[position - 1])[:2].tolist()


def test_log_probabilities_that_nobody_asked_for_are_not_read():
    plan = make_plan()
    assert read_logprobs(plan, None)(0) is None  # there is nothing to read from
    assert list(read_prompt_logprobs(plan, None)) == []
    ended = make_plan(prompt_logprobs=1)
    ended.seqs[0].status = SequenceStatus.FINISHED
    assert list(read_prompt_logprobs(ended, None)) == []


def test_new_weights_are_used_without_a_compile(runner):
    old = runner.params
    other = make_model(seed=5)
    expected = dense_logits(other, PROMPT)[-1].argmax()
    assert expected != dense_logits(make_model(), PROMPT)[-1].argmax()
    in_numpy = jax.tree.map(np.asarray, nnx.state(other))
    for weights in (nnx.state(other), in_numpy):
        runner.set_params(weights)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(runner.params))
        outputs, _, _ = runner.run(*make_pool(other), pack(make_plan()), SHAPE)
        assert outputs.token_ids[0] == expected
    runner.set_params(old)
    assert len(runner.compilations) <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: nnx.state(make_model(tie_word_embeddings=True)), "another tree structure"),
        (lambda: {"embed": jnp.zeros(3)}, "another tree structure"),
        (lambda: nnx.state(make_model(vocab_size=65)), r"embed.*got float32\[65, 32\], expected float32\[64, 32\]"),
        (lambda: jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(make_model())), "got bfloat16"),
        (lambda: jax.tree.map(lambda x: 1.5, nnx.state(make_model())), "got 1.5, expected an array"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(runner, change, message):
    old = runner.params
    with pytest.raises(ConfigError, match=message):
        runner.set_params(change())
    assert runner.params is old


def test_lower_compiles_nothing_and_donates_pages_and_state(seen):
    model = make_model()
    runner = make_runner(model, on_compile=seen.append)
    before = len(seen)
    pages, state = make_pool(model)
    lowered = runner.lower(pages, state, OTHER)
    (params, kv_pages, sampler_state, packed), _ = lowered.args_info
    assert all(leaf.donated for leaf in jax.tree.leaves((kv_pages, sampler_state)))
    assert not any(leaf.donated for leaf in jax.tree.leaves((params, packed)))
    outputs = lowered.out_info[0]
    assert (outputs.token_ids.shape, outputs.top_ids.shape, outputs.prompt_top_ids.shape) == ((1,), (1, 2), (1, 2))
    assert runner.compilations == []
    assert len(seen) == before
    assert not pages[0].data.is_deleted()


def test_a_late_shape_is_refused_before_anything_is_done(fake_runner):
    seen = []
    runner = fake_runner(recompile="error", on_compile=seen.append)
    runner.run([], None, None, SHAPE)
    runner.mark_warm()
    runner.run([], None, None, SHAPE)
    with pytest.raises(RecompileError, match=r"T1 S1 P1 was not compiled at start; have \['T8 S2 P1'\]"):
        runner.run([], None, None, OTHER)
    assert seen == [SHAPE] == [done.shape for done in runner.compilations]


def test_a_late_shape_is_told_and_compiled(fake_runner, caplog):
    seen = []
    runner = fake_runner(on_compile=seen.append)
    runner.compile([], None, SHAPE)
    assert caplog.text == ""
    runner.mark_warm()
    assert runner.run(["page"], "state", None, OTHER) == ("outputs", ["page"], "state")
    assert "step shape T1 S1 P1 compiles late" in caplog.text
    assert seen == [SHAPE, OTHER]
    assert [(done.shape, done.after_warmup) for done in runner.compilations] == [(SHAPE, False), (OTHER, True)]
