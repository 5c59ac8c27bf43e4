"""What is refused, what fails, and that nobody else notices."""

import json

import jax
import jax.numpy as jnp
import pytest

from jpaged.config import SpeculationConfig
from jpaged.errors import ConfigError, PromptTooLongError, RecompileError, RequestError
from jpaged.request import SamplingParams
from tests.engine_driver import GREEDY, PROMPTS, check_pages, make_engine, serve, tokens_of
from tests.fakes import greedy_without_cache, tiny_llama


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def engine(model):
    return make_engine(model)


def test_nan_ends_one_request_and_does_not_leak():
    bad = [1, 63, 2]
    # The tied head would give NaN for token 63 everywhere, so give the model a head of its own.
    untied = tiny_llama(tie_word_embeddings=False)
    untied.embed[...] = untied.embed[...].at[63].set(jnp.nan)
    clean = tokens_of(serve(make_engine(untied), [(prompt, GREEDY) for prompt in PROMPTS]))
    engine = make_engine(untied)
    outputs = serve(engine, [(PROMPTS[0], GREEDY), (bad, GREEDY), *((prompt, GREEDY) for prompt in PROMPTS[1:])])
    assert outputs[1].finish_reason == "error"
    assert "NaN" in outputs[1].error
    assert tokens_of([outputs[0], *outputs[2:]]) == clean
    # Its pages are reused by others now: stale NaN must not reach them.
    assert tokens_of(serve(engine, [(prompt, GREEDY) for prompt in PROMPTS])) == clean


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "empty"),
        ([1, 64], GREEDY, r"token id 64.*\[0, 64\)"),
        ([-1], GREEDY, "token id -1"),
        ([1.5], GREEDY, "list of token ids"),
        ([True], GREEDY, "list of token ids"),
        (None, GREEDY, "list of token ids"),
        ([1] * 128, GREEDY, "128 tokens"),
        ([1] * 120, GREEDY, "lower max_tokens"),
        ("text", GREEDY, "no tokenizer"),
        ([1], SamplingParams(stop="x"), "tokenizer"),
        ([1], SamplingParams(logprobs=21), "at most 20"),
        ([1], SamplingParams(prompt_logprobs=21), "at most 20"),
        ([1], SamplingParams(logit_bias={64: 1.0}), "logit_bias holds token id 64"),
        ([1], SamplingParams(stop_token_ids=[64]), "stop_token_ids holds token id 64"),
        ([1], {"temperature": 0}, "expected SamplingParams"),
    ],
)
def test_bad_requests_are_refused_at_the_door(model, engine, prompt, params, message):
    engine.add(PROMPTS[0], GREEDY)
    with pytest.raises(RequestError, match=message):
        engine.add(prompt, params)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert tokens_of(outputs) == [greedy_without_cache(model, PROMPTS[0], 12)]
    assert engine.stats().now.pages_used == 0


def test_a_prompt_longer_than_the_pool_is_refused(model):
    small_engine = make_engine(model, num_pages=8, length=48)
    with pytest.raises(PromptTooLongError, match="48"):
        small_engine.add([1] * 60, GREEDY)
    with pytest.raises(ConfigError, match="holds 24 tokens"):
        make_engine(model, num_pages=4, length=25)


def test_duplicate_request_id_is_refused(engine):
    engine.add([1], GREEDY, request_id="a")
    with pytest.raises(RequestError, match="'a'"):
        engine.add([2], GREEDY, request_id="a")
    engine.abort("a")


def test_a_late_shape_is_an_error_or_a_warning(model, caplog):
    engine = make_engine(model, recompile="error")
    engine._runner.mark_warm()
    engine.add([1], GREEDY)
    with pytest.raises(RecompileError, match="T4 S4"):
        engine.step()
    engine = make_engine(model)
    engine._runner.mark_warm()
    serve(engine, [([1], GREEDY)])
    assert "compiles late" in caplog.text


def test_a_failed_step_stops_the_engine_and_says_so(model, monkeypatch):
    engine = make_engine(model)
    engine.add([1], GREEDY)

    def fail(*args):
        raise ValueError("device lost")

    monkeypatch.setattr(engine._runner, "run", fail)
    with pytest.raises(ValueError, match="device lost"):
        engine.step()
    with pytest.raises(RuntimeError, match=r"device lost.*restart it, or make a new Engine"):
        engine.add([1], GREEDY)
    with pytest.raises(RuntimeError, match="make a new Engine"):
        engine.step()


