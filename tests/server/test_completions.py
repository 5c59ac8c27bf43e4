"""`/v1/completions`: what comes back, whole and by events."""

import pytest

from tests.server.running import events
from tests.server.tiny_model import ids

GREEDY = {"temperature": 0}


def complete(server, **body):
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_whole_answer(server) -> None:
    response = server.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "request_id": "mine"})
    answer = response.json()
    created = answer.pop("created")
    assert answer == {
        "id": "cmpl-mine",
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {"index": 0, "text": "abcab", "logprobs": None, "finish_reason": "length", "stop_reason": None},
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert created > 1_600_000_000
    assert response.headers["x-request-id"] == "cmpl-mine"
    assert server.client.seen[0]["params"].max_tokens == 5


def test_max_tokens_is_16_by_default(server) -> None:
    assert complete(server, prompt="ab")["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        (ids("ab"), ["ab"]),
        ([ids("ab"), ids("cd")], ["ab", "cd"]),
        ([100.0, 101.0], ["ab"]),
    ],
)
def test_forms_of_prompts(server, prompt, texts) -> None:
    answer = complete(server, prompt=prompt, max_tokens=2)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(texts))
    assert answer["usage"]["prompt_tokens"] == 2 * len(texts)


def test_answers_are_numbered_over_prompts(server) -> None:
    answer = complete(server, prompt=["ab", "cd"], max_tokens=2, n=2, seed=1)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")]
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 8,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_logprobs(server) -> None:
    (choice,) = complete(server, prompt="éa", max_tokens=3, logprobs=2)["choices"]
    assert choice["text"] == "éa"
    assert choice["logprobs"] == {
        "tokens": ["\ufffd", "\ufffd", "a"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"\ufffd": -0.5}, {"\ufffd": -0.5}, {"a": -0.5, "b": -1.0}],
        "text_offset": [0, 0, 1],
    }
    (choice,) = complete(server, prompt="a", max_tokens=1, logprobs=1, return_tokens_as_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:100"]
    assert choice["logprobs"]["top_logprobs"] == [{"token_id:100": -0.5}]


def test_echo_with_logprobs_scores_the_prompt(server) -> None:
    """What lm-eval asks for."""
    for max_tokens in (0, 1):
        (choice,) = complete(server, prompt="abc", max_tokens=max_tokens, logprobs=1, echo=True, temperature=0)[
            "choices"
        ]
        assert choice["text"] == "abc" + "a" * max_tokens
        assert choice["logprobs"]["tokens"] == ["a", "b", "c", *("a" * max_tokens)]
        assert choice["logprobs"]["token_logprobs"] == [None, *[-0.5] * (2 + max_tokens)]
        assert choice["logprobs"]["top_logprobs"][0] is None
        assert choice["logprobs"]["text_offset"] == list(range(3 + max_tokens))
        assert "prompt_logprobs" not in choice
    assert server.client.seen[0]["params"].prompt_logprobs == 1


def test_echo_of_token_ids_is_their_text(server) -> None:
    assert complete(server, prompt=ids("abc"), max_tokens=1, echo=True)["choices"][0]["text"] == "abca"
    assert (
        complete(server, prompt="abc", truncate_prompt_tokens=2, max_tokens=1, echo=True)["choices"][0]["text"] == "bcb"
    )


def test_prompt_logprobs_and_token_ids(server) -> None:
    (choice,) = complete(server, prompt="ab", max_tokens=1, prompt_logprobs=1, return_token_ids=True)["choices"]
    assert choice["prompt_logprobs"] == [None, {"101": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([100, 101], [100])
    asked = {"prompt_logprobs": 0, "echo": True, "logprobs": 3}
    (choice,) = complete(server, prompt="ab", max_tokens=1, **asked)["choices"]
    assert [entry and len(entry) for entry in choice["prompt_logprobs"]] == [None, 1]
    assert [entry and len(entry) for entry in choice["logprobs"]["top_logprobs"]] == [None, 3, 3]


def test_stops(server) -> None:
    (choice,) = complete(server, prompt="abcd", stop=["cd"])["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "cd")
    (choice,) = complete(server, prompt="abcd", stop="cd", include_stop_str_in_output=True)["choices"]
    assert choice["text"] == "abcd"
    (choice,) = complete(server, prompt="abcd", stop_token_ids=[102])["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 102)


def test_parameters_reach_the_engine(server) -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "min_tokens": 1,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "allowed_token_ids": (100, 101),
        "best_of": 3,
        "n": 2,
    }
    complete(server, prompt="ab", max_tokens=2, logit_bias={"5": -3}, cache_salt="s", **asked)
    params = server.client.seen[0]["params"]
    assert {name: getattr(params, name) for name in asked} == asked
    assert params.logit_bias == {5: -3.0}
    assert server.client.seen[0]["cache_salt"] == "s"


def test_seeds_may_be_negative(server) -> None:
    for seed in (-1, -(2**63), 2**63 - 1):
        complete(server, prompt="ab", seed=seed)
    assert [seen["params"].seed for seen in server.client.seen] == [2**63 - 1, 0, 2**63 - 1]


def test_beam_search_needs_no_temperature(server) -> None:
    complete(server, prompt="ab", n=2, use_beam_search=True, length_penalty=0.5)
    params = server.client.seen[0]["params"]
    assert (params.use_beam_search, params.temperature, params.length_penalty) == (True, 0.0, 0.5)


def test_truncation_keeps_the_end(server) -> None:
    complete(server, prompt="x" * 300 + "ab", truncate_prompt_tokens=-1, max_tokens=6)
    prompt = server.client.seen[0]["prompt"]
    assert len(prompt) == 250
    assert list(prompt[-2:]) == ids("ab")


def test_events(server) -> None:
    response = server.http.post(
        "/v1/completions", json={"prompt": "ab", "max_tokens": 3, "stream": True, "request_id": "mine"}
    )
    found = events(response)
    created = {event.pop("created") for event in found}
    assert len(created) == 1
    head = {"id": "cmpl-mine", "object": "text_completion", "model": "tiny"}

    def event(text: str, reason: str | None) -> dict:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}
        return {**head, "choices": [choice]}

    assert found == [event("a", None), event("b", None), event("a", "length")]


def test_usage_in_events(server) -> None:
    body = {"prompt": "ab", "max_tokens": 2, "stream": True}
    found = events(server.http.post("/v1/completions", json=body | {"stream_options": {"include_usage": True}}))
    assert [event["usage"] for event in found[:-1]] == [None, None]
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["total_tokens"] == 4
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(server.http.post("/v1/completions", json=body | {"stream_options": options}))
    assert [event["usage"]["completion_tokens"] for event in found] == [1, 2, 2]


def test_echo_and_token_ids_in_events(server) -> None:
    body = {"prompt": "ab", "max_tokens": 1, "stream": True, "echo": True, "logprobs": 1, "return_token_ids": True}
    first, last = events(server.http.post("/v1/completions", json=body))
    (opening,), (ending,) = first["choices"], last["choices"]
    assert (opening["text"], opening["prompt_token_ids"]) == ("ab", [100, 101])
    assert opening["logprobs"]["token_logprobs"] == [None, -0.5]
    assert (ending["text"], ending["token_ids"], ending["finish_reason"]) == ("a", [100], "length")
    assert ending["logprobs"]["text_offset"] == [2]


CASES = [
    {"prompt": "abc", "max_tokens": 7},
    {"prompt": ["abc", "xy"], "max_tokens": 5, "n": 2, "seed": 1},
    {"prompt": 'é👋 "\\\n', "max_tokens": 30},
    {"prompt": "é👋", "max_tokens": 4},  # ends inside of a character
    {"prompt": "é👋x", "stop": ["👋x"], "max_tokens": 30},
    {"prompt": "aab", "stop": ["abaabaa", "bb"], "max_tokens": 30},
    {"prompt": "aab", "stop": "baabaab", "include_stop_str_in_output": True, "max_tokens": 30},
    {"prompt": "abc", "logprobs": 2, "echo": True, "max_tokens": 4},
    {"prompt": [100, 0, 101], "skip_special_tokens": False, "max_tokens": 5},
    {"prompt": "ab", "max_tokens": 0, "echo": True},
]


@pytest.mark.parametrize("body", CASES, ids=lambda body: ascii(body)[:60])
def test_events_joined_are_the_whole_answer(server, body) -> None:
    whole = complete(server, **body)
    joined: dict[int, dict] = {}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    found = events(server.http.post("/v1/completions", json=body | options))
    for event in found[:-1]:
        (choice,) = event["choices"]
        one = joined.setdefault(choice["index"], {"text": "", "tokens": []})
        one["text"] += choice["text"]
        one["tokens"] += (choice["logprobs"] or {}).get("tokens", [])
        assert "finish_reason" not in one, "something came after the end"
        if choice["finish_reason"]:
            one["finish_reason"], one["stop_reason"] = choice["finish_reason"], choice["stop_reason"]
    assert found[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        one = joined[choice["index"]]
        for name in ("text", "finish_reason", "stop_reason"):
            assert one[name] == choice[name]
        assert one["tokens"] == (choice["logprobs"] or {}).get("tokens", [])


def test_prompts_of_one_stream_are_taken_for_one_step() -> None:
    from jpaged.async_engine import AsyncEngine
    from jpaged.engine_thread import EngineThread
    from tests.fake_engine import FakeEngine
    from tests.server.running import running

    seen: list[int] = []

    async def make() -> AsyncEngine:
        client = AsyncEngine(
            EngineThread(FakeEngine(step_s=0.01, on_step=lambda engine: seen.append(len(engine.live))))
        )
        await client.start()
        return client

    with running(make, None) as server:
        body = {"prompt": [[i, 1] for i in range(40)], "max_tokens": 3, "stream": True}
        pieces = events(server.http.post("/v1/completions", json=body))
        assert {choice["index"] for piece in pieces for choice in piece["choices"]} == set(range(40))
        assert len(seen) <= 5  # and not 42
        body["prompt"][7] = [13]  # which this engine cannot take: none of the others is left behind
        assert server.http.post("/v1/completions", json=body).status_code == 500
        server.wait_until(lambda: server.client.num_live == 0)


def test_an_aborted_request_has_all_its_answers() -> None:
    from jpaged.request import Completion, Output, SamplingParams
    from jpaged.server.answer import whole_answer
    from jpaged.server.generation_request import GenerationRequest, PromptTokens
    from jpaged.server.token_text import TokenTexts

    request = GenerationRequest(
        endpoint="completions",
        prompts=(PromptTokens(token_ids=(1,)),),
        params=SamplingParams(n=3, temperature=1.0, logprobs=0),
        wants_logprobs=True,
    )
    first = Completion(index=0, text="", token_ids=(), finish_reason="abort")
    output = Output(request_id="a", prompt=None, prompt_token_ids=(1,), completions=(first,), finished=True)
    answer = whole_answer(request, [output], TokenTexts(None), answer_id="a", created=0, model="m")
    assert [(choice["index"], choice["finish_reason"]) for choice in answer["choices"]] == [
        (0, "abort"),
        (1, "abort"),
        (2, "abort"),
    ]
