"""The picture of the pool says of every page and request what the engine does with it."""

import pytest

from jpaged import engine_view
from jpaged.engine import Engine
from jpaged.request import SamplingParams
from tests.engine_driver import GREEDY, PAGE, make_engine
from tests.fakes import tiny_llama


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine(tiny_llama())


def states(engine: Engine) -> list[int]:
    """Pages that are free, used by one, used by several, cached, null."""
    picture = engine.picture()
    stats = engine.stats()
    counts = [picture.states.count(state) for state in range(5)]
    assert sum(counts) == stats.num_pages
    assert (counts[0], counts[1] + counts[2], counts[3]) == (stats.pages_free, stats.now.pages_used, stats.pages_cached)
    return counts


def test_the_life_of_two_requests(engine, monkeypatch):
    engine.reset_prefix_cache()
    assert states(engine) == [63, 0, 0, 0, 1]
    engine.add([1] * 40, GREEDY, request_id="long", arrival_s=1.0)
    engine.add([2] * 17, SamplingParams(temperature=1.0, n=2, max_tokens=6), request_id="two")
    assert [(r.request_id, r.status, r.pages) for r in engine.picture().requests] == [
        ("long", "queued", ((),)),
        ("two", "queued", ((),)),
    ]
    engine.step()
    first = engine.picture().requests[0]
    assert (first.status, first.num_prompt_tokens, first.num_computed_tokens) == ("prefill", 40, 32)
    assert first.age_s > 0
    seen = set()
    with monkeypatch.context() as patch:
        patch.setattr(engine_view, "MAX_PAGE_IDS", 4)
        assert [(r.num_pages, len(r.pages)) for r in engine.picture().requests] == [(first.num_pages, 1), (0, 1)]
        patch.setattr(engine_view, "MAX_PAGE_IDS", 3)  # one less than it holds
        assert [(r.num_pages, len(r.pages)) for r in engine.picture().requests] == [(first.num_pages, 0), (0, 0)]
    while engine.has_work:
        engine.step()
        states(engine)
        requests = {request.request_id: request for request in engine.picture().requests}
        if "two" in requests and len(requests["two"].pages) == 2:
            a, b = requests["two"].pages
            assert requests["two"].num_pages == len({*a, *b})
            assert a[:2] == b[:2]  # 16 tokens of the prompt in full pages
            assert [engine.picture().states[page] for page in a[:2]] == [2, 2]
            seen.add("shared")
        seen |= {request.status for request in requests.values()}
    assert {"decode", "shared"} <= seen
    assert engine.picture().requests == ()
    _, used, shared, cached, null = states(engine)
    assert (used, shared, null) == (0, 0, 1)
    assert cached >= 40 // PAGE


def test_the_engine_describes_itself(engine):
    info = engine.info
    assert (info.page_size, info.num_pages, info.max_model_len, info.vocab_size) == (PAGE, 64, 128, 64)
    assert (info.max_num_seqs, info.max_num_batched_tokens, info.policy) == (4, 32, "fcfs")
    assert info.max_num_prefill_tokens is None
    other = make_engine(tiny_llama(), scheduler={"max_num_prefill_tokens": 48}, token_buckets=(48,))
    assert (other.info.max_num_batched_tokens, other.info.max_num_prefill_tokens) == (32, 48)
    assert (info.implementation, info.dtype, info.device) == ("xla", "float32", "cpu")
    assert not info.has_tokenizer
