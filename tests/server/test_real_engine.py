"""A real engine behind the server: a tiny random model, OpenAI's own client, random requests, the document's schema."""

import random
import re
from pathlib import Path

import pytest

from tests.server.running import events
from tests.server.tiny_model import write_model


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory):
    from jpaged import LLM, CacheConfig, EngineConfig, SchedulerConfig
    from jpaged.async_engine import AsyncEngine
    from jpaged.engine_thread import EngineThread
    from tests.server.running import running

    folder: Path = write_model(tmp_path_factory.mktemp("model") / "tiny")
    config = EngineConfig(
        cache=CacheConfig(num_pages=65),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=256),
        token_buckets=(32,),
        check_invariants=True,
    )
    llm = LLM(folder, config=config, progress=False)

    async def make() -> AsyncEngine:
        client = AsyncEngine(EngineThread(llm.engine))
        await client.start()
        return client

    with running(make, llm.tokenizer, max_prompts=4, max_n=4) as server:
        yield server
        report = server.do(server.client.report)
        assert report.stats.num_running == report.stats.num_waiting == 0
        assert report.stats.pages_free + report.stats.pages_cached == report.stats.num_pages - 1
        assert report.finished.get("error", 0) <= 1  # the regular expression that is none


@pytest.fixture
def openai():
    """OpenAI's client. It takes most of a second to import, and all workers collect this file, but one runs it."""
    import openai

    return openai


@pytest.fixture
def client(real, openai):
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        yield client


HI = [{"role": "user", "content": "Hi"}]


def test_openai_client_lists_models(client) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "other-name"]
    assert client.models.retrieve("tiny").object == "model"


def test_openai_client_chats(client) -> None:
    asked = {"model": "tiny", "messages": HI, "max_completion_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(
        **asked, logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True}
    )
    (choice,) = whole.choices
    assert choice.finish_reason == "length"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 6
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 6
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in choice.logprobs.content), "greedy"
    text, usage = "", None
    for event in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        text += (event.choices[0].delta.content or "") if event.choices else ""
        usage = event.usage or usage
    assert (text, usage.completion_tokens) == (choice.message.content, 6)
    assert usage.prompt_tokens_details.cached_tokens > 0


def test_openai_client_completes_and_scores(client) -> None:
    done = client.completions.create(model="tiny", prompt=["ab", "cd"], max_tokens=3, n=2, seed=5)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert done.usage.completion_tokens == 12
    (scored,) = client.completions.create(model="tiny", prompt="abc", max_tokens=0, echo=True, logprobs=1).choices
    assert scored.text == "abc"
    first, *others = scored.logprobs.token_logprobs
    assert first is None
    assert all(-20 < logprob < 0 for logprob in others)


def test_openai_client_gets_its_errors(client, openai) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p is 7") as caught:
        client.completions.create(model="tiny", prompt="a", top_p=7)
    assert (caught.value.param, caught.value.type) == ("top_p", "BadRequestError")
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        client.completions.create(model="gpt", prompt="a")


def test_a_client_that_leaves_frees_its_pages(real, client) -> None:
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    with client.completions.create(**asked, stream=True) as stream:
        next(iter(stream))
    real.wait_until(lambda: real.client.num_live == 0)


def random_request(seed: int) -> dict:
    chance = random.Random(seed)
    prompt = "".join(chance.choice('ab é👋"\n') for _ in range(chance.randint(1, 20)))
    body = {
        "prompt": chance.choice([prompt, [3 + byte for byte in prompt.encode()], [prompt, "b"]]),
        "max_tokens": chance.randint(1, 20),
        "seed": seed,
        "temperature": chance.choice([0, 1]),
        "skip_special_tokens": chance.random() < 0.5,
        "ignore_eos": chance.random() < 0.5,
    }
    if chance.random() < 0.5:
        body["stop"] = [
            chance.choice(["a", "b", "\ufffd", "é", " ", "k"]) + chance.choice(["", "x", "1"]) for _ in range(3)
        ]
        body["include_stop_str_in_output"] = chance.random() < 0.5
    if body["temperature"] and chance.random() < 0.3:
        body |= {"n": 2, "presence_penalty": 1.5, "logit_bias": {"100": 3}, "min_p": 0.01}
    if chance.random() < 0.3:
        body |= {"logprobs": 2, "echo": True}
    return body


@pytest.mark.parametrize("seeds", [range(20)], ids=["20 requests"])
def test_events_joined_are_the_whole_answer(real, seeds) -> None:
    for seed in seeds:
        body = random_request(seed)
        whole = real.http.post("/v1/completions", json=body)
        assert whole.status_code == 200, (body, whole.text)
        answer = whole.json()
        joined = {choice["index"]: {"text": "", "tokens": []} for choice in answer["choices"]}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *found, last = events(real.http.post("/v1/completions", json=body | options))
        for event in found:
            for choice in event["choices"]:
                one = joined[choice["index"]]
                one["text"] += choice["text"]
                one["tokens"] += (choice["logprobs"] or {}).get("tokens", [])
                one["end"] = (choice["finish_reason"], choice["stop_reason"])
        for choice in answer["choices"]:
            one = joined[choice["index"]]
            assert one["text"] == choice["text"], body
            assert one["end"] == (choice["finish_reason"], choice["stop_reason"]), body
            assert one["tokens"] == (choice["logprobs"] or {}).get("tokens", []), body
        assert last["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"], body


def test_structured_outputs(openai, client) -> None:
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 20, "seed": 1}
    (choice,) = client.completions.create(**asked, extra_body={"structured_outputs": {"regex": "[ab]{3}x"}}).choices
    assert re.fullmatch("[ab]{3}x", choice.text)
    assert choice.finish_reason == "stop"
    for stream in (False, True):  # before the first event, so by its status
        with pytest.raises(openai.BadRequestError, match=r"structured_outputs\.regex is refused") as refused:
            client.completions.create(**asked, stream=stream, extra_body={"structured_outputs": {"regex": "(("}})
        assert refused.value.param == "structured_outputs"
