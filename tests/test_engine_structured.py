"""Whatever a random model would rather say, its output has the form that was asked for; neighbours do not notice."""

import importlib.util
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged import sampler_state
from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig
from jpaged.engine import Engine
from jpaged.errors import RequestError
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.request import SamplingParams
from jpaged.structured import StructuredOutput
from jpaged.tokenizer import Tokenizer
from tests.engine_driver import check_pages, serve, tokens_of
from tests.fakes import tiny_llama
from tests.tiny_vocabs import byte_level_metadata

TOKENIZER = Tokenizer(gguf_vocabulary(byte_level_metadata(), "tiny"), "tiny")
EOS = 2
MODEL_VOCABULARY = 288  # padded
SHORT = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}}}
SHORT |= {"required": ["a", "b"], "additionalProperties": False}
FORMS = {
    "json": StructuredOutput(json=SHORT, disable_any_whitespace=True),
    "regex": StructuredOutput(regex="[a-c]{2,5}-[0-9]{1,6}"),
    "choice": StructuredOutput(choice=["hello world", "é😀", "no"]),
    "grammar": StructuredOutput(grammar='start: "(" start ")" | /[xyz]{1,4}/'),
}


def has_form(name: str, text: str) -> bool:
    if name == "json":
        found = json.loads(text)
        return list(found) == ["a", "b"] and isinstance(found["a"], bool) and found["b"] in ("x", "yy")
    if name == "grammar":
        return bool(re.fullmatch(r"\(*[xyz]{1,4}\)*", text)) and text.count("(") == text.count(")")
    return text in FORMS["choice"].choice if name == "choice" else bool(re.fullmatch(FORMS["regex"].regex, text))


def make_engine(model, *, tokens: int, num_pages: int, tokenizer=TOKENIZER, **options) -> Engine:
    config = EngineConfig(
        cache=CacheConfig(page_size=8, num_pages=num_pages),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=tokens, max_model_len=160, headroom_pages=0),
        check_invariants=True,
        compilation_cache=False,
        token_buckets=(tokens,),
        recompile="error",
    )
    engine = Engine(model, config, tokenizer=tokenizer, **options)
    engine.warm_up()
    return engine


@pytest.fixture(scope="module")
def model():
    return tiny_llama(vocab_size=MODEL_VOCABULARY)


@pytest.fixture(scope="module")
def engine(model):
    """Prompts go through it whole, and its pages suffice."""
    return make_engine(model, tokens=32, num_pages=128)


@pytest.fixture(scope="module")
def tight(model):
    """Prompts are cut into chunks, and who is to go on often lacks a page."""
    return make_engine(model, tokens=8, num_pages=22)


PROMPTS = [[5, 6, 7, 8], list(range(40, 59)), [9] * 10, list(range(100, 113))]
GREEDY = [
    (prompt, SamplingParams(temperature=0, max_tokens=60, structured=FORMS[name]))
    for prompt, name in zip(PROMPTS, FORMS, strict=True)
]
DRAWN = [(prompt, replace(params, temperature=1.5, seed=seed)) for seed, (prompt, params) in enumerate(GREEDY)]
FREE = [(prompt, SamplingParams(temperature=0, max_tokens=30, logprobs=2, ignore_eos=True)) for prompt in PROMPTS]


