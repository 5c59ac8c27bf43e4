"""The engine's promises: same answer however it was computed, no page leaked, no request harmed by another."""

import functools
import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from jpaged.engine import Engine
from jpaged.errors import ConfigError
from jpaged.request import SamplingParams
from tests import engine_driver
from tests.engine_driver import GREEDY, PAGE, PROMPTS, make_engine, tokens_of
from tests.fakes import dense_logits, greedy_without_cache, tiny_llama
from tests.kernels.hlo import pool_copies
from tests.test_engine_structured import FORMS, TOKENIZER

# Engines are shared, so what one test computed must not be found by the next one.
serve = functools.partial(engine_driver.serve, cold=True)


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def expected(model):
    return [greedy_without_cache(model, prompt, 12) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def engine(model):
    """One engine for all tests that leave it idle; compiled once."""
    return make_engine(model)


@pytest.fixture(scope="module")
def small_engine(model):
    """A pool so small that running sequences push each other out."""
    return make_engine(model, num_pages=8, length=48)


@pytest.fixture(scope="module")
def narrow_engine(model):
    """Two rows and five tokens a step: every prompt comes in chunks."""
    return make_engine(model, seqs=2, budget=5, token_buckets=(2, 5))


@pytest.mark.parametrize(
    "options",
    [
        {"run_ahead": False},
        {"seqs": 1, "token_buckets": (32,)},
        {"token_buckets": (4, 64), "page_buckets": (2, 16)},
    ],
    ids=["in-turn", "one-row", "more-buckets"],
)
def test_paged_equals_dense_whatever_the_settings(model, expected, options):
    outputs = serve(make_engine(model, **options), [(prompt, GREEDY) for prompt in PROMPTS])
    assert tokens_of(outputs) == expected


@pytest.mark.parametrize("at_once", [True, False], ids=["batched", "alone"])
@pytest.mark.parametrize("which", ["engine", "narrow_engine"])
def test_paged_equals_dense(request, expected, which, at_once):
    outputs = serve(request.getfixturevalue(which), [(prompt, GREEDY) for prompt in PROMPTS], at_once=at_once)
    assert tokens_of(outputs) == expected
    assert all(output.finish_reason == "length" and output.text == "" for output in outputs)


@pytest.mark.parametrize("run_ahead", [True, False])
def test_preempted_equals_undisturbed(small_engine, expected, run_ahead, monkeypatch):
    monkeypatch.setattr(small_engine, "config", replace(small_engine.config, run_ahead=run_ahead))
    before = small_engine.stats().num_preemptions
    outputs = serve(small_engine, [(prompt, GREEDY) for prompt in PROMPTS])
    preemptions = small_engine.stats().num_preemptions - before
    assert preemptions == sum(output.num_preemptions for output in outputs) > 0
    assert tokens_of(outputs) == expected


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.5,
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={3: 1.0, 7: -2.0},
        seed=seed,
        max_tokens=12,
        min_tokens=3,
        ignore_eos=True,
    )


def test_sampling_depends_on_seed_and_position_only(engine, narrow_engine, small_engine):
    requests = [(prompt, sampled(seed)) for seed, prompt in enumerate(PROMPTS)]
    alone = tokens_of(serve(engine, requests, at_once=False))
    together = tokens_of(serve(engine, requests))
    chunked = tokens_of(serve(narrow_engine, requests))
    before = small_engine.stats().num_preemptions
    preempted = tokens_of(serve(small_engine, requests))
    assert small_engine.stats().num_preemptions > before
    assert alone == together == chunked == preempted
    other = tokens_of(serve(engine, [(prompt, sampled(99)) for prompt in PROMPTS]))
    assert other != alone


def test_requests_without_a_seed_differ_and_a_new_engine_repeats_them(model):
    params = SamplingParams(temperature=2.0, max_tokens=8, ignore_eos=True)
    first, second = (tokens_of(serve(make_engine(model), [([1, 2], params)] * 3)) for _ in range(2))
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 3


def test_stops_at_stop_token_ids_and_eos(model, engine, expected):
    third = expected[0][2]
    first_at = expected[0].index(third)
    by_id = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[third])
    assert engine.eos_token_ids == ()
    (output,) = serve(engine, [(PROMPTS[0], by_id)])
    assert list(output.token_ids) == expected[0][: first_at + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", third)

    engine = Engine(model, engine.config, eos_token_ids=[third])
    stopping = SamplingParams(temperature=0.0, max_tokens=12)
    plain, ignoring = serve(engine, [(PROMPTS[0], stopping), (PROMPTS[0], GREEDY)])
    assert (plain.finish_reason, plain.stop_reason) == ("stop", None)
    assert list(plain.token_ids) == expected[0][: first_at + 1]
    assert list(ignoring.token_ids) == expected[0]


def test_min_tokens_keeps_stop_ids_from_being_sampled(engine, expected):
    first = expected[0][0]
    params = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=5, stop_token_ids=[first])
    (output,) = serve(engine, [(PROMPTS[0], params)])
    assert first not in output.token_ids[:5]
    assert len(output.token_ids) > 5


