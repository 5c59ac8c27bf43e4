"""`/v1/chat/completions`: what comes back, whole and by events, and what the template is given."""

import json

import pytest

from jpaged.server.door import Door
from tests.server.running import events
from tests.server.test_door_worker import LIMITS
from tests.server.tiny_model import ids

HI = [{"role": "user", "content": "Hi"}]
RENDERED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
USER_TURN = [1, *ids("user\nHi"), 2, *ids("\n")]
PROMPT = [*USER_TURN, 1, *ids("assistant\n")]


def chat(server, **body):
    response = server.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 3, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_whole_answer(server) -> None:
    answer = chat(server, request_id="mine", ignore_eos=True)
    assert answer.pop("created") > 1_600_000_000
    message = {"role": "assistant", "content": "us"}  # the first token of the prompt is special
    assert answer == {
        "id": "chatcmpl-mine",
        "object": "chat.completion",
        "model": "tiny",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "usage": {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": 3,
            "total_tokens": len(PROMPT) + 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert list(server.client.seen[0]["prompt"]) == PROMPT


def test_length_is_what_fits_by_default(server) -> None:
    response = server.http.post("/v1/chat/completions", json={"messages": HI, "ignore_eos": True})
    assert response.json()["usage"]["total_tokens"] == 256
    assert server.client.seen[0]["params"].max_tokens is None


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_length(server, name) -> None:
    response = server.http.post("/v1/chat/completions", json={"messages": HI, name: 2})
    assert response.json()["usage"]["completion_tokens"] == 2


def test_logprobs(server) -> None:
    (choice,) = chat(server, messages=[{"role": "é", "content": "Hi"}], logprobs=True, top_logprobs=1)["choices"]
    assert choice["logprobs"]["content"][1] == {
        "token": "\ufffd",
        "logprob": -0.5,
        "bytes": [0xC3],
        "top_logprobs": [{"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}],
    }
    (choice,) = chat(server, logprobs=True)["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], [], []]


def test_prompt_logprobs_and_token_ids(server) -> None:
    answer = chat(server, prompt_logprobs=0, return_token_ids=True)
    assert len(answer["prompt_logprobs"]) == len(PROMPT)
    assert answer["prompt_logprobs"][1] == {"120": {"logprob": -0.5, "rank": 1, "decoded_token": "u"}}
    assert answer["prompt_token_ids"] == PROMPT
    assert answer["choices"][0]["token_ids"] == PROMPT[:3]


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"add_generation_prompt": False}, USER_TURN),
        ({"add_generation_prompt": False, "continue_final_message": True}, USER_TURN[:-2]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, PROMPT),
        ({"tool_choice": "none", "tools": [{"type": "function", "function": {"name": "f"}}]}, PROMPT),
    ],
)
def test_what_the_template_is_given(server, body, prompt) -> None:
    chat(server, **body)
    assert list(server.client.seen[0]["prompt"]) == prompt


def test_tools_reach_the_template_or_are_refused(server) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    response = server.http.post("/v1/chat/completions", json={"messages": HI, "tools": tools})
    assert response.status_code == 400
    assert "does not use tools" in response.json()["error"]["message"]


@pytest.mark.parametrize(("arguments", "shown"), [('{"a": 1}', '{"a": 1}'), ("", "{}"), ({"a": 1}, '{"a": 1}')])
def test_arguments_of_calls_reach_the_template_as_objects(tokenizer, arguments, shown) -> None:
    """Clients send them as text; templates write them as JSON."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = {
        "messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}],
        "chat_template": "{{ messages[1].tool_calls[0].function.arguments | tojson }}",
    }
    request = Door(tokenizer, LIMITS).read("chat", json.dumps(body).encode())
    assert tokenizer.decode(list(request.prompts[0].token_ids)) == shown


def test_structured_outputs_reach_the_engine(server) -> None:
    schema = {"type": "object"}
    chat(server, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    chat(server, response_format={"type": "json_object"})
    chat(server, structured_outputs={"choice": ["a", "b"]})
    chat(server, response_format={"type": "text"})
    structured = [seen["params"].structured for seen in server.client.seen]
    assert [one and one.kind for one in structured] == ["json", "json_object", "choice", None]


def test_events(server) -> None:
    body = {"messages": HI, "max_tokens": 3, "stream": True, "request_id": "mine"}
    found = events(server.http.post("/v1/chat/completions", json=body))
    for event in found:
        assert event.pop("created") > 1_600_000_000
    head = {"id": "chatcmpl-mine", "object": "chat.completion.chunk", "model": "tiny"}
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def event(text: str, reason: str | None) -> dict:
        choice = {"index": 0, "delta": {"content": text}, "logprobs": None}
        return {**head, "choices": [choice | {"finish_reason": reason, "stop_reason": None}]}

    assert found == [{**head, "choices": [opening]}, event("u", None), event("s", "length")]


def test_events_of_several_answers_with_logprobs(server) -> None:
    body = {"messages": HI, "max_tokens": 2, "stream": True, "n": 2, "logprobs": True, "top_logprobs": 1}
    found = events(server.http.post("/v1/chat/completions", json=body))
    choices = [choice for event in found for choice in event["choices"]]
    assert [choice["index"] for choice in choices] == [0, 1, 0, 1, 0, 1]
    assert [len((choice["logprobs"] or {}).get("content", [])) for choice in choices] == [0, 0, 1, 1, 1, 1]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["length"] * 2


def test_a_template_of_the_request_needs_trust(server, start) -> None:
    body = {"messages": HI, "chat_template": "{{ messages[0].content }}", "max_tokens": 1}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 400
    with start(trust_request_chat_template=True) as trusting:
        chat(trusting, **body)
        assert list(trusting.client.seen[0]["prompt"]) == ids("Hi")
