"""The engine serves any model that follows the protocol, refuses what does not, and survives interruptions."""

import signal
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.batch import MAX_IN_FLIGHT
from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig
from jpaged.engine import Engine
from jpaged.errors import ConfigError, RecompileError, RequestError
from jpaged.pallas_kernels import PageSpec, attend_and_write, plan_attention
from jpaged.request import SamplingParams

PROMPTS = [[1, 2, 3], [9] * 17, list(range(10, 21)), [29], [5, 4, 3, 2, 1, 0, 7]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=7, logprobs=0, ignore_eos=True)


class TwoWidths(nnx.Module):
    """Learned positions, no norms, no MLP, no rotary angles; the layers differ in their heads, and in their width."""

    vocab_size, max_position = 30, 40
    heads = ((4, 1, 8), (6, 3, 16))  # query heads, KV heads, head_dim of each layer
    eos_token_ids = (4,)

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)

        def weight(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.asarray(rng.standard_normal(shape) / shape[-2] ** 0.5, jnp.float32))

        self.embed, self.where = weight(self.vocab_size, 12), weight(self.max_position, 12)
        self.q, self.k, self.v, self.out = (nnx.List() for _ in range(4))
        for q_heads, kv_heads, dim in self.heads:
            self.q.append(weight(q_heads, 12, dim))
            self.k.append(weight(kv_heads, 12, dim))
            self.v.append(weight(kv_heads, 12, dim))
            self.out.append(weight(q_heads, dim, 12))
        self.head = weight(12, self.vocab_size)

    def page_specs(self, *, num_pages, page_size, dtype, implementation):
        return [PageSpec(num_pages, page_size, kv, dim, dtype, implementation) for _, kv, dim in self.heads]

    def __call__(self, tokens, kv_pages, meta, *, implementation=None):
        x = self.embed[...][tokens] + 2 * self.where[...][meta.positions]
        written = []
        for layer, pages in enumerate(kv_pages):
            project = [
                jnp.einsum("te,hed->thd", x, weights[layer][...], precision="highest")
                for weights in (self.q, self.k, self.v)
            ]
            planned = plan_attention(meta, pages.spec)  # the layers differ: one plan each
            attended, pages = attend_and_write(*project, pages, planned, implementation=implementation)
            x = x + jnp.einsum("thd,hde->te", attended, self.out[layer][...], precision="highest")
            written.append(pages)
        return x, written

    def logits(self, hidden):
        return jnp.dot(hidden, self.head[...], precision="highest")


