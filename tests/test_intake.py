"""The door: what becomes a request, and what is refused with a message that names it."""

from array import array

import numpy as np
import pytest

from jpaged.beam_search import BeamSearch
from jpaged.config import MAX_BANNED_IDS
from jpaged.errors import RequestError
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.intake import Intake
from jpaged.request import SamplingParams
from jpaged.tokenizer import Tokenizer
from tests.tiny_vocabs import byte_level_metadata

VOCAB = 64


def make_intake(**changes) -> Intake:
    options = {
        "vocab_size": VOCAB,
        "max_logprobs": 5,
        "eos_token_ids": (2, 3),
        "tokenizer": None,
        "seed": 0,
    }
    return Intake(**(options | changes))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(gguf_vocabulary(byte_level_metadata(), "test.gguf"), "test.gguf")


@pytest.mark.parametrize(
    "prompt",
    [[1, 2, 63], (1, 2, 63), np.array([1, 2, 63], np.uint8), [np.int64(1), 2, np.uint16(63)]],
    ids=["list", "tuple", "numpy", "numpy-scalars"],
)
def test_token_ids_become_plain_integers(prompt):
    request = make_intake().request(prompt, None, None, ())
    assert request.prompt_token_ids == (1, 2, 63)
    assert all(type(token) is int for token in request.prompt_token_ids)
    assert request.params == SamplingParams()


def test_a_range_is_a_prompt():
    assert make_intake().request(range(3), None, None, ()).prompt_token_ids == (0, 1, 2)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty; expected at least one token id"),
        (np.array([], np.int32), "the prompt is empty"),
        ([VOCAB], r"the prompt holds token id 64, the vocabulary is \[0, 64\)"),
        ([1, -1], "the prompt holds token id -1"),
        (array("q", [1, VOCAB]), "the prompt holds token id 64"),
        (array("q", [-1]), "the prompt holds token id -1"),
        (array("q"), "the prompt is empty"),
        (array("d", [1.0]), "list of token ids"),
        ([2**70], "the prompt holds token id 1180591620717411303424"),
        ([1.0], r"text or a list of token ids, got list with float$"),
        ([True], "list of token ids"),
        ([None], "list of token ids"),
        ([[1, 2]], "list of token ids"),
        (np.array([1.5]), "list of token ids"),
        (np.array([True]), "list of token ids"),
        (np.array([[1, 2]]), "list of token ids"),
        (None, "list of token ids, got NoneType"),
        (7, "list of token ids, got int"),
        (iter([1]), "list of token ids"),
        (b"ab", "list of token ids, got bytes$"),
        (bytearray(b"ab"), "list of token ids"),
        (memoryview(b"ab"), "list of token ids"),
        ({1: 2}, "list of token ids"),
        ({1, 2}, "list of token ids"),
        ("text", "no tokenizer; give token ids"),
    ],
)
def test_prompts_that_are_none_are_refused(prompt, message):
    with pytest.raises(RequestError, match=message):
        make_intake().request(prompt, None, None, ())


def test_text_is_encoded(tokenizer):
    intake = make_intake(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
    assert intake.request("hello", None, None, ()).prompt_token_ids == tuple(tokenizer.encode("hello"))
    with pytest.raises(RequestError, match="empty; expected at least one character"):
        intake.request("", None, None, ())
    with pytest.raises(RequestError, match="surrogate"):
        intake.request("\ud800", None, None, ())
    with pytest.raises(RequestError, match=r"the tokenized prompt holds token id .* the vocabulary is \[0, 64\)"):
        make_intake(tokenizer=tokenizer).request("two words", None, None, ())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": 0}, "expected SamplingParams"),
        (SamplingParams(logprobs=6), r"logprobs is 6, this engine gives at most 5 \(max_logprobs\)"),
        (SamplingParams(prompt_logprobs=6), "prompt_logprobs is 6"),
        (SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias holds token id 64"),
        (SamplingParams(stop_token_ids=[VOCAB]), "stop_token_ids holds token id 64"),
        (SamplingParams(stop="x"), "stop strings need a tokenizer"),
        # Two beams, and the model's two end-of-sequence ids: three likeliest tokens for each beam.
        (
            SamplingParams(use_beam_search=True, temperature=0.0, n=2),
            r"a beam search of width 2 with 2 stop token ids looks at the 6 likeliest .* at most 5: raise max_logprobs",
        ),
        (
            SamplingParams(use_beam_search=True, temperature=0.0, n=1, best_of=3, ignore_eos=True),
            "width 3 with 0 stop token ids looks at the 6 likeliest",
        ),
    ],
)
def test_parameters_that_the_engine_cannot_serve_are_refused(params, message):
    with pytest.raises(RequestError, match=message):
        make_intake().request([1], params, None, ())