@pytest.mark.parametrize("requests", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_batched_chunked_and_preempted_are_what_each_is_alone(engine, tight, requests):
    alone = serve(engine, requests, at_once=False, cold=True)
    for name, output in zip(FORMS, alone, strict=True):
        assert output.finish_reason in ("stop", "length" if name == "grammar" else "stop")
        assert output.finish_reason == "length" or has_form(name, output.text), output.text
        assert (output.token_ids[-1] == EOS) == (output.finish_reason == "stop")
    before = tight.stats().num_preemptions
    free = [(prompt, replace(params, max_tokens=60)) for prompt, params in FREE]
    for outputs in (serve(engine, requests), serve(tight, requests, cold=True), serve(tight, requests + free)):
        assert tokens_of(outputs[:4]) == tokens_of(alone)
        assert [output.text for output in outputs[:4]] == [output.text for output in alone]
    assert tight.stats().num_preemptions > before


def test_neighbours_are_unchanged_bit_for_bit(engine):
    """Tokens and log-probabilities, which are of the raw distribution."""
    alone = serve(engine, FREE[:2])
    beside = serve(engine, [*FREE[:2], *DRAWN[:2]])
    for one, other in zip(alone, beside, strict=False):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs


def test_logprobs_are_of_the_models_raw_distribution(engine):
    prompt, params = GREEDY[2]
    bound = serve(engine, [(prompt, replace(params, logprobs=1))])[0]
    free = serve(engine, [(prompt, SamplingParams(temperature=0, max_tokens=1, logprobs=1))])[0]
    assert bound.logprobs[0].top == free.logprobs[0].top
    assert bound.logprobs[0].logprob < free.logprobs[0].logprob


def test_answers_of_one_request_each_have_the_form(engine, tight):
    requests = [(PROMPTS[0], replace(DRAWN[1][1], n=3)), (PROMPTS[1], replace(DRAWN[2][1], n=2, best_of=3))]
    requests = [(prompt, replace(params, max_tokens=24)) for prompt, params in requests]
    roomy, narrow = serve(engine, requests), serve(tight, requests)
    for name, n, output, other in zip(("regex", "choice"), (3, 2), roomy, narrow, strict=True):
        assert len(output.completions) == n
        assert all(c.finish_reason == "stop" and has_form(name, c.text) for c in output.completions)
        assert [c.token_ids for c in output.completions] == [c.token_ids for c in other.completions]
    assert len({c.text for c in roomy[0].completions}) > 1
    # The first answer is what the request without n would get.
    assert roomy[0].completions[0].token_ids == serve(engine, [(PROMPTS[0], DRAWN[1][1])])[0].token_ids


leaves = st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"enum": ["é", 1, None, "a b"]}]) | st.builds(
    lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
    st.integers(-20, 20),
    st.integers(0, 9),
)
schemas = st.recursive(
    leaves | st.integers(1, 3).map(lambda most: {"type": "string", "maxLength": most}),
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner)
        | st.dictionaries(st.sampled_from(["a", "é", 'q"']), inner, min_size=1, max_size=2).map(
            lambda fields: {
                "type": "object",
                "properties": fields,
                "required": list(fields),
                "additionalProperties": False,
            }
        )
    ),
    max_leaves=3,
)


def conforms(value, schema) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        fields = schema["properties"]
        return (
            isinstance(value, dict)
            and list(value) == list(fields)
            and all(conforms(value[name], fields[name]) for name in fields)
        )
    if kind == "array":
        return isinstance(value, list) and len(value) <= 2 and all(conforms(item, schema["items"]) for item in value)
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    return value is None if kind == "null" else isinstance(value, bool)


@given(schemas, st.integers(0, 99))
@settings(max_examples=15)
def test_outputs_parse_against_their_schema(engine, schema, seed):
    form = StructuredOutput(json=schema, disable_any_whitespace=True)
    params = SamplingParams(temperature=0, max_tokens=None, structured=form)
    for output in serve(engine, [([5, seed], params), ([6], replace(params, temperature=1.0, seed=seed))]):
        assert output.finish_reason == "stop"
        assert conforms(json.loads(output.text), schema), output.text


def test_it_ends_where_the_form_does_and_not_before(engine):
    form = StructuredOutput(regex="[xy]{1,12}")
    options = [{}, {"ignore_eos": True}, {"min_tokens": 5}, {"min_tokens": 30}, {"max_tokens": 3, "min_tokens": 3}]
    options += [{"stop": ["xx", "yy"], "ignore_eos": True}]
    params = [SamplingParams(**{"seed": 1, "max_tokens": 40, "structured": form, **option}) for option in options]
    outputs = serve(engine, [([5, 6], one) for one in params])
    lengths = [len(output.token_ids) for output in outputs]
    assert lengths[1] == lengths[3] == 13  # twelve letters, and the end that nothing can hold back
    assert lengths[2] >= 5
    assert (lengths[4], outputs[4].finish_reason) == (3, "length")
    assert outputs[5].stop_reason in ("xx", "yy")
    assert all(output.finish_reason == "stop" for output in outputs[:4])