def log_probabilities(model: TwoWidths, tokens: list[int]) -> np.ndarray:
    """f64[tokens, V]: one token, one head at a time, in numpy; no pages."""

    def array(weight) -> np.ndarray:
        return np.asarray(weight[...], np.float64)

    x = array(model.embed)[tokens] + 2 * array(model.where)[: len(tokens)]
    for layer, (q_heads, kv_heads, dim) in enumerate(model.heads):
        added = np.zeros_like(x)
        for head in range(q_heads):
            group = head // (q_heads // kv_heads)
            q = x @ array(model.q[layer])[head]
            k, v = (x @ array(weights[layer])[group] for weights in (model.k, model.v))
            for at in range(len(tokens)):
                scores = np.exp(k[: at + 1] @ q[at] / dim**0.5)
                added[at] += (scores / scores.sum()) @ v[: at + 1] @ array(model.out[layer])[head]
        x = x + added
    logits = x @ array(model.head)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def continued(model: TwoWidths, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(log_probabilities(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def make_engine(model, **options) -> Engine:
    """Three rows and eight tokens a step, one shape, and seven pages, which do not hold three of the sequences."""
    config = EngineConfig(
        cache=CacheConfig(page_size=8, num_pages=8),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=8),
        token_buckets=(8,),
        check_invariants=True,
        compilation_cache=False,
        **options,
    )
    return Engine(model, config)


def serve(engine: Engine) -> list:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert engine.stats().now.pages_used == 0
    return sorted(outputs, key=lambda output: output.request_id)


@pytest.fixture(scope="module")
def model() -> TwoWidths:
    return TwoWidths(seed=2)


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    return [continued(model, prompt, 7) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def engine(model) -> Engine:
    """One for all tests that leave it idle; compiled once."""
    return make_engine(model)


def test_a_model_of_ones_own_is_served_as_if_there_were_no_pages(engine, model, expected):
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    assert any(len(set(tokens)) > 3 for tokens in expected)  # no model that repeats one token
    for prompt in PROMPTS:
        engine.add(prompt, GREEDY)
    outputs = serve(engine)
    assert [list(output.token_ids) for output in outputs] == expected
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        dense = log_probabilities(model, prompt + list(output.token_ids))[len(prompt) - 1 : -1]
        got = [entry.logprob for entry in output.logprobs]
        # f32 against f64 over sums of at most 48 products; log-probabilities are of order 10.
        assert got == pytest.approx([dense[i, token] for i, token in enumerate(output.token_ids)], abs=1e-4)


def test_pages_are_counted_as_the_model_says(engine):
    floats_per_token = sum(2 * kv_heads * dim for _, kv_heads, dim in TwoWidths.heads)
    assert engine.pool_plan.bytes_per_page == 4 * 8 * floats_per_token
    assert engine.pool_plan.max_model_len == TwoWidths.max_position


def test_the_models_own_end_of_sequence_ids_are_used(engine, expected):
    assert engine.eos_token_ids == TwoWidths.eos_token_ids
    bias = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={4: 100.0})
    engine.add([1], bias, request_id="ends")
    (output,) = serve(engine)
    assert (output.token_ids, output.finish_reason) == ((4,), "stop")


def test_more_bans_than_the_sampler_holds_are_refused_at_the_door(engine, model):
    many = Engine(model, engine.config, eos_token_ids=range(29))
    params = SamplingParams(min_tokens=2, max_tokens=4, stop_token_ids=[29] * 60)
    many.add([1], params)  # 30 different ids
    wide = TwoWidths(seed=0)
    wide.vocab_size = 200
    many = Engine(wide, engine.config, eos_token_ids=range(100, 181))
    with pytest.raises(RequestError, match="min_tokens bans 81"):
        many.add([1], SamplingParams(min_tokens=1, max_tokens=4))
    assert not many.has_work


class NoLogits:
    vocab_size, max_position = 4, 8

    def page_specs(self):
        return []

    def __call__(self):
        return None


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (NoLogits(), "is no PagedModel: it lacks logits"),
        (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "it lacks vocab_size, max_position, page_specs, logits"),
        ("smollm2", "'smollm2' is no PagedModel"),
        (nnx.Linear, "the model is the class Linear, expected an object of it"),
    ],
)
def test_what_is_no_paged_model_is_refused(model, message):
    with pytest.raises(ConfigError, match=message):
        Engine(model)


def test_logits_of_another_dtype_or_vocabulary_are_refused(monkeypatch):
    model, logits = TwoWidths(seed=0), TwoWidths.logits
    for change, message in (
        (lambda scores: scores.astype(jnp.bfloat16), r"logits are bfloat16\[.*expected float32"),
        (lambda scores: jnp.pad(scores, ((0, 0), (0, 1))), r"logits are float32\[.*expected float32"),
    ):
        monkeypatch.setattr(TwoWidths, "logits", lambda self, hidden, change=change: change(logits(self, hidden)))
        engine = Engine(model, EngineConfig(scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8)))
        engine.add([1, 2], SamplingParams(max_tokens=4))
        with pytest.raises(ConfigError, match=message):
            engine.step()


def test_a_model_without_weights_is_refused():
    model = TwoWidths(seed=0)
    for name in ("embed", "where", "head"):
        setattr(model, name, nnx.Param(jnp.zeros((2, 2), jnp.int32)))
    for name in ("q", "k", "v", "out"):
        setattr(model, name, nnx.List())
    with pytest.raises(ConfigError, match=r"TwoWidths has no nnx\.Param of a floating-point dtype"):
        Engine(model)


