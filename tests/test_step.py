"""The programs of a step: compiled once each, pages in place, weights that can be swapped."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged import program_key
from jpaged.batch import MAX_IN_FLIGHT, BatchPacker
from jpaged.config import StepShape
from jpaged.errors import ConfigError, RecompileError
from jpaged.pallas_kernels import make_pages
from jpaged.request import Request, SamplingParams
from jpaged.sampler_state import make_sampler_state
from jpaged.sampling_rows import NUM_SAMPLING_FIELDS, SAMPLING_KINDS
from jpaged.sequence import SequenceGroup, SequenceStatus
from jpaged.step import StepRunner
from jpaged.step_buffers import token_buffer
from jpaged.step_bytes import lent_bytes
from jpaged.step_outputs import read_logprobs, read_prompt_logprobs
from jpaged.step_plan import PlannedRow, StepPlan
from jpaged.step_programs import Program, StepNeeds
from tests.fakes import dense_logits, tiny_llama
from tests.plans import plan_of_rows

SHAPE, OTHER = StepShape(8, 2, 1), StepShape(1, 1, 1)
FORWARD, GREEDY = Program("forward", SHAPE), Program("sampling", 2, "greedy")
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
    return plan_of_rows([PlannedRow(seq, 0, len(prompt), samples=True, source=0)])


def run(runner: StepRunner, model, plan: StepPlan) -> tuple:
    """What a plan's step gives, on a fresh pool."""
    packed, shape = BatchPacker((SHAPE,), page_size=8, max_num_seqs=2).pack(plan)
    return step(runner, make_pool(model), packed, runner.needs(packed, shape))


def compiled(runner: StepRunner) -> set[Program]:
    programs = [done.program for done in runner.compilations]
    assert len({*programs}) == len(programs)
    return {*programs}


def step(runner: StepRunner, pool: tuple, packed, needs: StepNeeds) -> tuple:
    runner.prepare(*pool, needs)
    return runner.run(*pool, packed, needs)


@pytest.fixture(scope="module")
def seen() -> list[Program]:
    return []


@pytest.fixture(scope="module")
def runner(seen) -> StepRunner:
    """One for all tests that run the step; each leaves the weights as they were."""
    return make_runner(on_compile=seen.append)


