"""`LLM`: text, token ids and lists of either; streams; chat; scores."""

import weakref
from dataclasses import replace

import jax
import numpy as np
import pytest

from jpaged.config import SpeculationConfig
from jpaged.errors import ChatTemplateError, ConfigError, FetchError, RequestError
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.llm import LLM, Score
from jpaged.request import SamplingParams
from jpaged.tokenizer import Tokenizer
from tests.fakes import dense_logits, greedy_without_cache, tiny_llama
from tests.tiny_vocabs import byte_level_metadata

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
SIZES = {"num_pages": 40, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "page_size": 8}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(gguf_vocabulary(byte_level_metadata(), "test.gguf"), "test.gguf")


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_llama(vocab_size=tokenizer.vocab_size, num_hidden_layers=1)


@pytest.fixture(scope="module")
def llm(model, tokenizer):
    return LLM(model, tokenizer=tokenizer, **SIZES)


def test_one_prompt_or_many_text_or_ids(llm, model, tokenizer):
    ids = tokenizer.encode("hello wo")
    (from_text,) = llm.generate("hello wo", GREEDY)
    (from_ids,) = llm.generate(ids, GREEDY)
    several = llm.generate(["hello wo", np.array(ids), tuple(ids)], GREEDY)
    expected = greedy_without_cache(model, ids, 10)
    for output in (from_text, from_ids, *several):
        assert list(output.token_ids) == expected
        assert output.text == tokenizer.decode(expected)
    assert from_text.prompt == "hello wo"
    assert from_ids.prompt is None
    assert llm.generate([], GREEDY) == []


def test_one_set_of_parameters_a_prompt(llm):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    assert [len(output.token_ids) for output in llm.generate(["a", "b", "c"], params)] == [1, 5, 3]
    with pytest.raises(RequestError, match="2 SamplingParams for 1 prompts"):
        llm.generate("a", params[:2])
    for bad in (5, {"temperature": 0}):
        with pytest.raises(RequestError, match=r"params is .*, expected SamplingParams"):
            llm.generate("a", bad)


@pytest.mark.parametrize("prompts", [None, 5, {1, 2}, {"prompt": "a"}, b"ab", [b"ab"], iter(["a"]), np.array(3)])
def test_what_is_no_prompt_is_refused(llm, prompts):
    with pytest.raises(RequestError, match=r"(prompts|a prompt) must be text"):
        llm.generate(prompts)


def test_streams_grow_to_the_whole_answer(llm):
    whole = llm.generate(["hello", "wo"], GREEDY)
    texts = {"0": "", "1": ""}
    last = {}
    for output in llm.generate(["hello", "wo"], GREEDY, stream=True):
        assert output.text.startswith(texts[output.request_id])
        texts[output.request_id] = output.text
        last[output.request_id] = output
    found = [replace(output, num_cached_tokens=0) for output in (last["0"], last["1"])]  # the prompts are known by now
    assert found == [replace(output, num_cached_tokens=0) for output in whole]


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_stream_that_is_left_frees_its_pages(llm, steps):
    stream = llm.generate(["hello", "wo"], GREEDY, stream=True)
    with pytest.raises(RequestError, match="still generating"):
        llm.generate("a", GREEDY)
    for _ in range(steps):
        next(stream)
    stream.close()
    assert llm.stats().now.pages_used == 0
    assert len(llm.generate("a", GREEDY)) == 1


def test_one_bad_prompt_refuses_the_call_and_leaves_nothing_behind(llm):
    for prompts in (["a", ""], ["a", [10_000]], ["a", None], {"a": 1}, 3, ["a" * 200]):
        with pytest.raises(RequestError):
            llm.generate(prompts, GREEDY)
        assert not llm.engine.has_work


def test_stop_strings_cut_the_text(llm):
    (whole,) = llm.generate("hello", GREEDY)
    stop = whole.text[3:5]
    cut = whole.text[: whole.text.index(stop)]
    (output,) = llm.generate(
        "hello", SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, stop=["~~", stop])
    )
    assert (output.text, output.finish_reason, output.stop_reason) == (cut, "stop", stop)
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    (output,) = llm.generate("hello", params)
    assert output.text == cut + stop


