"""Beam searches through pages find what Hugging Face transformers found (tests/golden/beam.json), whatever happens."""

import json
from pathlib import Path

import pytest

from jpaged.engine import Engine
from jpaged.request import SamplingParams
from tests.engine_driver import make_engine, serve
from tests.golden import tiny_models

GOLDEN = json.loads((Path(__file__).parent / "golden" / "beam.json").read_text())["prompts"]
SIZES = {"seqs": 24, "budget": 32, "length": 48, "token_buckets": (32,), "max_logprobs": 24}
# Twenty-four beams at once, on pages for a search of six beams and little more.
NUM_PAGES = {"gqa": 24, "mistral": 40}


def prompts_of(model: str) -> list[dict]:
    return [prompt for prompt in GOLDEN if prompt["model"] == model]


@pytest.fixture(scope="module", params=["gqa", "mistral"])
def compiled(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, object, Engine]:
    """A model of the golden values, read from a folder as Hugging Face writes it, and its compiled step."""
    from safetensors.numpy import save_file

    from jpaged.models import load_model

    name = request.param
    config = tiny_models.VARIANTS[name]
    folder = tmp_path_factory.mktemp(name)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tiny_models.weights(config, list(tiny_models.VARIANTS).index(name)), folder / "model.safetensors")
    model = load_model(folder, dtype="float32")
    engine = make_engine(model, num_pages=NUM_PAGES[name], **SIZES)
    engine.warm_up()
    return name, model, engine


@pytest.mark.parametrize(
    ("run_ahead", "preemption"), [(True, "recompute"), (False, "recompute"), (True, "swap")], ids=str
)
def test_searches_equal_transformers(compiled, run_ahead, preemption):
    name, model, first = compiled
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
        assert stats.num_swaps == (stats.num_preemptions if preemption == "swap" else 0)


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


def test_fewer_answers_than_beams_are_the_best_of_them(compiled):
    name, _, engine = compiled
    prompt = prompts_of(name)[1]
    search = next(s for s in prompt["searches"] if (s["width"], s["length_penalty"]) == (4, 1.0))
    whole = params_of(prompt, search)
    few = SamplingParams(**{**vars(whole), "n": 2, "best_of": 4})
    (output,) = serve(engine, [(prompt["token_ids"], few)])
    assert [list(completion.token_ids) for completion in output.completions] == search["token_ids"][:2]
    assert [completion.index for completion in output.completions] == [0, 1]


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_a_search_that_is_aborted_gives_all_its_pages_back(compiled, steps):
    name, _, engine = compiled
    prompt = prompts_of(name)[1]
    engine.add(prompt["token_ids"], params_of(prompt, prompt["searches"][-1]), request_id="b")
    for _ in range(steps):
        assert engine.step() == []
    output = engine.abort("b")
    assert (output.finish_reason, output.token_ids, len(output.completions)) == ("abort", (), 1)
    assert engine.stats().now.pages_used == 0
    assert (engine.step(), engine.has_work) == ([], False)