def test_max_tokens_none_goes_on_to_the_limit(model):
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    (output,) = serve(make_engine(model, length=24), [([1, 2, 3], params)])
    assert len(output.token_ids) == 21
    assert output.finish_reason == "length"


def test_logprobs_equal_the_dense_model(model, narrow_engine, expected):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    requests = [(prompt, params if index % 2 == 0 else GREEDY) for index, prompt in enumerate(PROMPTS)]
    outputs = serve(narrow_engine, requests)
    for index, output in enumerate(outputs):
        if index % 2:
            assert output.logprobs is None
            assert output.prompt_logprobs is None
            continue
        whole = PROMPTS[index] + expected[index]
        dense = np.asarray(jax.nn.log_softmax(dense_logits(model, whole)))
        assert output.prompt_logprobs[0] is None
        entries = [*output.prompt_logprobs[1:], *output.logprobs]
        assert len(entries) == len(whole) - 1
        for position, entry in enumerate(entries):
            assert entry.token_id == whole[position + 1]
            # Two f32 orders of summation over 32-wide layers; log-probabilities are of order 5.
            assert entry.logprob == pytest.approx(dense[position, entry.token_id], abs=2e-5)
            k = 2 if position < len(PROMPTS[index]) - 1 else 3
            best = np.argsort(-dense[position])[:k]
            assert [token for token, _ in entry.top] == best.tolist()
            assert [value for _, value in entry.top] == pytest.approx(dense[position, best], abs=2e-5)


def test_scores_a_prompt_without_output(model):
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    (output,) = serve(make_engine(model, length=17), [(PROMPTS[1], params)])
    assert output.token_ids == ()
    assert len(output.prompt_logprobs) == 17


@pytest.mark.parametrize("steps", range(6))
def test_abort_frees_everything_and_leaves_the_others_alone(small_engine, expected, steps):
    engine = small_engine
    for index, prompt in enumerate(PROMPTS):
        engine.add(prompt, GREEDY, request_id=f"{index}")
    done = {}
    for _ in range(steps):
        done.update((output.request_id, output) for output in engine.step())
    aborted = engine.abort("1")
    assert aborted.finish_reason == "abort"
    assert list(aborted.token_ids) == expected[1][: len(aborted.token_ids)]
    assert engine.abort("1") is None
    assert "1" not in engine.page_map()
    while engine.has_work:
        done.update((output.request_id, output) for output in engine.step())
    assert {key: list(output.token_ids) for key, output in done.items()} == {
        f"{index}": expected[index] for index in (0, 2, 3, 4)
    }
    assert engine.stats().now.pages_used == 0


def test_a_mix_of_everything_compiles_nothing_after_warm_up(model, monkeypatch):
    engine = make_engine(model, token_buckets=(1, 32), recompile="error")
    programs = []
    engine.warm_up(lambda program, seconds: programs.append(program))
    assert {one.size for one in programs if one.part == "forward"} == set(engine.step_shapes)
    requests = [(prompt, sampled(1)) for prompt in PROMPTS]
    requests += [(prompt, GREEDY) for prompt in PROMPTS]
    requests += [(PROMPTS[1], SamplingParams(max_tokens=3, logprobs=20, prompt_logprobs=20, min_tokens=1))]
    requests += [
        ([4], SamplingParams(max_tokens=3, top_p=0.5)),
        ([4], SamplingParams(max_tokens=3, presence_penalty=1.0)),
    ]
    compiled = []
    with monkeypatch.context() as patch:  # whatever jax compiles, not only what the engine counts
        patch.setattr(
            "jax._src.compiler.compile_or_get_cached", lambda *a, **k: compiled.append(a) or pytest.fail(str(a))
        )
        serve(engine, requests)
    assert compiled == []
    assert engine.stats().num_compilations == len(programs)


