"""Larger steps where nobody decodes: the same answers, by programs that are there after the warm-up."""

import itertools

import pytest

from jpaged.errors import RecompileError
from jpaged.request import SamplingParams
from tests.engine_driver import give_gpu_shapes, make_engine, serve, shapes_taken, tokens_of
from tests.fakes import tiny_llama

SIZES = {"budget": 16, "token_buckets": (4, 16, 32), "recompile": "error"}
LARGE = {"scheduler": {"max_num_prefill_tokens": 32}}
SHARED = [(7 * i + 3) % 64 for i in range(40)]
PROMPTS = [[*SHARED, 1], [5] * 3, [*SHARED[:20], 9, 9], [(5 * i) % 64 for i in range(70)], [8], [*SHARED, 2, 3]]
GREEDY = [SamplingParams(temperature=0.0, max_tokens=1 + 3 * i, ignore_eos=True) for i in range(6)]
SAMPLED = [SamplingParams(temperature=1.2, seed=i, max_tokens=1 + 3 * i, ignore_eos=True, top_k=9) for i in range(6)]


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def ordinary(model):
    return make_engine(model, **SIZES)


@pytest.fixture(scope="module")
def larger(model):
    engine = make_engine(model, **SIZES, **LARGE)
    engine.warm_up()
    return engine


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("at_once", [True, False])
def test_answers_are_those_of_ordinary_steps(ordinary, larger, params, at_once, monkeypatch):
    requests = list(zip(PROMPTS, params, strict=True))
    expected = tokens_of(serve(ordinary, requests, cold=True, at_once=at_once))
    shapes, before = shapes_taken(monkeypatch), larger.stats().num_compilations
    assert tokens_of(serve(larger, requests, cold=True, at_once=at_once)) == expected
    assert 32 in {shape.num_tokens for shape in shapes}
    assert tokens_of(serve(larger, requests, at_once=at_once)) == expected  # found in the cache
    assert larger.stats().num_cached_tokens > 0
    assert larger.stats().num_compilations == before


def test_chunks_and_a_cache_of_none_change_no_answer(model, ordinary):
    requests = list(zip(PROMPTS, SAMPLED, strict=True))
    expected = tokens_of(serve(ordinary, requests, cold=True))
    for chunk, cache in ((24, {}), (5, {"prefix_cache": False})):
        scheduler = LARGE["scheduler"] | {"max_chunk_tokens": chunk}
        engine = make_engine(model, **SIZES, scheduler=scheduler, cache=cache)
        assert tokens_of(serve(engine, requests)) == expected


def test_beside_a_row_that_decodes_no_step_is_large(larger, monkeypatch):
    plans, plan = [], larger._scheduler.plan
    monkeypatch.setattr(larger._scheduler, "plan", lambda: plans.append(plan()) or plans[-1])
    serve(larger, [(PROMPTS[1], GREEDY[5]), *zip(PROMPTS[2:], GREEDY[2:], strict=True)], cold=True)
    sizes = {bool(plan.num_decode and plan.starts[0]): set() for plan in plans if plan is not None and plan.seqs}
    for one in plans:
        if one is not None and one.seqs:
            sizes[bool(one.num_decode and one.starts[0])].add(one.num_tokens)
    assert max(sizes[True]) == 16
    assert max(sizes[False]) == 32


@pytest.mark.parametrize("few", [(), (2,)])
def test_after_a_warm_up_with_the_shapes_of_a_gpu_nothing_compiles(model, ordinary, few, monkeypatch):
    give_gpu_shapes(monkeypatch, *few)
    engine = make_engine(model, **SIZES | {"token_buckets": (2, 4, 16, 32), "warmup": "eager"}, **LARGE)
    rows = {t: [s.num_rows for s in engine.step_shapes if s.num_tokens == t] for t in (16, 32)}
    assert rows == {16: [*few, 4], 32: [*few, 4]}
    before, shapes = engine.stats().num_compilations, shapes_taken(monkeypatch)
    for count, params in itertools.product((1, 2, 3, 4, 6), (GREEDY, SAMPLED)):
        requests = list(zip(PROMPTS[-count:], params[-count:], strict=True))
        found = tokens_of(serve(engine, requests, cold=True))
        assert found == tokens_of(serve(ordinary, requests, cold=True))
    short = [([i + 1] * 8, SamplingParams(max_tokens=1, temperature=0.0)) for i in range(4)]
    serve(engine, short, cold=True)  # all rows of a large step sample
    taken = {(shape.num_tokens, shape.num_rows) for shape in shapes}
    assert {(32, 4), *((32, n) for n in few)} <= taken
    assert engine.stats().num_compilations == before


def test_a_large_step_that_was_not_compiled_is_a_fault(model):
    engine = make_engine(model, **SIZES, **LARGE)
    shapes = engine.step_shapes
    engine.step_shapes = tuple(shape for shape in shapes if shape.num_tokens < 32)
    engine.warm_up()
    engine.add(PROMPTS[3], GREEDY[0])
    with pytest.raises(RecompileError):
        engine.step()
