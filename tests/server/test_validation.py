"""What is refused, by which status, with which words."""

import gzip
import json
import re

import pytest

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "Hi"}
SECRET = "the-secret-prompt"

# (endpoint, fields beside a good body, status, param, words)
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CASES = [
    (COMPLETIONS, {"temperature": -0.1}, "temperature", r"temperature is -0.1, expected a number in \[0, 2\]"),
    (COMPLETIONS, {"temperature": 2.1}, "temperature", r"\[0, 2\]"),
    (COMPLETIONS, {"temperature": "1"}, "temperature", "temperature is '1'"),
    (COMPLETIONS, {"temperature": True}, "temperature", "temperature is true"),
    (COMPLETIONS, {"temperature": 10**400}, "temperature", "an integer of more than 60 digits"),
    (COMPLETIONS, {"top_p": 0}, "top_p", r"\(0, 1\]"),
    (COMPLETIONS, {"top_p": 1.1}, "top_p", r"\(0, 1\]"),
    (COMPLETIONS, {"top_k": -2}, "top_k", r"integer in \[-1"),
    (COMPLETIONS, {"top_k": 1.5}, "top_k", "integer"),
    (COMPLETIONS, {"min_p": 1.5}, "min_p", r"\[0, 1\]"),
    (COMPLETIONS, {"repetition_penalty": 0}, "repetition_penalty", "number in"),
    (COMPLETIONS, {"presence_penalty": 2.5}, "presence_penalty", r"\[-2, 2\]"),
    (COMPLETIONS, {"frequency_penalty": -2.5}, "frequency_penalty", r"\[-2, 2\]"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "at least 1"),
    (COMPLETIONS, {"max_tokens": -1}, "max_tokens", "integer in"),
    (COMPLETIONS, {"min_tokens": 17}, "min_tokens", r"at most max_tokens \(16\)"),
    (COMPLETIONS, {"n": 0}, "n", r"\[1, 8\]"),
    (COMPLETIONS, {"n": 9}, "n", r"\[1, 8\]"),
    (COMPLETIONS, {"n": 2, "temperature": 0}, "n", "temperature 0"),
    (COMPLETIONS, {"n": 3, "best_of": 2}, "best_of", r"at least n \(3\)"),
    (COMPLETIONS, {"best_of": 2, "stream": True}, "stream", "cannot stream"),
    (COMPLETIONS, {"use_beam_search": True, "n": 2, "stream": True}, "stream", "cannot stream"),
    (COMPLETIONS, {"use_beam_search": True, "n": 2, "temperature": 0.5}, "temperature", "use_beam_search"),
    (COMPLETIONS, {"length_penalty": 0.5}, "length_penalty", "without use_beam_search"),
    (COMPLETIONS, {"logprobs": 6}, "logprobs", r"\[0, 5\]"),
    (COMPLETIONS, {"logprobs": -1}, "logprobs", r"\[0, 5\]"),
    (COMPLETIONS, {"logprobs": True}, "logprobs", "logprobs is true"),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot stream"),
    (COMPLETIONS, {"stop": ""}, "stop", "non-empty"),
    (COMPLETIONS, {"stop": ["a", ""]}, "stop", "non-empty"),
    (COMPLETIONS, {"stop": ["a"] * 65}, "stop", "at most 64"),
    (COMPLETIONS, {"stop_token_ids": [300]}, "stop_token_ids", r"stop_token_ids\[0\] is 300"),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias", "the key 'x'"),
    (COMPLETIONS, {"logit_bias": {"300": 1}}, "logit_bias", "the key '300'"),
    (COMPLETIONS, {"logit_bias": {"7": 1, "07": 2}}, "logit_bias", "the key '07'"),
    (COMPLETIONS, {"logit_bias": {"1" * 5000: 1}}, "logit_bias", "the key '1111"),
    (COMPLETIONS, {"logit_bias": {"1": 101}}, "logit_bias", r"logit_bias\[1\] is 101"),
    (COMPLETIONS, {"logit_bias": {f"{i}": 1 for i in range(301)}}, "logit_bias", "at most 300"),
    (COMPLETIONS, {"seed": 2**63}, "seed", "integer in"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options", "without stream"),
    (COMPLETIONS, {"stream": True, "stream_options": {"x": 1}}, "stream_options", "unknown entry 'x'"),
    (COMPLETIONS, {"stream": "yes"}, "stream", "true or false"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": []}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", r"prompt\[0\] is empty"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt", r"prompt\[1\]"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", r"prompt\[1\] is a string"),
    (COMPLETIONS, {"prompt": [1, 300]}, "prompt", r"prompt\[1\] is 300, expected token ids in \[0, 300\)"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", r"\[0, 300\)"),
    (COMPLETIONS, {"prompt": 5}, "prompt", "prompt is a number"),
    (COMPLETIONS, {"prompt": None}, "prompt", "missing"),
    (COMPLETIONS, {"prompt": "\ud800"}, "prompt", "surrogate"),
    (COMPLETIONS, {"prompt": "x" * 257, "max_tokens": 1}, "prompt", "maximum context length is 256 tokens"),
    (COMPLETIONS, {"prompt": "x" * 10**5}, "prompt", "100000 characters"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 256}, "max_tokens", "maximum context length is 256 tokens"),
    (COMPLETIONS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or"),
    (COMPLETIONS, {"cache_salt": ""}, "cache_salt", "at least 1"),
    (COMPLETIONS, {"cache_salt": "a@b"}, "cache_salt", "without @"),
    (COMPLETIONS, {"cache_salt": "x" * 129}, "cache_salt", "at most 128"),
    (COMPLETIONS, {"request_id": "a\r\nb"}, "request_id", "printable"),
    (COMPLETIONS, {"priority": 1}, "priority", r"\[0, 0\]"),
    (COMPLETIONS, {"suffix": "x"}, "suffix", "left out"),
    (COMPLETIONS, {"bad_words": ["x"]}, "bad_words", "logit_bias"),
    (COMPLETIONS, {"allowed_token_ids": []}, "allowed_token_ids", "list of 1 to 300"),
    (COMPLETIONS, {"guided_json": {}}, "guided_json", r"use structured_outputs\.json"),
    (COMPLETIONS, {"best-of": 2}, "best-of", "no parameter of this endpoint"),
    (COMPLETIONS, {"messages": []}, "messages", "no parameter of this endpoint"),
    (COMPLETIONS, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    (COMPLETIONS, {"structured_outputs": {"json": "{"}}, "structured_outputs", "no JSON"),
    (
        COMPLETIONS,
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "expected one",
    ),
    (COMPLETIONS, {"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    (
        COMPLETIONS,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "\ud800"}}}},
        "response_format",
        r"^response_format\.json_schema\.schema holds half of a surrogate pair",
    ),
    (COMPLETIONS, {"response_format": {"type": "xml"}}, "response_format", r"response_format.type is 'xml'"),
    (CHATS, {"messages": []}, "messages", "1 to 4096"),
    (CHATS, {"messages": None}, "messages", "missing"),
    (CHATS, {"messages": [{"content": "x"}]}, "messages", r"messages\[0\].role is null"),
    (CHATS, {"messages": [{"role": "user"}]}, "messages", r"messages\[0\].content is null"),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "text only"),
    (CHATS, {"logprobs": 1}, "logprobs", "true or false"),
    (CHATS, {"top_logprobs": 1}, "top_logprobs", "logprobs true"),
    (CHATS, {"top_logprobs": 6, "logprobs": True}, "top_logprobs", r"\[0, 5\]"),
    (CHATS, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "expected one"),
    (CHATS, {"continue_final_message": True}, "continue_final_message", "add_generation_prompt false"),
    (CHATS, {"chat_template_kwargs": {"nothing": 1}}, "chat_template_kwargs", "does not use nothing"),
    (CHATS, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "parameter of its own"),
    (CHATS, {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "cannot be used"),
    (CHATS, {"tool_choice": "required"}, "tool_choice", "'none', 'auto'"),
    (CHATS, {"tool_choice": {"type": "function"}}, "tool_choice", "'none', 'auto'"),
    (CHATS, {"tool_choice": "auto"}, "tool_choice", "without tools"),
    (CHATS, {"tools": [{"type": "function"}]}, "tools", r"tools\[0\]\.function is nothing"),
    (CHATS, {"tools": [{"type": "function", "function": {}}]}, "tools", r"tools\[0\]\.function\.name is nothing"),
    (CHATS, {"tools": [{"type": "x", "function": {"name": "f"}}]}, "tools", r"tools\[0\]\.type is 'x'"),
    (CHATS, {"functions": [{}]}, "functions", "use tools"),
    (CHATS, {"modalities": ["audio"]}, "modalities", "text only"),
    (CHATS, {"echo": True}, "echo", "no parameter"),
]


