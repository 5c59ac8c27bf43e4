"""`send`: one request to its end, and what it took."""

import asyncio
import json
import time
from typing import Any

from scripts.serving.http_client import Answer, CutOffError, HttpClient
from scripts.serving.record import Record
from scripts.serving.sse import EventParser
from scripts.serving.work import Work

_MESSAGE_CHARACTERS = 300


async def send(client: HttpClient, path: str, work: Work, *, begin_s: float, timeout_s: float) -> Record:
    """Sends a request and reads its answer; never raises for what a server does.

    Args:
      client: of the server.
      path: of the endpoint.
      work: the request.
      begin_s: the load's begin, from which `work.due_s` counts.
      timeout_s: an answer that takes longer is an error.
    """
    now = time.monotonic()
    record = Record(work.index, now if work.due_s is None else begin_s + work.due_s, now)
    try:
        async with asyncio.timeout(timeout_s), client.request("POST", path, work.body) as answer:
            if answer.status != 200:
                record.error, record.message = f"http {answer.status}", _message(await answer.body())
            elif answer.headers.get("content-type", "").startswith("text/event-stream"):
                await _read_events(answer, record)
            else:
                _read_whole(await answer.body(), record)
    except TimeoutError:
        record.error, record.message = "timeout", f"no whole answer after {timeout_s:g} s"
    except CutOffError as error:
        record.error, record.message = "cut off", str(error)
    except OSError as error:
        record.error, record.message = "no connection", str(error)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        record.error, record.message = "not understood", f"{type(error).__name__}: {error}"
    record.end_s = time.monotonic()
    record.message = record.message[:_MESSAGE_CHARACTERS]
    if record.error is None and not record.event_s:
        record.error, record.message = "no text", "the answer had no text"
    return record


async def _read_events(answer: Answer, record: Record) -> None:
    parser, event_s, usage, is_done = EventParser(), record.event_s, None, False
    while data := await answer.read():
        now = time.monotonic()
        for event in parser.feed(data):
            if event == b"[DONE]":
                is_done = True
                continue
            fields = json.loads(event)
            if (choices := fields.get("choices")) and _has_text(choices[0]):
                event_s.append(now)
            usage = fields.get("usage") or usage
            if "error" in fields:
                record.error, record.message = "failed in the stream", _message(event)
    if record.error is None and not is_done:
        record.error, record.message = "cut off", "the stream ended without [DONE]"
    _count(usage, record)


def _has_text(choice: dict[str, Any]) -> bool:
    return bool(choice["text"] if "text" in choice else choice["delta"].get("content"))


def _read_whole(body: bytes, record: Record) -> None:
    fields = json.loads(body)
    if fields["choices"]:
        record.event_s.append(time.monotonic())
    _count(fields.get("usage"), record)


def _count(usage: dict[str, Any] | None, record: Record) -> None:
    if usage is None:
        record.num_output_tokens = len(record.event_s)
        return
    record.num_output_tokens = usage["completion_tokens"]
    record.num_prompt_tokens = usage["prompt_tokens"]
    record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _message(body: bytes) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body[: 4 * _MESSAGE_CHARACTERS].decode("utf-8", "replace")
