"""`EventWriter`: one write for all that came, events that are exactly JSON, text that arrives as it was."""

import json

import pytest

from jpaged.delta import Delta
from jpaged.request import SamplingParams
from jpaged.server.events import EventWriter
from jpaged.server.generation_request import GenerationRequest, PromptTokens
from jpaged.server.token_text import TokenTexts


def writer(endpoint="completions", n=1, **fields) -> EventWriter:
    request = GenerationRequest(
        endpoint=endpoint, prompts=(PromptTokens(token_ids=(5, 6)),), params=SamplingParams(n=n), **fields
    )
    return EventWriter(request, TokenTexts(None), answer_id="an-id", created=7, model='a "model"')


def read(data: bytes) -> list[dict]:
    events = data.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event[6:]) for event in events]


@pytest.mark.parametrize("text", ['"', "\\", "\n\r\t", "\x00\x1f\x7f", "\u2028\u2029\x85", "é👋\ufffd", "</script>"])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_any_text_arrives_as_it_was(endpoint, text) -> None:
    """By the short way, with text alone, and by the long one."""
    for delta in (Delta(0, text, (5,)), Delta(0, text, (5,), None, "stop", text)):
        (event,) = read(writer(endpoint).events(0, [delta]))
        (choice,) = event.pop("choices")
        assert event.pop("object") == ("text_completion" if endpoint == "completions" else "chat.completion.chunk")
        assert event == {"id": "an-id", "created": 7, "model": 'a "model"'}
        assert (choice["text"] if endpoint == "completions" else choice["delta"]["content"]) == text
        assert (choice["finish_reason"], choice["stop_reason"]) == (delta.finish_reason, delta.stop_reason)


@pytest.mark.parametrize("fields", [{}, {"include_usage": True}, {"continuous_usage": True}, {"wants_token_ids": True}])
def test_the_short_way_and_the_long_one_have_the_same_fields(fields) -> None:
    made = writer(**fields)
    first, last = read(made.events(0, [Delta(0, "a", (5,)), Delta(0, "b", (6,), None, "length")]))
    assert list(first) == list(last)
    assert list(first["choices"][0]) == list(last["choices"][0])


def test_all_that_came_is_one_write() -> None:
    made = writer(n=2)
    deltas = [Delta(0, "a", (5,)), Delta(1, "", (5,)), Delta(0, "b", (6,)), Delta(1, "c", (7,))]
    choices = [event["choices"][0] for event in read(made.events(0, deltas))]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "a"), (0, "b"), (1, "c")]
    assert made.num_output_tokens == 4
    assert made.ending() == b"data: [DONE]\n\n"


def test_nothing_is_sent_while_text_is_uncertain() -> None:
    assert writer().events(0, [Delta(0, "", (5,))]) == b""
    assert len(read(writer(wants_token_ids=True).events(0, [Delta(0, "", (5,))]))) == 1


def test_answers_that_never_came_to_be_end_with_the_others() -> None:
    """A request that is aborted before its prompt is computed has one answer, whatever n is."""
    made = writer("chat", n=3)
    read(made.opening(0, None))
    read(made.events(0, [Delta(0, "", (), None, "abort")]))
    *events, done = made.ending().decode().split("\n\n")[:-1]
    choices = [json.loads(event[6:])["choices"][0] for event in events]
    assert [(choice["index"], choice["finish_reason"]) for choice in choices] == [(1, "abort"), (2, "abort")]
    assert done == "data: [DONE]"