@pytest.mark.parametrize(("path", "fields", "param", "words"), CASES, ids=lambda value: ascii(value)[:40])
def test_refusals(server, path, fields, param, words) -> None:
    body = (CHAT if path == CHATS else TEXT) | fields
    response = server.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert response.json() == {"error": error}
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", param, 400), error
    assert re.search(words, error["message"]), error["message"]
    assert server.client.seen == []


def test_names_that_are_no_text_are_refused_like_others(server) -> None:
    response = server.http.post(
        COMPLETIONS, content=json.dumps(TEXT | {"\ud800": 1}), headers={"content-type": "application/json"}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "\ufffd")


def test_logprobs_of_prompts_are_bounded(server) -> None:
    body = TEXT | {"prompt": [[1] * 90] * 100, "echo": True, "logprobs": 5, "max_tokens": 1, "stream": True}
    response = server.http.post(COMPLETIONS, json=body)
    assert response.status_code == 400, response.text
    assert "54000 entries, expected at most 50000" in response.json()["error"]["message"]
    assert server.client.seen == []


def test_harmless_fields_are_taken(server) -> None:
    from jpaged.server.parameters import IGNORED

    for path, body in (
        (COMPLETIONS, TEXT | {"suffix": ""}),
        (CHATS, CHAT | {"function_call": "auto", "max_tokens": 1}),
    ):
        response = server.http.post(path, json=body | {name: ["anything"] for name in IGNORED})
        assert response.status_code == 200, response.text