def requests_of_every_kind() -> list:
    common = {"max_tokens": 12, "ignore_eos": True}
    beams = SamplingParams(temperature=0.0, n=2, best_of=4, use_beam_search=True, **common)
    form = SamplingParams(structured=FORMS["choice"], max_tokens=40)
    return [
        *((prompt, GREEDY) for prompt in PROMPTS),
        *((prompt, SamplingParams(seed=1, **common)) for prompt in PROMPTS),
        *((prompt, sampled(1)) for prompt in PROMPTS[:3]),
        *((prompt, beams) for prompt in PROMPTS[:3]),
        *((prompt, SamplingParams(n=3, best_of=4, **common)) for prompt in PROMPTS[:3]),
        *((prompt, form) for prompt in PROMPTS if find_spec("llguidance")),
        *((list(range(20 * i, 20 * i + 30)), replace(GREEDY, max_tokens=30, presence_penalty=0.5)) for i in range(6)),
        ([7, 8, 9] * 6, replace(GREEDY, max_tokens=30)),
        ([4], SamplingParams(max_tokens=3, top_p=0.5)),
        ([4, 5], SamplingParams(max_tokens=9, min_tokens=3, logit_bias={3: 1.0}, allowed_token_ids=range(9))),
        (PROMPTS[1], SamplingParams(max_tokens=6, logprobs=20, prompt_logprobs=20)),
    ]


def compiled_late(guesses: bool) -> dict[str, list]:
    """What jax compiles for an engine until it is warm, and after that; and how often things happened that may do so.

    Args:
      guesses: the engine guesses, has 8-bit pages, and warms up while it serves. Else it has several steps in one
        program, and weights that are bound to their device, as what a step gives is then too.
    """
    compiled = []

    def listen(event: str, seconds: float, **about) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    model, other = (tiny_llama(seed, vocab_size=288) for seed in (0, 1))
    options = {"cache": {"host_pages": 16, "dtype": "int8" if guesses else "float32"}, "decode_steps": 4 - 3 * guesses}
    options |= {"num_pages": 24, "length": 64, "scheduler": {"preemption": "swap", "headroom_pages": 0}}
    options["speculation"] = SpeculationConfig(shortest_match=1, token_cost=0.0, wait_cost=0.0) if guesses else None
    if not guesses:
        nnx.update(model, jax.device_put(nnx.state(model), jax.devices()[0]))
    engine = Engine(model, engine_driver.make_engine_config(recompile="error", **options), tokenizer=TOKENIZER)
    if guesses:
        engine.add(PROMPTS[0], GREEDY)
        engine.step()
    engine.warm_up()
    early, counts = [*compiled], []
    for at_once in (True, False, True):
        serve(engine, requests_of_every_kind(), at_once=at_once)
        engine.pin_prefix([1] * 20)
        engine.step()
        engine.update_weights(other)
        engine.step()
        stats = engine.stats()
        counts.append((stats.num_swaps or not at_once, stats.num_guesses or not guesses, stats.num_copied_pages))
        engine.restart()
    return {"early": early, "late": compiled[len(early) :], "counts": counts}


@pytest.mark.parametrize("guesses", [False, True])
def test_an_engine_alone_in_a_process_compiles_nothing_after_warm_up(guesses):
    # What other engines of a process compiled, this one would find.
    code = f"import json; from tests import test_engine; print(json.dumps(test_engine.compiled_late({guesses})))"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"jit(forward)", "jit(_load_entry)", "jit(_load_masks)", "jit(_write)"} <= {*found["early"]}
    assert found["late"] == []
    assert all(map(all, found["counts"])), found["counts"]


def test_prompt_steps_of_few_rows_have_shapes_of_their_own_and_the_same_answers(model, monkeypatch):
    requests = [(prompt, GREEDY) for prompt in PROMPTS]
    requests += [(prompt, sampled(1)) for prompt in PROMPTS]
    requests += [(PROMPTS[1], SamplingParams(max_tokens=3, temperature=0.0, logprobs=3, prompt_logprobs=3))]
    options = {"token_buckets": (2, 4, 32), "recompile": "error", "warmup": "eager"}
    wide = make_engine(model, **options)
    expected = [serve(wide, requests, at_once=at_once) for at_once in (True, False)]

    engine_driver.give_gpu_shapes(monkeypatch, 2)
    engine = make_engine(model, **options)
    few, many = engine.step_shapes[-2:]
    assert engine.step_shapes == (*wide.step_shapes[:2], few, many)
    assert [(shape.num_tokens, shape.num_rows) for shape in (few, many)] == [(32, 2), (32, 4)]
    assert engine.stats().num_compilations == wide.stats().num_compilations + 2  # forward and prompt logprobs
    shapes = engine_driver.shapes_taken(monkeypatch)
    for at_once, answers in zip((True, False), expected, strict=True):
        shapes.clear()
        outputs = serve(engine, requests, at_once=at_once)
        assert {few, many} & set(shapes) == ({few, many} if at_once else {few})
        assert tokens_of(outputs) == tokens_of(answers)
        found, wanted = ([one.logprob for one in made[-1].prompt_logprobs[1:]] for made in (outputs, answers))
        assert found == pytest.approx(wanted, abs=1e-5)
    assert engine.stats().num_compilations == wide.stats().num_compilations + 2