class FakeLowered:
    """Stands for a program, where only the bookkeeping around it is tested."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def compile(self):
        if self.program.part == "forward":
            return lambda weights, kv_pages, last_token, packed, lent: (("logits", "hidden", "fields"), kv_pages)
        return lambda logits, fields, state, lent: (("tokens",), state)


@pytest.fixture
def fake_runner(monkeypatch):
    def make(**options) -> StepRunner:
        runner = make_runner(**options)
        monkeypatch.setattr(runner, "lower", lambda kv_pages, state, program: FakeLowered(program))
        return runner

    return make


def test_a_program_compiles_once_and_pages_are_updated_in_place(runner, seen):
    model = make_model()
    expected = dense_logits(model, PROMPT)[-1]
    packed, shape = BatchPacker((SHAPE,), page_size=8, max_num_seqs=2).pack(make_plan())
    for _ in range(2):
        pages, state = make_pool(model)
        before = pages[0].data, state.last_token
        outputs, pages, state = step(runner, (pages, state), packed, runner.needs(packed, shape))
        assert outputs.token_ids[0] == expected.argmax() == state.last_token[1]
        assert all(array.is_deleted() for array in before)
        rows = np.asarray(pages[0].data).reshape(4, 8, -1)
        assert rows[2, :5].any(axis=1).all()
        assert not rows[2, 5:].any()
        assert not rows[[1, 3]].any()
    assert seen == [FORWARD, GREEDY]
    assert all(done.seconds > 0 for done in runner.compilations)
    assert compiled(runner) == {FORWARD, GREEDY}


def test_log_probabilities_are_read_where_they_were_asked_for(runner):
    model = make_model()
    expected = np.asarray(jax.nn.log_softmax(dense_logits(model, PROMPT)))
    plan = make_plan(logprobs=1, prompt_logprobs=2)
    outputs, _, _ = run(runner, model, plan)
    sampled = read_logprobs(plan, outputs)(0, 0)
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
    assert read_logprobs(plan, None)(0, 0) is None  # there is nothing to read from
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
        outputs, _, _ = run(runner, other, make_plan())
        assert outputs.token_ids[0] == expected
    compiled = len(runner.compilations)
    runner.set_params(old)
    run(runner, other, make_plan())
    assert len(runner.compilations) == compiled


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
    old = jax.tree.leaves(runner.params)
    with pytest.raises(ConfigError, match=message):
        runner.set_params(change())
    assert all(new is before for new, before in zip(jax.tree.leaves(runner.params), old, strict=True))


def test_lower_compiles_nothing_and_donates_the_pages(seen):
    model = make_model()
    runner = make_runner(model, on_compile=seen.append)
    before = len(seen)
    pages, state = make_pool(model)
    lowered = runner.lower(pages, state, OTHER)
    (weights, kv_pages, last_token, packed, lent), _ = lowered.args_info
    assert lent == ()
    assert all(leaf.donated for leaf in jax.tree.leaves(kv_pages))
    assert not any(leaf.donated for leaf in jax.tree.leaves((weights, last_token, packed)))
    logits, hidden, fields = lowered.out_info[0]
    assert (logits.shape, hidden.shape, fields.shape) == ((1, 64), (1, 32), (NUM_SAMPLING_FIELDS, 1))
    assert runner.compilations == []
    assert len(seen) == before
    assert not pages[0].data.is_deleted()


def test_a_gpu_runs_the_least_kind_and_writes_where_the_step_before_did(runner):
    model, plan = make_model(), make_plan(temperature=1.5, seed=3)
    tokens = run(runner, model, plan)[0].token_ids
    assert Program("sampling", 2, "full") in compiled(runner)
    on_gpu = make_runner(model, platform="gpu")
    packed, shape = BatchPacker((SHAPE,), page_size=8, max_num_seqs=2).pack(plan)
    needs = on_gpu.needs(packed, shape)
    on_gpu.prepare(*make_pool(model), needs)
    places, found = [], []
    for _ in range(2 * MAX_IN_FLIGHT):
        outputs, _, state = on_gpu.run(*make_pool(model), packed, needs)
        found.append(outputs.token_ids)
        assert state.last_token[1] == tokens[0]
        kept = {buffer.role: arrays for buffer, arrays in on_gpu._buffers._kept.items()}
        assert kept["token ids"][-1] is outputs.token_ids
        places.append({role: arrays[-1].unsafe_buffer_pointer() for role, arrays in kept.items()})
    num_bytes = lent_bytes([SHAPE], vocab_size=64, hidden_size=32, itemsize=4)
    assert sum(array.nbytes for arrays in kept.values() for array in arrays) == num_bytes
    assert places[:MAX_IN_FLIGHT] == places[MAX_IN_FLIGHT:]
    assert len({place["token ids"] for place in places}) == MAX_IN_FLIGHT
    for role in ("logits", "hidden", "fields"):
        assert len({place[role] for place in places}) == 1
    assert [array.is_deleted() for array in found] == [True] * MAX_IN_FLIGHT + [False] * MAX_IN_FLIGHT
    assert all(array.tolist() == tokens.tolist() for array in found[MAX_IN_FLIGHT:])
    assert compiled(on_gpu) == {FORWARD, Program("sampling", 2, "draw")}
    on_gpu.forget_outputs()
    assert run(on_gpu, model, plan)[0].token_ids.tolist() == tokens.tolist()


@pytest.mark.parametrize("kind", SAMPLING_KINDS)
def test_sampling_donates_what_it_changes(kind):
    model = make_model()
    pages, state = make_pool(model)
    lowered = make_runner(model, platform="gpu").lower(pages, state, Program("sampling", 2, kind))
    (logits, fields, changed, lent), _ = lowered.args_info
    assert all(leaf.donated for leaf in jax.tree.leaves((changed, lent)))
    assert not any(leaf.donated for leaf in jax.tree.leaves((logits, fields)))
    (token_ids,), after = lowered.out_info
    assert [leaf.shape for leaf in lent] == [token_ids.shape]
    assert token_ids.shape == (2,)
    assert jax.tree.structure(after) == jax.tree.structure(state if kind == "full" else 0)


def test_programs_of_log_probabilities_are_lowered_from_shapes_alone():
    model = make_model()
    runner = make_runner(model)
    for program, rows in ((Program("prompt logprobs", SHAPE), 8), (Program("logprobs", 2), 2)):
        found = runner.lower(*make_pool(model), program).out_info
        assert [leaf.shape for leaf in found] == [(rows,), (rows, 2), (rows, 2)]


def test_a_late_program_is_refused_before_anything_is_done(fake_runner):
    seen, state = [], make_sampler_state(2, 64)
    runner = fake_runner(recompile="error", on_compile=seen.append)
    step(runner, ([], state), None, StepNeeds(SHAPE))
    runner.mark_warm()
    step(runner, ([], state), None, StepNeeds(SHAPE))
    message = "not compiled at start: forward T1 S1 P1, sampling S1 greedy; have .*forward T8 S2 P1"
    with pytest.raises(RecompileError, match=message):
        runner.prepare([], state, StepNeeds(OTHER))
    with pytest.raises(RecompileError, match=r"not compiled at start: .*sampling S2 full"):
        runner.prepare([], state, StepNeeds(SHAPE, "full"))
    assert seen == [FORWARD, GREEDY]
    assert compiled(runner) == {FORWARD, GREEDY}


def test_a_late_program_is_told_and_compiled(fake_runner, caplog):
    seen, state = [], make_sampler_state(2, 64)
    runner = fake_runner(on_compile=seen.append)
    runner.compile_all([], state, [FORWARD])
    assert caplog.text == ""
    runner.mark_warm()
    outputs, pages, after = step(runner, (["page"], state), None, StepNeeds(SHAPE, "full"))
    assert (outputs.token_ids, pages, after) == ("tokens", ["page"], state)
    assert "the program sampling S2 full compiles late" in caplog.text
    assert "forward" not in caplog.text
    assert seen == [done.program for done in runner.compilations] == [FORWARD, Program("sampling", 2, "full")]


def test_all_are_compiled_and_told_once(fake_runner):
    told = []
    runner = fake_runner()
    runner.compile_all([], None, [GREEDY])
    runner.compile_all([], None, runner.programs([SHAPE]), lambda program, seconds: told.append(program))
    others = [FORWARD, Program("sampling", 2, "full"), Program("logprobs", 2), Program("prompt logprobs", SHAPE)]
    assert sorted(told, key=str) == sorted(others, key=str)
    assert compiled(runner) == {GREEDY, *others}
    runner.prepare([], None, StepNeeds(SHAPE, "full", logprobs=True, prompt_logprobs=True))
    assert len(runner.compilations) == 5


@pytest.mark.parametrize("fails", ["lowering", "compiling"])
def test_no_memory_is_kept_for_programs_that_did_not_compile(monkeypatch, fails):
    runner, pool, wanted = make_runner(platform="gpu"), make_pool(make_model()), Program("sampling", 1, "greedy")

    def refuse(*args, **options):
        raise MemoryError("no room for it")

    refused = SimpleNamespace(lower=refuse if fails == "lowering" else lambda *_, **__: SimpleNamespace(compile=refuse))
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_choose_without_graph", refused)
        with pytest.raises(MemoryError, match="no room for it"):
            runner.compile_all(*pool, [wanted])
    runner.lower(*pool, Program("sampling", 3, "greedy"))  # to look into it, no more
    runner.compile_all(*pool, [GREEDY])
    assert {*runner._buffers._kept} == {token_buffer(2)}
    runner.compile_all(*pool, [wanted])
    assert {*runner._buffers._kept} == {token_buffer(2), token_buffer(1)}


def test_programs_that_were_kept_are_not_traced(monkeypatch, tmp_path):
    monkeypatch.setattr(program_key, "_BEGAN", float("inf"))  # whatever happens to the sources while this runs
    model, plan, seen = make_model(), make_plan(logprobs=1), []

    def make(model=model, **options) -> StepRunner:
        return make_runner(model, platform="gpu", programs=tmp_path, on_compile=seen.append, **options)

    def start(runner: StepRunner) -> list[int]:
        packed, shape = BatchPacker((SHAPE,), page_size=8, max_num_seqs=2).pack(plan)
        needs = runner.needs(packed, shape)
        return step(runner, make_pool(model), packed, needs)[0].token_ids.tolist()

    def refuse(*args):
        raise LookupError("it is traced")

    first, second, other = make(), make(recompile="error"), make(make_model(rms_norm_eps=0.25))
    tokens = start(first)
    assert tokens[0] == dense_logits(model, PROMPT)[-1].argmax()
    assert seen == [FORWARD, GREEDY, Program("logprobs", 2)]
    for runner in (second, other):
        monkeypatch.setattr(runner, "lower", refuse)
    assert start(second) == tokens
    assert seen == 2 * [FORWARD, GREEDY, Program("logprobs", 2)]
    assert compiled(second) == {*seen}
    assert second._lent == first._lent  # which depends on what the model gives
    second.mark_warm()
    with pytest.raises(RecompileError, match=r"not compiled at start: .*sampling S2 draw"):
        second.compile_all(*make_pool(model), [Program("sampling", 2, "draw")])
    with pytest.raises(LookupError, match="it is traced"):
        other.compile_all(*make_pool(model), [FORWARD])