@pytest.mark.parametrize(
    ("params", "changes"),
    [
        (SamplingParams(logprobs=5, prompt_logprobs=5), {}),
        (SamplingParams(logit_bias={63: 1.0}, stop_token_ids=[63]), {}),
        (SamplingParams(use_beam_search=True, temperature=0.0, n=2), {"max_logprobs": 6}),
        (SamplingParams(use_beam_search=True, temperature=0.0, n=2, ignore_eos=True), {}),
        (SamplingParams(use_beam_search=True, temperature=0.0, n=2, stop_token_ids=[2]), {"eos_token_ids": (2,)}),
    ],
)
def test_parameters_at_the_limits_are_taken(params, changes):
    assert make_intake(**changes).request([1], params, None, ()).params is params


def test_what_intake_lets_through_the_sampler_can_hold():
    from jpaged.sampler_state import entry_for

    eos, more = tuple(range(100, 100 + MAX_BANNED_IDS - 64)), (400, 401)
    params = SamplingParams(min_tokens=1, stop_token_ids=list(range(64)))
    request = make_intake(vocab_size=500, eos_token_ids=eos).request([1], params, None, ())
    assert entry_for(request.params, eos, 500).banned_ids.tolist() == [*range(64), *eos]
    with pytest.raises(RequestError, match=r"min_tokens bans 82 end-of-sequence and stop token ids .* at most 80"):
        make_intake(vocab_size=500, eos_token_ids=eos + more).request([1], params, None, ())
    for taken, ids in (
        (SamplingParams(stop_token_ids=list(range(64))), eos + more),  # nothing is banned without min_tokens
        (SamplingParams(min_tokens=1, stop_token_ids=[*range(62), *more]), eos + more),  # two are the model's own
        (params, (*eos, 900)),  # which cannot come
    ):
        assert make_intake(vocab_size=500, eos_token_ids=ids).request([1], taken, None, ()).params is taken


def test_request_ids_are_made_up_where_none_lives():
    intake = make_intake()
    ids = [intake.request([1], None, None, {"1", "2"}).request_id for _ in range(3)]
    assert ids == ["0", "3", "4"]
    assert intake.request([1], None, "mine", {"mine"}).request_id == "mine"  # duplicates are the scheduler's to refuse
    for bad in ("", 7, b"x"):
        with pytest.raises(RequestError, match=r"request_id is .*, expected a non-empty string"):
            intake.request([1], None, bad, ())


@pytest.mark.parametrize("arrival_s", ["x", float("nan"), 1j])
def test_what_is_no_time_is_refused(arrival_s):
    with pytest.raises(RequestError, match=r"arrival_s is .*, expected seconds"):
        make_intake().request([1], None, None, (), arrival_s=arrival_s)


def test_seeds_are_the_requests_own_or_drawn_from_the_engines():
    def seeds(seed: int) -> list[int]:
        intake = make_intake(seed=seed)
        return [intake.request([1], params, None, ()).seed for params in (None, SamplingParams(seed=9), None)]

    first = seeds(1)
    assert first == seeds(1)
    assert first[1] == 9
    assert len({*first, *seeds(2)}) == 5
    assert all(0 <= seed < 2**63 for seed in first)


def test_a_beam_search_is_given_as_many_candidates_as_it_wants():
    for stops in ((), (5,), (5, 6, 2)):
        params = SamplingParams(use_beam_search=True, temperature=0.0, n=2, stop_token_ids=stops)
        search = BeamSearch(width=2, num_return=2, stop_token_ids={2, 3, *stops}, max_tokens=9)
        make_intake(max_logprobs=search.num_candidates).request([1], params, None, ())
        with pytest.raises(RequestError, match=f"looks at the {search.num_candidates} likeliest"):
            make_intake(max_logprobs=search.num_candidates - 1).request([1], params, None, ())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=1, best_of=2),
        SamplingParams(n=2, best_of=2, use_beam_search=True, temperature=0.0, ignore_eos=True),
    ],
)
def test_answers_that_are_chosen_at_their_end_cannot_stream(params):
    assert make_intake().request([1], params, None, ()).params is params
    with pytest.raises(RequestError, match="cannot stream"):
        make_intake().request([1], params, None, (), stream=True)
    several = SamplingParams(n=2)
    assert make_intake().request([1], several, None, (), stream=True).params is several


def test_priorities_are_for_engines_that_serve_by_them():
    with pytest.raises(
        RequestError, match=r'priority is 1, but this engine serves in order of arrival \(policy "fcfs"\)'
    ):
        make_intake().request([1], None, None, (), priority=1)
    assert make_intake().request([1], None, None, (), priority=0).priority == 0
    assert make_intake(priorities=True).request([1], None, None, (), priority=-3).priority == -3
    for bad in (True, 1.0, "1", None):
        with pytest.raises(RequestError, match=r"priority is .*, expected an integer"):
            make_intake(priorities=True).request([1], None, None, (), priority=bad)


def test_salts_are_text_and_never_empty():
    assert make_intake().request([1], None, None, (), cache_salt="a").cache_salt == "a"
    assert make_intake().request([1], None, None, ()).cache_salt is None
    for bad in ("", 5, b"a"):
        with pytest.raises(RequestError, match=r"cache_salt is .*, expected a non-empty string or None"):
            make_intake().request([1], None, None, (), cache_salt=bad)


def test_pins_are_passed_on():
    assert make_intake().request([1], None, None, (), pin=True).pin
    assert not make_intake().request([1], None, None, ()).pin
