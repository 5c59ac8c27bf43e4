"""Whatever is shared, copied, moved or computed again, the answers are those of requests that are alone."""

import itertools
from dataclasses import replace

import pytest

from jpaged.engine import Engine
from jpaged.errors import RequestError
from jpaged.request import SamplingParams
from tests.engine_driver import PAGE, check_pages, make_engine, serve, tokens_of
from tests.fakes import greedy_without_cache, tiny_llama

PROMPT = list(range(20, 37))  # two full pages and a token
SIZES = {"num_pages": 12, "length": 64, "token_buckets": (32,)}


def greedy(num_tokens: int, **params) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **params)


def sampled(seed: int, num_tokens: int = 8, **params) -> SamplingParams:
    return SamplingParams(temperature=1.5, seed=seed, max_tokens=num_tokens, ignore_eos=True, **params)


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def compiled(model) -> Engine:
    """The one engine that compiles its step; all others take it over."""
    engine = make_engine(model, **SIZES)
    engine.warm_up()
    return engine


@pytest.fixture
def make(model, compiled):
    """Engines of other settings with the same step."""

    def make_one(**options) -> Engine:
        engine = make_engine(model, **(SIZES | options))
        engine._runner._executables |= compiled._runner._executables
        engine._runner.compilations += compiled._runner.compilations
        return engine

    return make_one


@pytest.fixture(params=[True, False], ids=["ahead", "in-turn"])
def engine(request, make) -> Engine:
    return make(run_ahead=request.param)


class Count:
    """What happened between two looks at an engine's counters."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._before = engine, engine.stats()

    def __getattr__(self, name: str) -> int:
        return getattr(self._engine.stats(), name) - getattr(self._before, name)


def finish(engine: Engine) -> dict:
    done = {}
    while engine.has_work:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        check_pages(engine)
    return done


def test_what_was_computed_before_is_not_computed_again(engine, model):
    answer = greedy_without_cache(model, PROMPT, 12)
    cases = [
        (PROMPT, 0),
        # The whole prompt is there: its last token alone is computed, and the page that it is in is not written to.
        (PROMPT, 16),
        (PROMPT[:16], 15),
        # 17 + 11 tokens have KV: three full pages, and four tokens of a partly filled one.
        (PROMPT + answer, 28),
        (PROMPT + answer[:9] + [60, 61], 26),
        # What follows a full page is another page that begins alike, or is not there.
        ([*PROMPT[:12], 1, 2, 3], 12),
        ([*PROMPT[:16], 50], 16),
        ([50, *PROMPT], 0),
    ]
    for prompt, num_cached in cases:
        count = Count(engine)
        (output,) = serve(engine, [(prompt, greedy(12))])
        assert list(output.token_ids) == greedy_without_cache(model, prompt, 12)
        assert output.num_cached_tokens == num_cached
        assert count.num_step_tokens == len(prompt) - num_cached + 11
        assert (count.num_queried_tokens, count.num_cached_tokens) == (len(prompt), num_cached)


def test_a_new_prefix_is_computed_once_for_all_requests_of_a_step(engine, model):
    prompts = [PROMPT, PROMPT, [*PROMPT[:16], 40, 41], PROMPT]
    count = Count(engine)
    outputs = serve(engine, [(prompt, greedy(3)) for prompt in prompts])
    assert tokens_of(outputs) == [greedy_without_cache(model, prompt, 3) for prompt in prompts]
    assert [output.num_cached_tokens for output in outputs] == [0, 16, 16, 16]
    assert count.num_step_tokens == 17 + 1 + 2 + 1 + 4 * 2


def test_without_a_prefix_cache_nothing_is_found(make, model):
    engine = make(cache={"prefix_cache": False})
    for _ in range(2):
        (output,) = serve(engine, [(PROMPT, greedy(3))])
        assert (list(output.token_ids), output.num_cached_tokens) == (greedy_without_cache(model, PROMPT, 3), 0)
    assert (engine.stats().pages_cached, engine.stats().num_queried_tokens) == (0, 0)
    with pytest.raises(RequestError, match="there is no prefix cache"):
        engine.pin_prefix(PROMPT)


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "min_tokens": 3}


@pytest.mark.parametrize(
    "params", [{}, PENALTIES | {"logit_bias": {7: 3.0}, "stop_token_ids": [7]}], ids=["plain", "all"]
)
@pytest.mark.parametrize(("length", "num_copies"), [(17, 2), (20, 2), (16, 0), (3, 2)])
def test_n_answers_are_those_of_n_requests_on_shared_pages(engine, length, num_copies, params):
    prompt = PROMPT[:3] * (length == 3) or ([*PROMPT, 1, 2, 3])[:length]
    expected = tokens_of(serve(engine, [(prompt, sampled(seed, **params)) for seed in (5, 6, 7)]))
    assert len({tuple(tokens) for tokens in expected}) == 3
    engine.reset_prefix_cache()
    count = Count(engine)
    engine.add(prompt, sampled(5, n=3, **params), request_id="n", stream=True)
    seen = []
    while engine.has_work:
        seen += engine.step()
        pages = engine.page_map().get("n", ())
        for full in range(length // PAGE):
            assert len({own[full] for own in pages}) <= 1
    assert [[list(c.token_ids) for c in seen[-1].completions]] == [expected]
    assert [c.index for c in seen[-1].completions] == [0, 1, 2]
    # One page, full only in part, is written to by three: two of them copy it.
    assert count.num_copied_pages == num_copies
    # Running ahead, a step with one token too many is under way when a stop token is read.
    stopped = [c for c in seen[-1].completions if c.finish_reason == "stop" and len(c.token_ids) < 8]
    late = len(stopped) if engine.config.run_ahead else 0
    assert count.num_step_tokens == length + sum(len(tokens) - 1 for tokens in expected) + late
    for before, after in itertools.pairwise(seen):
        for old, new in zip(before.completions, after.completions, strict=True):
            assert new.token_ids[: len(old.token_ids)] == old.token_ids


def test_the_best_of_more_answers_are_the_likeliest_a_token(engine):
    singles = serve(engine, [(PROMPT, sampled(seed, logprobs=0, stop_token_ids=[9, 12, 40])) for seed in range(4)])
    assert len({len(output.token_ids) for output in singles}) > 1  # so that mean and sum differ
    sums = [sum(entry.logprob for entry in output.logprobs) for output in singles]
    order = sorted(range(4), key=lambda index: -sums[index] / len(singles[index].token_ids))
    (output,) = serve(engine, [(PROMPT, sampled(0, n=2, best_of=4, stop_token_ids=[9, 12, 40]))])
    assert [c.token_ids for c in output.completions] == [singles[index].token_ids for index in order[:2]]
    found = [c.cumulative_logprob for c in output.completions]
    assert found == pytest.approx([sums[index] for index in order[:2]], abs=1e-5)
    assert output.logprobs is None


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in-turn"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_who_is_preempted_answers_as_if_undisturbed(make, model, preemption, ahead):
    prompts = [PROMPT, [9] * 5, list(range(40, 49)), [1, 2, 3]]
    groups = [sampled(3, 24, n=2, frequency_penalty=0.2), greedy(24), sampled(8, 24, n=2), greedy(24)]
    alone = make()
    expected = []
    for prompt, params in zip(prompts, groups, strict=True):
        for index in range(params.n):
            one = replace(params, n=1, seed=None if params.seed is None else params.seed + index)
            expected += tokens_of(serve(alone, [(prompt, one)]))
    engine = make(run_ahead=ahead, cache={"host_pages": 20}, scheduler={"preemption": preemption, "headroom_pages": 0})
    outputs = serve(engine, list(zip(prompts, groups, strict=True)))
    assert [list(c.token_ids) for output in outputs for c in output.completions] == expected
    assert expected[2] == greedy_without_cache(model, prompts[1], 24)
    stats = engine.stats()
    assert stats.num_preemptions == sum(output.num_preemptions for output in outputs) > 0
    assert (stats.num_swaps > 0) == (preemption == "swap")


def test_who_comes_first_by_priority_is_served_first(make, model):
    engine = make(scheduler={"policy": "priority", "priority_aging_s": 1e6})
    prompts = [[index] * 9 for index in range(6)]
    for index, prompt in enumerate(prompts):
        engine.add(prompt, greedy(10), request_id=f"{index}", priority=-index)
    done = finish(engine)
    assert sorted(list(done)[:4]) == ["2", "3", "4", "5"]
    for index, prompt in enumerate(prompts):
        assert list(done[f"{index}"].token_ids) == greedy_without_cache(model, prompt, 10)


def test_tenants_do_not_find_each_others_pages(engine, model):
    expected = greedy_without_cache(model, PROMPT, 3)
    for salt, num_cached in (("a", 0), ("b", 0), (None, 0), ("a", 16), ("b", 16), (None, 16)):
        engine.add(PROMPT, greedy(3), request_id="r", cache_salt=salt)
        output = finish(engine)["r"]
        assert (list(output.token_ids), output.num_cached_tokens) == (expected, num_cached)
    for salt in ("c", "d"):  # nor in the same step
        engine.add(PROMPT, greedy(3), request_id=salt, cache_salt=salt)
    assert [output.num_cached_tokens for output in finish(engine).values()] == [0, 0]


def test_nothing_of_other_weights_is_found(engine, model):
    other = tiny_llama(seed=1)
    serve(engine, [(PROMPT, greedy(3))])
    pin = engine.pin_prefix(PROMPT)
    finish(engine)
    assert engine.stats().pages_pinned == 3
    engine.add([*PROMPT, 1, 2, 3, 4, 5, 6, 7], greedy(6), request_id="both")
    for _ in range(3):
        engine.step()
    engine.update_weights(other)
    stats = engine.stats()
    assert (stats.pages_pinned, stats.pages_cached) == (0, 0)
    assert not engine.unpin_prefix(pin)
    finish(engine)  # "both" has KV of both: nobody may find that
    for weights, found in ((other, 0), (other, 16), (model, 0), (model, 16)):
        engine.update_weights(weights) if not found else None
        (output,) = serve(engine, [(PROMPT, greedy(6))])
        assert list(output.token_ids) == greedy_without_cache(weights, PROMPT, 6)
        assert output.num_cached_tokens == found


def test_a_pinned_prefix_outlives_the_need_for_its_pages(engine, model):
    name = engine.pin_prefix(PROMPT)
    output = finish(engine)[name]
    assert (output.token_ids, output.finish_reason) == ((), "length")
    others = [([token] * 30, greedy(20)) for token in range(4)]  # 7 pages each, of the 8 that are left
    assert tokens_of(serve(engine, others)) == [greedy_without_cache(model, prompt, 20) for prompt, _ in others]
    assert (engine.stats().pages_pinned, engine.stats().now.pages_used) == (3, 3)
    (output,) = serve(engine, [([*PROMPT, 1, 2], greedy(3))])
    assert list(output.token_ids) == greedy_without_cache(model, [*PROMPT, 1, 2], 3)
    assert output.num_cached_tokens == 17
    assert engine.unpin_prefix(name)
    assert not engine.unpin_prefix(name)
    assert (engine.stats().pages_pinned, engine.stats().now.pages_used) == (0, 0)
    (output,) = serve(engine, [([*PROMPT, 1, 2], greedy(3))])
    assert output.num_cached_tokens >= 17  # until its pages are needed
    serve(engine, others)
    (output,) = serve(engine, [([*PROMPT, 1, 2], greedy(3))])
    assert output.num_cached_tokens == 0


def test_a_reset_forgets_what_is_cached_and_pinned_and_disturbs_nobody(engine, model):
    name = engine.pin_prefix(PROMPT)
    finish(engine)
    engine.add(PROMPT, greedy(12), request_id="runs")
    for _ in range(4):
        engine.step()
    engine.reset_prefix_cache()
    assert (engine.stats().pages_pinned, engine.stats().pages_cached) == (0, 0)
    assert not engine.unpin_prefix(name)
    assert list(finish(engine)["runs"].token_ids) == greedy_without_cache(model, PROMPT, 12)
    assert engine.stats().pages_cached == 0
    (output,) = serve(engine, [(PROMPT, greedy(3))])
    assert output.num_cached_tokens == 0


@pytest.mark.parametrize(
    "place", ["_scheduler.plan", "_mover.move", "_packer.pack", "_runner.run", "_collector.collect"]
)
def test_nothing_half_written_is_found_after_an_interrupt(engine, model, monkeypatch, place):
    prompts = [PROMPT, list(range(1, 21)), [7] * 9]
    serve(engine, [(PROMPT, greedy(3))])
    engine.pin_prefix([50] * 9)
    finish(engine)
    for prompt in prompts:
        engine.add(prompt, sampled(1, n=1 + (prompt is PROMPT)))  # the first one copies pages
    owner, name = place.split(".")

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(getattr(engine, owner), name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            finish(engine)
    stats = engine.stats()
    assert (stats.pages_free, stats.pages_cached, stats.pages_pinned) == (stats.num_pages - 1, 0, 0)
    outputs = serve(engine, [(prompt, greedy(6)) for prompt in prompts])
    assert tokens_of(outputs) == [greedy_without_cache(model, prompt, 6) for prompt in prompts]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]


def test_a_mix_of_every_kind_compiles_nothing_after_warm_up(make, monkeypatch):
    engine = make(
        recompile="error",
        cache={"host_pages": 20},
        scheduler={"preemption": "swap", "headroom_pages": 0, "policy": "priority"},
    )
    engine.warm_up()
    beams = greedy(16, n=2, use_beam_search=True)
    requests = [
        (PROMPT, greedy(20)),
        (PROMPT, sampled(1, 16, n=2, **PENALTIES)),
        ([*PROMPT[:12], 3], beams),
        (PROMPT, sampled(2, 16, n=1, best_of=2)),
        ([5] * 9, sampled(3, 20, logprobs=3, prompt_logprobs=3)),
        ([*PROMPT[:11], 1], sampled(4, 20, logit_bias={3: 1.0}, **PENALTIES)),
    ]
    with monkeypatch.context() as patch:  # whatever jax compiles, not only what the engine counts
        patch.setattr("jax._src.compiler.compile_or_get_cached", lambda *args, **kwargs: pytest.fail("compiles"))
        count = Count(engine)
        first = serve(engine, requests)
        engine.pin_prefix(PROMPT)
        again = serve(engine, requests)
    # Their log-probabilities may differ in the last bit on a GPU: other rows were computed beside them.
    told = [
        [[(c.text, c.token_ids, c.finish_reason) for c in o.completions] for o in outputs] for outputs in (first, again)
    ]
    assert told[0] == told[1]
    assert min(count.num_swaps, count.num_copied_pages, count.num_cached_tokens, count.num_evicted_pages) > 0
    assert count.num_compilations == 0


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        (
            greedy(4, n=3, best_of=4, use_beam_search=True, stop_token_ids=[1, 2, 3, 4, 5]),
            {},
            "24 likeliest .* raise max_logprobs",
        ),
        (greedy(4, n=2, use_beam_search=True), {"stream": True}, "cannot stream"),
        (sampled(1, n=1, best_of=2), {"stream": True}, "cannot stream"),
        (greedy(4), {"priority": 1}, r'priority is 1, but this engine serves in order of arrival \(policy "fcfs"\)'),
        (greedy(4), {"priority": "high"}, "priority is 'high', expected an integer"),
        (greedy(4), {"cache_salt": ""}, "cache_salt is '', expected a non-empty string or None"),
        (sampled(1, n=5), {}, r"asks for 5 sequences \(n, best_of\), expected at most max_num_seqs \(4\)"),
        (sampled(1, 60, n=2), {}, "lower max_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_door(compiled, params, options, message):
    before = compiled.stats()
    with pytest.raises(RequestError, match=message):
        compiled.add([1, 2, 3], params, **options)
    assert not compiled.has_work
    assert compiled.stats() == before


def test_a_pin_must_leave_room_for_those_who_run(compiled):
    compiled.add([1] * 8, greedy(56), request_id="long")  # may need 8 of 11 pages
    with pytest.raises(RequestError, match="'long', which is being served, may need 8"):
        compiled.pin_prefix([1] * 32)
    name = compiled.pin_prefix([2] * 24)
    finish(compiled)
    assert compiled.stats().pages_pinned == 3
    with pytest.raises(RequestError, match=r"8 pages; 3 more are pinned"):
        compiled.add([1] * 8, sampled(1, 40, n=2))
    assert compiled.unpin_prefix(name)
    compiled.reset_prefix_cache()