def test_allowed_token_ids(engine):
    allowed = [20, 21, EOS]
    options = [{}, {"min_tokens": 9}, {"structured": StructuredOutput(regex="[^a]*")}, {"temperature": 0}]
    for output in serve(
        engine,
        [([5], SamplingParams(**{"seed": 2, "max_tokens": 20, "allowed_token_ids": allowed, **o})) for o in options],
    ):
        assert set(output.token_ids) <= set(allowed)
        assert output.finish_reason == ("stop" if output.token_ids[-1] == EOS else "length")
    free = SamplingParams(temperature=0, max_tokens=8, allowed_token_ids=range(MODEL_VOCABULARY))
    assert tokens_of(serve(engine, [([5], free)])) == tokens_of(
        serve(engine, [([5], replace(free, allowed_token_ids=None))])
    )


def test_a_request_that_fails_fails_alone(engine):
    dead = SamplingParams(structured=StructuredOutput(regex="ab"), allowed_token_ids=[TOKENIZER.token_to_id("a"), EOS])
    bad = SamplingParams(structured=StructuredOutput(json={"type": "strin"}))
    outputs = serve(engine, [GREEDY[0], ([5], dead), ([5], bad), FREE[0]])
    assert [output.finish_reason for output in outputs] == ["stop", "error", "error", "length"]
    assert outputs[1].error == "the form cannot be continued with any token that is allowed, and is not complete"
    assert outputs[1].text == "a"
    assert outputs[2].error == "structured.json is refused: Invalid type: strin"
    assert outputs[2].token_ids == ()


def test_nothing_compiles_after_warm_up(engine):
    """The engine raises at a new program of the step; those beside the step are counted here."""
    serve(engine, GREEDY[:1])
    compiled = engine.stats().num_compilations
    programs = [f._cache_size for f in (sampler_state._load_masks, sampler_state._load_entry)]  # type: ignore[attr-defined]
    before = [count() for count in programs]
    serve(engine, [*GREEDY, *DRAWN, *FREE])
    serve(engine, [(prompt, replace(params, min_tokens=2, logit_bias={3: 1.0})) for prompt, params in DRAWN])
    assert [count() for count in programs] == before
    assert engine.stats().num_compilations == compiled


def test_aborted_while_it_is_compiled_queued_or_running(engine):
    for steps in (0, 1, 4):
        engine.add([5] * 9, GREEDY[1][1], request_id="gone", stream=True)
        for _ in range(steps):
            engine.step()
        assert engine.abort("gone").finish_reason == "abort"
        assert not engine.has_work
        check_pages(engine)
    assert serve(engine, GREEDY[:1])[0].finish_reason == "stop"


def test_a_model_with_other_ends(model):
    end = 77
    other = make_engine(model, tokens=8, num_pages=64, eos_token_ids=[end, 10_000])
    output = serve(other, [(PROMPTS[0], replace(GREEDY[2][1], seed=1))])[0]
    assert (output.token_ids[-1], output.finish_reason) == (end, "stop")
    assert has_form("choice", output.text)


class TestRefusedAtTheDoor:
    def test_without_llguidance(self, engine, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(RequestError, match=r'pip install "jpaged\[structured\]"'):
            engine.add([5], GREEDY[0][1])

    def test_token_ids_outside_the_vocabulary(self, engine):
        with pytest.raises(RequestError, match="allowed_token_ids holds token id 288"):
            engine.add([5], SamplingParams(allowed_token_ids=[1, 288]))

    @pytest.mark.parametrize("ids", [[], [1.5], "12", [-1], {1}])
    def test_what_is_no_list_of_token_ids(self, ids):
        with pytest.raises(RequestError, match="allowed_token_ids"):
            SamplingParams(allowed_token_ids=ids)
