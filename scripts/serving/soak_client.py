"""`serve_case`: one case of the soak, from its first byte to its end, and what is wrong about it."""

import asyncio
import json
from typing import Any, Final

from scripts.serving.http_client import Answer, HttpClient
from scripts.serving.soak_case import SECRET, Case
from scripts.serving.sse import EventParser

COME_AGAIN: Final = (429, 503)  # limits of the server: no fault of anybody
_LOGPROB_TOLERANCE: Final = 1e-3
_REASONS: Final = {"stop", "length", "abort"}


class FaultError(Exception):
    """The server did something that it must not do."""


async def serve_case(client: HttpClient, case: Case, name: str) -> str:
    """Sends a case and reads what comes.

    Args:
      client: of the server.
      case: what to send, and when to leave.
      name: of the request.

    Returns:
      How it ended, in a word or two.

    Raises:
      FaultError: not as it must.
      OSError: the connection failed.
    """
    if case.twice:
        return await _compare(client, case, name)
    if case.leaves == "sending":
        _, writer = await client.connect()
        data = case.data(name)
        request = client.written("POST", case.path, data, case.headers)
        writer.write(request[: len(request) - len(data) + int(case.leaves_after)])
        await writer.drain()
        writer.close()
        return "left while sending"
    answering = asyncio.create_task(_answer(client, case, name))
    if case.leaves != "waiting":
        return _ended(case, await answering)
    await asyncio.wait([answering], timeout=case.leaves_after)
    if answering.done():
        return _ended(case, await answering)
    answering.cancel()
    await asyncio.wait([answering])
    return "left while waiting"


async def _answer(client: HttpClient, case: Case, name: str, *, stream: bool | None = None) -> Any:
    """The answer as an object: streams are put together. A word: how it ended otherwise."""
    data = case.data(name, stream=stream)
    async with client.request("POST", case.path, data, case.headers) as answer:
        if answer.status != 200:
            return _refused(case, answer, await answer.body())
        if case.refused:
            raise FaultError(f"answered, expected status {case.refused}")
        if answer.headers["content-type"].startswith("text/event-stream"):
            most = int(case.leaves_after) if case.leaves == "reading" else None
            return await _read_stream(answer, most)
        return json.loads(await answer.body())


def _refused(case: Case, answer: Answer, body: bytes) -> str:
    error = json.loads(body)["error"]
    if not isinstance(error["message"], str) or error["code"] != answer.status or SECRET.encode() in body:
        raise FaultError(f"an error of another form, or with the prompt in it: {body[:300]!r}")
    if answer.status in COME_AGAIN:
        if "retry-after" not in answer.headers:
            raise FaultError(f"status {answer.status} does not say when to come again")
        return f"told to come again ({answer.status})"
    if answer.status not in case.refused:
        raise FaultError(f"status {answer.status} ({error['message']}), expected {case.refused or 200}")
    return "refused"


async def _read_stream(answer: Answer, most: int | None) -> Any:
    """The events, put together; after `most` events the client leaves."""
    parser, events, is_done = EventParser(), [], False
    while data := await answer.read():
        for event in parser.feed(data):
            if is_done:
                raise FaultError("an event came after [DONE]")
            if event == b"[DONE]":
                is_done = True
            else:
                events.append(json.loads(event))
            if most is not None and len(events) >= most and not is_done:
                return "left while reading"
    if not is_done or parser.rest:
        raise FaultError("the stream ended without [DONE]")
    return joined(events)


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer in one piece that the events are.

    Example:
      >>> start = {"id": "a", "choices": [{"index": 0, "text": "x", "finish_reason": None}]}
      >>> end = {"id": "a", "choices": [{"index": 0, "text": "y", "finish_reason": "stop"}]}
      >>> joined([start, end])["choices"]
      [{'index': 0, 'finish_reason': 'stop', 'text': 'xy'}]
    """
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        if "error" in event:
            raise FaultError(f"failed in the stream: {event['error']}")
        whole |= {name: value for name, value in event.items() if value is not None and name != "choices"}
        for piece in event["choices"]:
            choice = choices.setdefault(piece["index"], {"index": piece["index"]})
            text = piece["text"] if "text" in piece else piece["delta"].get("content", "")
            if choice.get("finish_reason"):
                raise FaultError(f"a piece came after the end of answer {piece['index']}: {piece}")
            choice |= {name: piece[name] for name in ("finish_reason", "stop_reason") if name in piece}
            choice["text"] = choice.get("text", "") + (text or "")
            for name in ("token_ids", "prompt_token_ids"):
                if piece.get(name) is not None:
                    choice[name] = [*choice.get(name, ()), *piece[name]]
            if piece.get("logprobs"):
                lists = choice.setdefault("logprobs", {})
                for name, values in piece["logprobs"].items():
                    lists[name] = [*lists.get(name, ()), *(values or ())]
    whole["choices"] = [choices[index] for index in sorted(choices)]
    return whole


def _ended(case: Case, answer: Any) -> str:
    if isinstance(answer, str):
        return answer
    reasons = {choice["finish_reason"] for choice in answer["choices"]}
    if not reasons or not reasons <= _REASONS:
        raise FaultError(f"answers ended with {reasons}")
    usage = answer["usage"]
    if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
        raise FaultError(f"usage does not add up: {usage}")
    if isinstance(case.body, dict) and not case.body.get("best_of"):
        prompt = case.body.get("prompt")
        num_prompts = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], list | str) else 1
        if len(answer["choices"]) != num_prompts * case.body.get("n", 1):
            raise FaultError(f"{len(answer['choices'])} answers, expected {num_prompts} x {case.body.get('n', 1)}")
    return "aborted" if "abort" in reasons else "answered"


async def _compare(client: HttpClient, case: Case, name: str) -> str:
    streamed, whole = await asyncio.gather(
        _answer(client, case, f"{name}-stream", stream=True), _answer(client, case, f"{name}-whole", stream=False)
    )
    ends = [_ended(case, streamed), _ended(case, whole)]
    if ends != ["answered", "answered"]:
        return next(end for end in ends if end != "answered")
    ours, theirs = _comparable(streamed), _comparable(whole)
    if not _alike(ours, theirs):
        raise FaultError(f"streamed {json.dumps(ours)}, in one piece {json.dumps(theirs)}")
    return "compared"


def _comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """What streaming must not change: all but names, times, and what of the prompt was in the cache."""
    choices = []
    for choice in answer["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        names = ("index", "finish_reason", "stop_reason", "token_ids", "logprobs")
        choices.append({"text": text, **{name: choice[name] for name in names if choice.get(name) is not None}})
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {"choices": choices, "usage": {name: answer["usage"][name] for name in counts}}


def _alike(one: Any, other: Any) -> bool:
    """Equal, but for the last bits of log-probabilities, which change with what runs in the same step.

    Example:
      >>> _alike({"a": [1.0, "x"]}, {"a": [1.00001, "x"]}), _alike({"a": [1, "x"]}, {"a": [1, "y"]})
      (True, False)
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < _LOGPROB_TOLERANCE
    return one == other