def test_an_eager_engine_compiles_at_start(engine, model, monkeypatch):
    compiled = []
    monkeypatch.setattr(Engine, "warm_up", lambda self: compiled.extend(self.step_shapes))
    lazy = make_engine(model)
    assert compiled == []
    make_engine(model, warmup="eager")
    assert compiled == list(lazy.step_shapes)


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize(
    "place",
    [
        "_scheduler.plan",
        "_packer.pack",
        "_runner.run",
        "_scheduler.update",
        "_collector.begin",
        "metrics.gap",
    ],
)
def test_an_interrupt_ends_all_requests_and_frees_their_pages(engine, expected, monkeypatch, run_ahead, after, place):
    monkeypatch.setattr(engine, "config", replace(engine.config, run_ahead=run_ahead))
    for prompt in PROMPTS:
        engine.add(prompt, GREEDY)
    for _ in range(after):
        engine.step()
    owner, _, name = place.rpartition(".")
    with monkeypatch.context() as patch:
        patch.setattr(getattr(engine, owner) if owner else engine, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            three_steps(engine)  # with run-ahead the first one collects nothing
    assert not engine.has_work
    assert engine.stats().now.pages_used == 0
    for index, prompt in enumerate(PROMPTS):
        engine.add(prompt, GREEDY, request_id=f"{index}")
    outputs = sorted(serve(engine), key=lambda output: output.request_id)
    assert [list(output.token_ids) for output in outputs] == expected


def test_an_interrupt_that_tears_a_step_stops_the_engine(model, monkeypatch):
    engine = make_engine(model)

    def torn(kv_pages, state, packed, needs):
        for leaf in jax.tree.leaves(kv_pages):
            leaf.delete()  # donated, and the new ones never came back
        raise KeyboardInterrupt

    engine.add([1], GREEDY)
    monkeypatch.setattr(engine._runner, "run", torn)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(RuntimeError, match="make a new Engine"):
        engine.add([1], GREEDY)


def test_an_interrupt_between_donation_and_return_waits_for_the_step(engine, expected, monkeypatch):
    run = engine._runner.run

    def signalled(*args):
        result = run(*args)
        signal.raise_signal(signal.SIGINT)
        return result

    engine.add(PROMPTS[0], GREEDY)
    waited_for = []
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", signalled)
        patch.setattr(jax, "block_until_ready", waited_for.extend)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert len(waited_for) == 1  # else the next steps could be packed over what this one reads
    engine.add(PROMPTS[0], GREEDY)
    (output,) = serve(engine)
    assert list(output.token_ids) == expected[0]


def test_buffers_are_packed_anew_only_after_their_steps_however_often_they_are_interrupted(
    engine, expected, monkeypatch
):
    prepare, run, dispatched, waited_for = engine._runner.prepare, engine._runner.run, [], []

    def prepared(*args):
        prepare(*args)
        if len(rounds) % 2:  # packed for a step that never comes
            raise KeyboardInterrupt

    def signalled(*args):
        result = run(*args)
        dispatched.append(result[0].token_ids)
        signal.raise_signal(signal.SIGINT)
        return result

    rounds: list[int] = []
    for index in range(2 * MAX_IN_FLIGHT + 1):
        rounds.append(index)
        for prompt in PROMPTS[index % 3 :]:
            engine.add(prompt, GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "prepare", prepared)
            patch.setattr(engine._runner, "run", signalled)
            patch.setattr(jax, "block_until_ready", waited_for.extend)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        assert [id(array) for array in waited_for] == [id(array) for array in dispatched]
    assert len(dispatched) == MAX_IN_FLIGHT
    for index, prompt in enumerate(PROMPTS):
        engine.add(prompt, GREEDY, request_id=f"{index}")
    outputs = sorted(serve(engine), key=lambda output: output.request_id)
    assert [list(output.token_ids) for output in outputs] == expected


def test_a_step_that_may_not_compile_stops_the_engine(model):
    engine = make_engine(model, recompile="error")
    engine._runner.mark_warm()
    engine.add([1], GREEDY)
    with pytest.raises(RecompileError, match="T8 S3"):
        engine.step()
    with pytest.raises(RuntimeError, match=r"RecompileError.*make a new Engine"):  # not an endless loop
        engine.step()


def test_an_interrupt_while_the_prefix_cache_is_reset_comes_when_it_is(engine, monkeypatch):
    reset, done = engine._scheduler.reset_prefix_cache, []

    def signalled():
        signal.raise_signal(signal.SIGINT)
        reset()
        done.append("whole")

    monkeypatch.setattr(engine._scheduler, "reset_prefix_cache", signalled)
    with pytest.raises(KeyboardInterrupt):
        engine.reset_prefix_cache()
    assert done == ["whole"]


def three_steps(engine):
    for _ in range(3):
        engine.step()


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt
