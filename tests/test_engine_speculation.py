"""An engine that guesses answers as one that does not, in fewer steps; nothing compiles after its warm-up."""

import functools
import importlib.util
import random
from dataclasses import replace

import pytest

from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from jpaged.engine import Engine
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.request import SamplingParams
from jpaged.structured import StructuredOutput
from jpaged.tokenizer import Tokenizer
from tests import engine_driver
from tests.engine_driver import check_pages, tokens_of
from tests.fakes import tiny_llama
from tests.tiny_vocabs import byte_level_metadata

TOKENIZER = Tokenizer(gguf_vocabulary(byte_level_metadata(), "tiny"), "tiny")
# Whoever has a guess uses it, as it costs nothing.
GUESSES = SpeculationConfig(num_tokens=7, shortest_match=1, token_cost=0.0, wait_cost=0.0)
serve = functools.partial(engine_driver.serve, cold=True)


def make_engine(model, *, num_pages=96, token_buckets=(32,), guesses=GUESSES, **scheduler) -> Engine:
    config = EngineConfig(
        cache=CacheConfig(page_size=8, num_pages=num_pages),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=96, **scheduler),
        token_buckets=token_buckets,
        speculation=guesses,
        check_invariants=True,
        compilation_cache=False,
        warmup="eager",
        recompile="error",
    )
    return Engine(model, config, tokenizer=TOKENIZER, eos_token_ids=(2,))


@pytest.fixture(scope="module")
def model():
    return tiny_llama(vocab_size=64)


@pytest.fixture(scope="module")
def plain(model):
    return make_engine(model, guesses=None)


@pytest.fixture(scope="module")
def engine(model):
    """Steps of 8 tokens and of 32."""
    return make_engine(model, token_buckets=(8, 32))


@pytest.fixture(scope="module")
def tight(model):
    """Pages for little more than one sequence, and prompts in chunks of six tokens."""
    return make_engine(model, num_pages=14, max_chunk_tokens=6, headroom_pages=0)


def prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 64) for _ in range(rng.randrange(1, 20))] * rng.choice([1, 2]) for _ in range(count)]


def requests(seed: int, count: int, **params) -> list:
    options = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, **params}
    return [
        (prompt, SamplingParams(**{**options, "seed": seed + index}))
        for index, prompt in enumerate(prompts(seed, count))
    ]


def answers(outputs) -> list:
    """Without the sums of log-probabilities, which round in other places."""
    return [[replace(one, cumulative_logprob=None) for one in output.completions] for output in outputs]


KINDS = {
    "greedy": {},
    "sampled": {"temperature": 0.3, "max_tokens": 60},
    "top-p": {"temperature": 0.7, "top_p": 0.2, "max_tokens": 60},
    "top-k and min-p": {"temperature": 0.5, "top_k": 2, "min_p": 0.05, "max_tokens": 60},
    "several answers": {"temperature": 0.2, "n": 3},
    "the best of several": {"temperature": 0.2, "n": 1, "best_of": 2, "max_tokens": 50},
    "few tokens": {"max_tokens": 13},
    "bias": {"logit_bias": {7: 5.0, 9: 5.0}},
    "some tokens": {"allowed_token_ids": [4, 5, 6], "temperature": 1.0},
    "no end too early": {"min_tokens": 9, "ignore_eos": False, "allowed_token_ids": [2, 4, 5], "temperature": 1.0},
}


@pytest.mark.parametrize(("kind", "count"), [("greedy", 1), *((kind, 4) for kind in KINDS)])
def test_answers_are_those_of_single_steps(plain, engine, kind, count):
    load = requests(3, count, **KINDS[kind])
    expected = serve(plain, load)
    before, compiled = engine.stats(), engine.stats().num_compilations
    found = serve(engine, load)
    assert answers(found) == answers(expected)
    after = engine.stats()
    assert after.num_guesses > before.num_guesses
    assert after.num_compilations == compiled


def test_what_is_guessed_well_takes_fewer_steps(plain, engine):
    load = requests(3, 1, max_tokens=60)
    steps, before = [], engine.stats()
    for one in (plain, engine):
        start = one.stats().num_steps
        serve(one, load)
        steps.append(one.stats().num_steps - start)
    after = engine.stats()
    hits = after.num_hits - before.num_hits
    assert hits > 30
    assert after.num_guesses - before.num_guesses >= hits
    assert after.num_guessing_rows - before.num_guessing_rows >= hits / 7
    assert steps[0] - steps[1] == hits


def test_log_probabilities_belong_to_their_tokens(plain, engine):
    load = requests(3, 3, logprobs=2, max_tokens=40)
    expected = serve(plain, load)
    before = engine.stats().num_hits
    found = serve(engine, load)
    assert engine.stats().num_hits > before
    for mine, theirs in zip(found, expected, strict=True):
        ours, others = mine.completions[0], theirs.completions[0]
        assert ours.token_ids == others.token_ids
        assert ours.logprobs is not None
        assert others.logprobs is not None
        for one, other in zip(ours.logprobs, others.logprobs, strict=True):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_outputs_end_where_they_would_have(plain, engine):
    """Stop ids and stop strings, wherever in a run of guessed tokens they come."""
    ((prompt, params),) = requests(3, 1, max_tokens=40)
    (whole,) = serve(plain, [(prompt, params)])
    before = engine.stats().num_hits
    for end in range(5, 32, 5):
        token = whole.token_ids[end]
        text = TOKENIZER.decode(whole.token_ids[end - 1 : end + 1])
        for stop in ({"stop_token_ids": [token]}, {"stop": [text]} if text else {}):
            load = [
                (prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, min_tokens=end - 3, **stop))
            ]
            assert serve(engine, load)[0].completions == serve(plain, load)[0].completions
    assert engine.stats().num_hits > before


def test_guesses_take_nothing_from_others_when_pages_are_scarce(plain, tight):
    load = requests(5, 6, max_tokens=40)
    expected, before = tokens_of(serve(plain, load)), tight.stats()
    assert tokens_of(serve(tight, load)) == expected
    after = tight.stats()
    assert after.num_preemptions > before.num_preemptions
    assert after.num_hits > before.num_hits


def test_what_a_guessing_request_cached_is_right(plain, engine):
    engine.reset_prefix_cache()
    for _ in range(3):
        load = requests(3, 2, max_tokens=25)
        expected = tokens_of(serve(plain, load))
        assert tokens_of(engine_driver.serve(engine, load)) == expected
        longer = [([*prompt, *answer[:17]], params) for (prompt, params), answer in zip(load, expected, strict=True)]
        assert tokens_of(engine_driver.serve(engine, longer)) == tokens_of(serve(plain, longer))
    assert engine.stats().num_cached_tokens > 0


def test_an_abort_and_a_late_arrival_change_no_answer(plain, engine):
    load = requests(3, 3, max_tokens=40)
    expected = tokens_of(serve(plain, load))
    engine.reset_prefix_cache()
    done = {}
    for index, (prompt, params) in enumerate(load[:2]):
        engine.add(prompt, params, request_id=f"{index}")
    for step in range(200):
        done |= {output.request_id: output for output in engine.step()}
        check_pages(engine)
        if step == 4:
            aborted = engine.abort("1")
            assert aborted is not None
            assert list(aborted.token_ids) == expected[1][: len(aborted.token_ids)]
            engine.add(*load[2], request_id="2")
        if not engine.has_work:
            break
    assert [list(done[name].token_ids) for name in ("0", "2")] == [expected[0], expected[2]]


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="needs jpaged[structured]")
def test_rows_that_must_not_guess_stand_beside_rows_that_do(plain, engine):
    load = requests(3, 1, max_tokens=40)
    load += requests(4, 1, max_tokens=40, frequency_penalty=0.5)
    load += requests(5, 1, max_tokens=40, structured=StructuredOutput(regex="[0-2]{20,30}"), ignore_eos=False)
    load += requests(6, 1, max_tokens=12, prompt_logprobs=1)
    load += requests(7, 1, max_tokens=8, use_beam_search=True, best_of=2)
    before = engine.stats().num_hits
    assert tokens_of(serve(engine, load)) == tokens_of(serve(plain, load))
    assert engine.stats().num_hits > before


def test_streams_get_all_tokens_in_order(plain, engine):
    load = requests(3, 2, max_tokens=30)
    expected = tokens_of(serve(plain, load))
    engine.reset_prefix_cache()
    for index, (prompt, params) in enumerate(load):
        engine.add(prompt, params, request_id=f"{index}", stream="deltas")
    tokens: dict[str, list[int]] = {"0": [], "1": []}
    while engine.has_work:
        engine.step()
        for name, delta in engine.take_news().deltas:
            tokens[name] += delta.token_ids
    assert [tokens["0"], tokens["1"]] == expected
    gaps = engine.metrics.histograms()["inter_token_latency_seconds"]
    assert gaps.count >= 58
