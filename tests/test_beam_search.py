"""`BeamSearch` against a naive search over whole rows, against all outputs there are, and against transformers."""

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.beam_search import BeamSearch, Hypothesis
from jpaged.errors import RequestError
from tests.golden import beam_reference, tiny_models

GOLDEN = json.loads((Path(__file__).parent / "golden" / "beam.json").read_text())
TINY_PROMPTS = [entry for entry in GOLDEN["prompts"] if entry["model"] in tiny_models.VARIANTS]


def likeliest(row: np.ndarray, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens as (id, log-probability), best first; of equal ones the lower id first."""
    return [(int(token), float(row[token])) for token in np.argsort(-row, kind="stable")[:count]]


def run(search: BeamSearch, logprobs_after) -> list[list[tuple[int, ...]]]:
    """Runs a search to its end, each beam alone; gives the beams that each step left running."""
    beams, running = [()], []
    while not search.finished:
        going = search.advance([likeliest(logprobs_after(beam), search.num_candidates) for beam in beams])
        beams = [(*beams[parent], token) for parent, token in going]
        running.append(beams)
    return running


# --- a model of the last token alone ----------------------------------------------------------------------------------
def markov(seed: int, vocab_size: int, rounded: bool):
    """Log-probabilities [V] after an output, by its last token and whether its length is odd.

    Rounded ones are multiples of 1/2, so that many sums are equal, exactly; some tokens can never come.
    """
    rng = np.random.default_rng(seed)
    logits = 2 * rng.standard_normal((2, vocab_size + 1, vocab_size))
    table = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    if rounded:
        table = np.where(rng.random(table.shape) < 0.1, -np.inf, np.minimum(np.round(2 * table) / 2, 0))
    return lambda output: table[len(output) % 2, output[-1] if output else vocab_size]


@given(
    seed=st.integers(0, 2**32),
    rounded=st.booleans(),
    vocab_size=st.integers(2, 9),
    width=st.integers(1, 6),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
    stop_token_ids=st.sets(st.integers(0, 8), max_size=3),
    max_tokens=st.integers(1, 9),
    min_tokens=st.integers(0, 4),
)
def test_equals_a_search_over_whole_rows(seed, rounded, vocab_size, **settings):
    model = markov(seed, vocab_size, rounded)
    settings["stop_token_ids"] = {token for token in settings["stop_token_ids"] if token < vocab_size}
    settings["min_tokens"] = min(settings["min_tokens"], settings["max_tokens"])
    want = beam_reference.beam_search(lambda outputs: np.stack([model(output) for output in outputs]), **settings)
    search = BeamSearch(num_return=settings["width"], **settings)
    running = run(search, model)
    assert len(running) == want.num_steps
    assert running == [*want.running[:-1], []]
    assert [hypothesis.token_ids for hypothesis in search.results()] == want.token_ids
    assert [hypothesis.score for hypothesis in search.results()] == want.scores
    for hypothesis in search.results():
        ids = hypothesis.token_ids
        assert hypothesis.cumulative_logprob == pytest.approx(sum(model(ids[:i])[ids[i]] for i in range(len(ids))))
        stopped = ids[-1] in settings["stop_token_ids"]
        assert (hypothesis.finish_reason, hypothesis.stop_token) == (("stop", ids[-1]) if stopped else ("length", None))
        assert not stopped or len(ids) > settings["min_tokens"]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 3.0])
def test_a_beam_as_wide_as_all_outputs_finds_the_best_of_all(length_penalty, early_stopping):
    model, stop, max_tokens = markov(7, 3, rounded=False), 1, 4
    outputs = []
    for length in range(1, max_tokens + 1):
        for output in itertools.product(range(3), repeat=length):
            if stop not in output[:-1] and (output[-1] == stop or length == max_tokens):
                total = sum(model(output[:i])[output[i]] for i in range(length))
                outputs.append((total / length**length_penalty, output))
    search = BeamSearch(
        width=len(outputs),
        num_return=len(outputs),
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        stop_token_ids=[stop],
        max_tokens=max_tokens,
    )
    run(search, model)
    assert [h.token_ids for h in search.results()] == [output for _, output in sorted(outputs, reverse=True)]


# --- transformers -----------------------------------------------------------------------------------------------------
@functools.cache
def tiny_model(name: str, folder: Path) -> Any:
    """The model of that name by dense attention: log-probabilities f32 [V] after tokens."""
    from safetensors.numpy import save_file

    from jpaged.models import load_model
    from tests.models.paged import DenseRunner

    config = tiny_models.VARIANTS[name]
    save_file(tiny_models.weights(config, list(tiny_models.VARIANTS).index(name)), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    dense = DenseRunner(load_model(folder), length=48)

    @functools.cache
    def logprobs(tokens: tuple[int, ...]) -> np.ndarray:
        logits = dense(list(tokens))[-1]
        shifted = logits - logits.max()
        return shifted - np.log(np.exp(shifted).sum())

    return logprobs


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: tmp_path_factory.mktemp(name) for name in {entry["model"] for entry in TINY_PROMPTS}}


@pytest.mark.parametrize("entry", TINY_PROMPTS, ids=lambda entry: entry["name"])
def test_finds_what_transformers_finds(entry, folders):
    """On the same models, computed here by dense attention: hypotheses, scores, and the number of steps."""
    logprobs = tiny_model(entry["model"], folders[entry["model"]])
    prompt = tuple(entry["token_ids"])
    for want in entry["searches"]:
        settings = {key: want[key] for key in ("width", "length_penalty", "early_stopping")}
        settings |= {key: entry[key] for key in ("stop_token_ids", "max_tokens", "min_tokens")}
        search = BeamSearch(num_return=want["width"], **settings)
        running = run(search, lambda output: logprobs(prompt + output))
        assert [list(hypothesis.token_ids) for hypothesis in search.results()] == want["token_ids"], settings
        got = [hypothesis.score for hypothesis in search.results()]
        np.testing.assert_allclose(got, want["scores"], rtol=0, atol=1e-4, err_msg=str(settings))
        assert len(running) == want["num_steps"], settings


def test_the_golden_searches_are_evidence():
    """They cover what they promise, and float32 can tell which way their decisions fall."""
    assert {entry["model"] for entry in GOLDEN["prompts"]} == {"smollm2", "gqa", "mistral"}
    assert len([entry for entry in GOLDEN["prompts"] if entry["model"] == "smollm2"]) >= 6
    for entry in GOLDEN["prompts"]:
        settings = {(s["width"], s["length_penalty"], s["early_stopping"]) for s in entry["searches"]}
        assert settings == set(itertools.product((2, 4, 6), (0.0, 1.0, 2.0), (True, False, "never")))
    assert all(search["margin"] > 1e-3 for entry in GOLDEN["prompts"] for search in entry["searches"])
    # Each setting matters somewhere: outputs differ by it alone.
    for key, position in (("early_stopping", 2), ("length_penalty", 1)):
        changed = 0
        for entry in TINY_PROMPTS:
            groups: dict[Any, set[str]] = {}
            for s in entry["searches"]:
                rest = [s["width"], s["length_penalty"], s["early_stopping"]]
                del rest[position]
                groups.setdefault(tuple(rest), set()).add(json.dumps(s["token_ids"]))
            changed += any(len(found) > 1 for found in groups.values())
        assert changed > 0, key


# --- the borders ------------------------------------------------------------------------------------------------------
def new(**changes) -> BeamSearch:
    return BeamSearch(**({"width": 2, "num_return": 2, "stop_token_ids": [0], "max_tokens": 8} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0, "num_return": 1}, "the beam width is 0, expected at least 1"),
        ({"num_return": 3}, "3 hypotheses are asked for, expected 1 to the beam width (2)"),
        ({"num_return": 0}, "0 hypotheses"),
        ({"early_stopping": "always"}, "early_stopping is 'always', expected True, False or 'never'"),
        ({"early_stopping": 1}, "early_stopping is 1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_tokens": 9}, "min_tokens is 9, expected 0 to max_tokens (8)"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"length_penalty": math.nan}, "length_penalty is nan"),
        ({"length_penalty": math.inf}, "length_penalty is inf"),
        ({"length_penalty": 400.0}, "length_penalty is 400.0"),
        ({"length_penalty": -400.0}, "whose power of max_tokens (8) fits into a float"),
    ],
)
def test_refuses_by_name(changes, message):
    with pytest.raises(RequestError) as caught:
        new(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(("stops", "count"), [([], 4), ([0], 4), ([0, 5, 5], 6)])
def test_how_many_candidates_it_needs(stops, count):
    assert new(stop_token_ids=stops).num_candidates == count


def test_calls_that_do_not_fit_the_search():
    search = new(max_tokens=2)
    with pytest.raises(ValueError, match="got candidates of 2 beams, expected those of 1"):
        search.advance([[(1, -1.0)], [(1, -1.0)]])
    assert search.advance([[(1, -1.0), (2, -2.0)]]) == [(0, 1), (0, 2)]
    assert search.results() == []
    assert search.advance([[(3, -1.0)], [(4, -1.0)]]) == []
    assert search.finished
    with pytest.raises(ValueError, match="the search is over"):
        search.advance([])


@pytest.mark.parametrize("logprob", [math.nan, math.inf])
def test_what_is_no_log_probability(logprob):
    with pytest.raises(ValueError, match=f"token 4 after beam 0 is {logprob}"):
        new().advance([[(1, -1.0), (4, logprob)]])


def test_impossible_tokens_are_not_taken():
    """Fewer beams then run, and fewer hypotheses come out than were asked for; none of them has probability 0."""
    search = new(max_tokens=3)
    assert search.advance([[(1, -0.5), (0, -math.inf), (2, -math.inf)]]) == [(0, 1)]
    assert search.advance([[(0, -0.25), (2, -math.inf)]]) == []
    assert search.results() == [Hypothesis((1, 0), -0.375, -0.75, "stop", 0)]


def test_a_stop_token_in_the_last_step_is_a_stop():
    search = new(max_tokens=1)
    assert search.advance([[(0, -0.5), (3, -1.0), (4, -2.0)]]) == []
    assert search.results() == [Hypothesis((0,), -0.5, -0.5, "stop", 0), Hypothesis((3,), -1.0, -1.0, "length", None)]


def test_rounding_above_zero_is_no_error():
    assert new().advance([[(1, 1e-7), (2, -20.0)]]) == [(0, 1), (0, 2)]