def test_the_compiled_step_copies_no_pool(model):
    # One token is a case of its own: XLA's scatter of a single index copies what it writes to.
    engine = make_engine(model, num_pages=61, seqs=1, budget=8, token_buckets=(1, 8))
    for step_shape in engine.step_shapes:
        compiled = engine.lower_step(step_shape).compile()
        assert pool_copies(compiled, engine._kv_pages[0].spec) == []
        # Pages are aliased to outputs, so no second pool exists while the step runs.
        donated = jax.tree.leaves(engine._kv_pages)
        assert compiled.memory_analysis().alias_size_in_bytes >= sum(leaf.nbytes for leaf in donated)


def test_update_weights_changes_the_answers_without_a_recompile(model, expected):
    engine = make_engine(model)
    other = tiny_llama(seed=1)
    serve(engine, [(prompt, GREEDY) for prompt in PROMPTS])
    compiled = engine.stats().num_compilations
    engine.update_weights(other)
    outputs = serve(engine, [(prompt, GREEDY) for prompt in PROMPTS])
    assert tokens_of(outputs) == [greedy_without_cache(other, prompt, 12) for prompt in PROMPTS]
    engine.update_weights(nnx.state(model))
    assert tokens_of(serve(engine, [(prompt, GREEDY) for prompt in PROMPTS])) == expected
    assert engine.stats().num_compilations == compiled
    with pytest.raises(ConfigError, match="structure"):
        engine.update_weights(tiny_llama(num_hidden_layers=1))
    with pytest.raises(ConfigError, match=r"embed.*expected float32\[64, 32\]"):
        engine.update_weights(tiny_llama(vocab_size=65))


def test_streaming_requests_give_each_token(engine, expected):
    engine.add(PROMPTS[0], GREEDY, request_id="s", stream=True)
    engine.add(PROMPTS[1], GREEDY, request_id="w")
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    streamed = [list(o.token_ids) for o in outputs if o.request_id == "s"]
    assert streamed == [expected[0][:n] for n in range(1, 13)]
    assert [o.request_id for o in outputs if o.finished] == ["s", "w"]
    assert sum(o.request_id == "w" for o in outputs) == 1


def test_stats_count_what_happened(engine):
    before = engine.stats()
    serve(engine, [(prompt, GREEDY) for prompt in PROMPTS])
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running) == (0, 0)
    assert (stats.pages_pinned, stats.num_swaps) == (0, 0)
    assert stats.pages_cached > 0
    assert stats.num_queried_tokens - before.num_queried_tokens == sum(map(len, PROMPTS))
    assert stats.num_cached_tokens == before.num_cached_tokens
    assert stats.num_requests - before.num_requests == 5
    assert stats.num_finished - before.num_finished == 5
    assert stats.num_generated_tokens - before.num_generated_tokens == 60
    assert stats.num_step_tokens - before.num_step_tokens == sum(map(len, PROMPTS)) + 5 * 11
    assert stats.peak.pages_used <= stats.num_pages - 1
    assert 0 < stats.mean_wasted_fraction < 1


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_other_page_dtypes_serve(model, expected, dtype):
    config = EngineConfig(
        cache=CacheConfig(page_size=PAGE, num_pages=64, dtype=dtype),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64),
        compilation_cache=False,
        token_buckets=(4, 32),
    )
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    (output,) = serve(Engine(model, config), [(PROMPTS[2], params)])
    dense = np.asarray(jax.nn.log_softmax(dense_logits(model, PROMPTS[2])))
    exact = [dense[i, token] for i, token in enumerate(PROMPTS[2][1:])]
    error = max(abs(entry.logprob - value) for entry, value in zip(output.prompt_logprobs[1:], exact, strict=True))
    # Rounding of K and V: 2^-9 (bf16), 2^-8 (int8 of the row's largest), 2^-4 (e4m3), times values of order 1.
    assert error < {"bfloat16": 0.02, "int8": 0.02, "float8_e4m3fn": 0.2}[dtype]
    assert error > 0