@pytest.mark.parametrize("broken", ["make_pages", "make_sampler_state", "PageMover"])
def test_a_failed_restart_leaves_an_engine_without_requests_that_says_why(model, monkeypatch, broken):
    engine = make_engine(model)
    expected = tokens_of(serve(engine, [(PROMPTS[0], GREEDY)]))
    engine.add(PROMPTS[0], GREEDY, request_id="lost")
    engine.step()

    def no_room(*args, **options):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    with monkeypatch.context() as patch:
        patch.setattr(f"jpaged.engine.{broken}", no_room)
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            engine.restart()

    assert not engine.has_work
    assert engine.abort("lost") is None
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_finished, stats.now.pages_used) == (0, 0, 0, 0)
    check_pages(engine)
    assert engine.picture().requests == ()
    assert engine.page_map() == {}
    assert engine.metrics.finished.total() == 0
    engine.reset_prefix_cache()
    what = [engine.step, engine.warm_up, lambda: engine.add([1]), lambda: engine.lower_step(engine.step_shapes[0])]
    for call in what:
        with pytest.raises(RuntimeError, match=r"a restart failed: .*RESOURCE_EXHAUSTED.*restart it, or make a new"):
            call()
    assert not any(hasattr(engine, name) for name in ("_kv_pages", "_state"))  # nothing of a pool takes memory

    engine.restart()
    assert tokens_of(serve(engine, [(PROMPTS[0], GREEDY)])) == expected


MAKERS = [  # all that `Engine._begin` calls, in its order
    "MemoryManager.for_pool",
    "Speculation",
    "Scheduler",
    "BatchPacker",
    "Collector",
    "Constraints",
    "StateLoader",
    "PoolUse",
    "StatsCounter",
    "make_pages",
    "make_sampler_state",
    "PageMover",
]


@pytest.mark.parametrize("broken", MAKERS)
def test_a_restart_that_fails_anywhere_loses_requests_and_pages_alike(model, monkeypatch, broken):
    engine = make_engine(model, speculation=SpeculationConfig(), scheduler={"max_chunk_tokens": 4})
    expected = tokens_of(serve(engine, [(prompt, GREEDY) for prompt in PROMPTS]))
    for index, prompt in enumerate(PROMPTS):  # one more than may run
        engine.add(prompt, GREEDY, request_id=f"lost{index}")
    engine.step()
    engine.step()
    assert engine.stats().num_waiting

    def fail(*args, **options):
        raise OSError("the host is at fault")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(f"jpaged.engine.{broken}", fail)
            with pytest.raises(OSError, match="the host is at fault"):
                engine.restart()
        assert not engine.has_work
        assert engine.abort("lost0") is None
        assert (engine.picture().requests, engine.page_map()) == ((), {})
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.now.pages_used) == (0, 0, 0)
        check_pages(engine)
        engine._scheduler.check_invariants()
        for call in (engine.step, engine.warm_up, lambda: engine.add([1])):
            with pytest.raises(RuntimeError, match=r"a restart failed: .*the host is at fault.*restart it"):
                call()

    engine.restart()
    assert engine.metrics.finished.total() == 0
    assert tokens_of(serve(engine, [(prompt, GREEDY) for prompt in PROMPTS])) == expected


@pytest.mark.parametrize("gone", ["deleted", "another folder"])
def test_a_restart_needs_no_file_of_preemption_costs(model, tmp_path, monkeypatch, gone):
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"prefill_s_per_token": 1.0, "swap_s": 1.0, "swap_s_per_page": 1.0}))
    monkeypatch.chdir(tmp_path)
    options = {"cache": {"host_pages": 16, "prefix_cache": False}, "scheduler": {"preemption_costs": "costs.json"}}
    engine = make_engine(model, num_pages=9, length=64, **options)
    requests = [(prompt, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)) for prompt in PROMPTS]
    expected = tokens_of(serve(engine, requests))
    assert engine.stats().num_swaps  # the costs say so: without them all is computed again
    engine.add(PROMPTS[0], GREEDY)
    engine.step()
    if gone == "deleted":
        costs.unlink()
    else:
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
    engine.restart()
    assert not engine.has_work
    assert tokens_of(serve(engine, requests)) == expected
    assert engine.stats().num_swaps
    with pytest.raises(ConfigError, match=r"no preemption costs in costs\.json"):
        make_engine(model, **options)


def test_pages_and_state_are_bound_to_the_device_from_the_first_moment_on(model):
    """A program's key tells whether arrays are: it would depend on which request comes first."""
    engine = make_engine(model)

    def are_bound() -> bool:
        return all(leaf.committed for leaf in jax.tree.leaves((engine._kv_pages, engine._state)))

    assert are_bound()
    serve(engine, [([1, 2, 3], SamplingParams(max_tokens=2, logit_bias={3: 1.0}))])
    assert are_bound()
    engine.restart()
    assert are_bound()