def test_guesses_are_an_option(model, llm, tokenizer):
    guessing = LLM(model, tokenizer=tokenizer, speculation=SpeculationConfig(num_tokens=3), **SIZES)
    assert guessing.engine.config.speculation == SpeculationConfig(num_tokens=3)
    assert llm.engine.config.speculation is None


def test_both_budgets_of_a_step_are_options(model, tokenizer):
    larger = LLM(model, tokenizer=tokenizer, max_num_prefill_tokens=48, **SIZES)
    scheduler = larger.engine.config.scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_prefill_tokens) == (32, 48)
    with pytest.raises(ConfigError, match="max_num_prefill_tokens is 31"):
        LLM(model, tokenizer=tokenizer, max_num_prefill_tokens=31, **SIZES)


def test_chat_uses_the_template(llm, tokenizer):
    messages = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt_token_ids == tuple(tokenizer.encode_chat(messages))
    two = llm.chat([messages, messages], GREEDY)
    assert [o.token_ids for o in two] == [output.token_ids] * 2
    assert list(llm.chat(messages, GREEDY, stream=True))[-1].token_ids == output.token_ids
    with pytest.raises(RequestError, match=r"messages\[0\] has the content None"):
        llm.chat([{"role": "user"}], GREEDY)
    with pytest.raises(ChatTemplateError):
        llm.chat(messages, GREEDY, chat_template="{{ raise_exception('no') }}")
    assert not llm.engine.has_work


def test_score_equals_the_dense_model(llm, model, tokenizer):
    text = "hello two words"
    ids = tokenizer.encode(text)
    dense = np.asarray(jax.nn.log_softmax(dense_logits(model, ids)))
    expected = [dense[i, token] for i, token in enumerate(ids[1:])]
    first, second = llm.score([text, ids])
    assert first == second
    # f32 sums in another order; log-probabilities are of order 5.
    assert first.logprobs == pytest.approx(expected, abs=2e-5)
    assert first.perplexity == pytest.approx(np.exp(-np.mean(expected)), rel=2e-5)
    with pytest.raises(RequestError, match="text 1 has one token"):
        llm.score([text, [5]])


def test_score_of_a_broken_model_is_an_error(model):
    broken = tiny_llama(vocab_size=model.vocab_size, num_hidden_layers=1, tie_word_embeddings=False)
    broken.embed[...] = broken.embed[...].at[9].set(np.nan)
    llm = LLM(broken, **SIZES)
    with pytest.raises(RequestError, match=r"text 1: the model produced NaN"):
        llm.score([[3, 4, 5], [3, 9, 5, 6]])
    assert llm.score([[3, 4, 5]])[0].perplexity > 1


def test_score_of_nothing_but_its_definition():
    assert Score((1, 2, 3), (-1.0, -3.0)).total_logprob == -4.0


def test_a_model_object_has_its_own_dtype_and_needs_no_tokenizer(model):
    with pytest.raises(ConfigError, match="dtype is for models that are loaded"):
        LLM(model, dtype="bfloat16")
    with pytest.raises(ConfigError, match="weights is for models that are loaded"):
        LLM(model, weights="int8")
    llm = LLM(model, **SIZES)
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("text")
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "x"}])


def test_an_unknown_model_is_explained(tmp_path):
    with pytest.raises(FetchError, match="no-such-model"):
        LLM("no-such-model")


def test_what_is_no_setting_is_refused(model, llm):
    for options in ({"config": {}}, {"tokenizer": 5}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            LLM(model, **options)
    for messages in ({"role": "user", "content": "x"}, None, [None], "text"):
        with pytest.raises(RequestError):
            llm.chat(messages)
    for priority in (None, 1.5, "x", [None], 1):
        with pytest.raises(RequestError, match="priority is"):
            llm.generate(["a"], GREEDY, priority=priority)


@pytest.mark.parametrize("name", [[1], None, 0, ""])
def test_what_is_no_name_is_refused(llm, name):
    with pytest.raises(RequestError, match=r"request_id is .*, expected a non-empty string"):
        llm.engine.abort(name)
    with pytest.raises(RequestError, match=r"name is .*, expected a non-empty string"):
        llm.unpin_prefix(name)


def test_a_dropped_llm_frees_its_engine_at_once(model):
    llm = LLM(model, **SIZES)
    llm.generate([1, 2], GREEDY)
    engine = weakref.ref(llm.engine)
    del llm
    assert engine() is None