def test_null_is_the_default(server) -> None:
    from jpaged.server.parameters import Limits, completion_parameters

    names = completion_parameters(
        Limits(models=("m",), vocab_size=9, max_model_len=9, max_logprobs=1, max_n=1, max_prompts=1)
    )
    response = server.http.post(COMPLETIONS, json=dict.fromkeys(names) | TEXT)
    assert response.status_code == 200, response.text


def test_at_most_ten_problems_are_told_in_few_words(server) -> None:
    body = TEXT | {f"{'x' * 5000}{number}": "y" * 5000 for number in range(200)}
    response = server.http.post(COMPLETIONS, json=body)
    assert response.json()["error"]["message"].endswith("(and 190 more)")
    assert len(response.content) < 3000


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": SECRET, "top_p": 7},
        {"prompt": [SECRET, 1]},
        {"prompt": {SECRET: SECRET}},
        {"prompt": SECRET * 100},
        {"prompt": SECRET, "max_tokens": 10**6},
        {"prompt": "a", "suffix": SECRET},  # the other half of a prompt
    ],
)
def test_prompts_are_not_repeated_in_errors(server, body) -> None:
    response = server.http.post(COMPLETIONS, json=body)
    assert response.status_code == 400
    assert SECRET not in response.text


@pytest.mark.parametrize(
    "messages",
    [
        SECRET,
        [SECRET],
        [{"role": [SECRET]}],
        [{"role": "user", "content": {SECRET: 1}}],
        [{"content": SECRET}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": SECRET}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": f'["{SECRET}"]'}}]}],
    ],
)
def test_messages_are_not_repeated_in_errors(server, messages) -> None:
    response = server.http.post(CHATS, json={"messages": messages})
    assert response.status_code == 400
    assert SECRET not in response.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b'{"prompt": NaN}', "number that cannot be read"),
        (b'{"prompt": "a", "top_p": Infinity}', "number that cannot be read"),
        (b'{"prompt": "\xff"}', "no UTF-8 at byte 12"),
        (b"[1]", "a list of 1, expected a JSON object"),
        (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "number that cannot be read"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_bodies_that_are_no_json(server, content, words) -> None:
    response = server.http.post(
        COMPLETIONS, content=content, headers={"content-type": "application/json; charset=utf-8"}
    )
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_other_content_types_are_refused(server) -> None:
    response = server.http.post(COMPLETIONS, content=b"prompt=a", headers={"content-type": "text/plain"})
    assert (response.status_code, response.json()["error"]["type"]) == (415, "UnsupportedMediaTypeError")


def test_compressed_bodies_are_refused(server) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = server.http.post(COMPLETIONS, content=gzip.compress(b'{"prompt": "a"}'), headers=headers)
    assert (response.status_code, response.json()["error"]["message"][:22]) == (415, "the body is compressed")


def test_wrong_models_paths_and_methods(server) -> None:
    response = server.http.post(COMPLETIONS, json=TEXT | {"model": "gpt"})
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "there is no model 'gpt'; this server has tiny, other-name",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert server.http.post(COMPLETIONS, json=TEXT | {"model": "other-name"}).json()["model"] == "tiny"
    assert server.http.get("/nothing").json()["error"]["code"] == 404
    response = server.http.get(COMPLETIONS)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["type"] == "MethodNotAllowedError"


def test_what_the_engine_refuses_names_the_parameter() -> None:
    from jpaged.errors import RequestError
    from jpaged.server.sampling import refusal

    no_end = RequestError("structured outputs end with an end-of-sequence id, this engine has none")
    for form in ("response_format", "structured_outputs"):
        told = refusal(no_end, {"temperature"}, form)
        assert (told.param, told.message) == (form, f"{no_end}")
    assert refusal(RequestError("temperature is 9"), {"temperature"}, None).param == "temperature"
    assert refusal(RequestError("this engine has no such thing"), {"temperature"}, None).param is None
