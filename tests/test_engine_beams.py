"""Beam searches through pages find what Hugging Face transformers found (tests/golden/beam.json), whatever happens.

One of the two models has a sliding window; what else it does to pages is tested here too.
"""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from jpaged.engine import Engine
from jpaged.models import Llama
from jpaged.request import SamplingParams
from tests.engine_driver import check_pages, make_engine, serve, tokens_of
from tests.fakes import greedy_without_cache
from tests.golden import tiny_models

GOLDEN = json.loads((Path(__file__).parent / "golden" / "beam.json").read_text())["prompts"]
SIZES = {"seqs": 24, "budget": 32, "length": 48, "token_buckets": (32,), "max_logprobs": 24}
# Twenty-four beams at once, on pages for a search of six beams and little more.
NUM_PAGES = {"gqa": 24, "mistral": 40}


def prompts_of(model: str) -> list[dict]:
    return [prompt for prompt in GOLDEN if prompt["model"] == model]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory):
    """Of a name, a model of the golden values, read from a folder as Hugging Face writes it, and its engine."""
    from safetensors.numpy import save_file

    from jpaged.models import load_model

    @functools.cache
    def compile_one(name: str) -> tuple[Llama, Engine]:
        config = tiny_models.VARIANTS[name]
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tiny_models.weights(config, list(tiny_models.VARIANTS).index(name)), folder / "model.safetensors")
        model = load_model(folder, dtype="float32")
        engine = make_engine(model, num_pages=NUM_PAGES[name], **SIZES)
        engine.warm_up()
        return model, engine

    return compile_one


@pytest.mark.parametrize(
    ("name", "run_ahead", "preemption"),
    [("gqa", True, "swap"), ("gqa", False, "recompute"), ("mistral", True, "recompute")],
)
def test_searches_equal_transformers(compiled, name, run_ahead, preemption):
    model, first = compiled(name)
    options = {"preemption": preemption, "headroom_pages": 0}
    options = {"run_ahead": run_ahead, "cache": {"host_pages": 60}, "scheduler": options}
    engine = make_engine(model, num_pages=NUM_PAGES[name], **SIZES, **options)
    engine._runner._executables |= first._runner._executables
    cases = [(prompt, search) for prompt in prompts_of(name) for search in prompt["searches"]]
    assert len(cases) == 54
    outputs = serve(engine, [(prompt["token_ids"], params_of(prompt, search)) for prompt, search in cases])
    for (prompt, search), output in zip(cases, outputs, strict=True):
        assert search["margin"] > 1e-3  # or other arithmetic could rightly find other beams
        assert [list(completion.token_ids) for completion in output.completions] == search["token_ids"]
        # Sums of 24 f32 log-probabilities of order 5; with a length penalty of 0 nothing divides them.
        assert [completion.score for completion in output.completions] == pytest.approx(search["scores"], abs=1e-4)
        for completion in output.completions:
            stopped = completion.token_ids[-1] in prompt["stop_token_ids"]
            assert completion.finish_reason == ("stop" if stopped else "length")
            assert completion.stop_reason == (completion.token_ids[-1] if stopped else None)
    stats = engine.stats()
    assert stats.num_compilations == 0
    assert stats.num_copied_pages > 0
    if name == "gqa":  # with a sliding window a beam has few pages
        assert stats.num_preemptions > 0
        assert (stats.num_swaps > 0) == (preemption == "swap")


def params_of(prompt: dict, search: dict) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        n=search["width"],
        use_beam_search=True,
        length_penalty=search["length_penalty"],
        early_stopping=search["early_stopping"],
        max_tokens=prompt["max_tokens"],
        min_tokens=prompt["min_tokens"],
        stop_token_ids=prompt["stop_token_ids"],
        ignore_eos=True,
    )


@pytest.mark.parametrize("name", NUM_PAGES)
def test_fewer_answers_than_beams_are_the_best_of_them(compiled, name):
    _, engine = compiled(name)
    prompt = prompts_of(name)[1]
    search = next(s for s in prompt["searches"] if (s["width"], s["length_penalty"]) == (4, 1.0))
    whole = params_of(prompt, search)
    few = replace(whole, n=2, best_of=4)
    (output,) = serve(engine, [(prompt["token_ids"], few)])
    assert [list(completion.token_ids) for completion in output.completions] == search["token_ids"][:2]
    assert [completion.index for completion in output.completions] == [0, 1]


@pytest.mark.parametrize("name", NUM_PAGES)
@pytest.mark.parametrize("steps", [1, 4, 7])
def test_a_search_that_is_aborted_gives_all_its_pages_back(compiled, name, steps):
    _, engine = compiled(name)
    prompt = prompts_of(name)[1]
    engine.add(prompt["token_ids"], params_of(prompt, prompt["searches"][-1]), request_id="b")
    for _ in range(steps):
        assert engine.step() == []
    output = engine.abort("b")
    assert (output.finish_reason, output.token_ids, len(output.completions)) == ("abort", (), 1)
    assert engine.stats().now.pages_used == 0
    assert (engine.step(), engine.has_work) == ([], False)


def test_pages_left_of_the_window_come_back_while_a_sequence_runs(compiled):
    model, engine = compiled("mistral")
    assert model.sliding_window == 5
    prompts = [list(range(20, 37)), list(range(1, 41)), [9] * 5]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(prompt, params, request_id=f"{index}")
    done, held = {}, []
    while engine.has_work:
        done |= {output.request_id: output for output in engine.step()}
        check_pages(engine)
        held.append([len(set(pages) - {0}) for own in engine.page_map().values() for pages in own])
    for index, prompt in enumerate(prompts):
        assert list(done[f"{index}"].token_ids) == greedy_without_cache(model, prompt, 8)
    # The window and a chunk of at most 32 tokens at the worst offset; once it goes on token by token, two pages.
    assert max(map(max, filter(None, held))) <= 6
    assert max([pages for pages in held if pages][-1]) <= 2


def test_a_window_shares_pages_like_any_model(compiled):
    model, engine = compiled("mistral")
    prompt = list(range(50, 67))
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for num_cached in (0, 16):
        (output,) = serve(engine, [(prompt, params)])
        assert list(output.token_ids) == greedy_without_cache(model, prompt, 20)
        assert output.num_cached_tokens == num_cached
    drawn = [SamplingParams(temperature=1.5, seed=seed, max_tokens=20, ignore_eos=True) for seed in (5, 6)]
    expected = tokens_of(serve(engine, [(prompt, one) for one in drawn], cold=True))
    (output,) = serve(engine, [(prompt, replace(drawn[0], n=2))], cold=True)
    assert [list(completion.token_ids) for completion in output.completions] == expected
