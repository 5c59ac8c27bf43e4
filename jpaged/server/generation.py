"""`Generation`: one request for text, from its headers to the end of its answer."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from jpaged.engine_client import EngineClient, RequestStream
from jpaged.errors import EngineFailedError, RequestError
from jpaged.request import Output
from jpaged.server.admission import Admission, Place
from jpaged.server.answer import whole_answer
from jpaged.server.api_error import ApiError, compact_json
from jpaged.server.body import ClientLeftError
from jpaged.server.disconnect import while_connected
from jpaged.server.events import EventWriter, error_events
from jpaged.server.generation_request import GenerationEndpoint, GenerationRequest
from jpaged.server.keys import KeyRing, Tenant
from jpaged.server.live_requests import LiveRequests
from jpaged.server.log import log_access
from jpaged.server.merged import merged, opened
from jpaged.server.reception import Reception
from jpaged.server.sampling import failure, refusal
from jpaged.server.token_text import TokenTexts

_ENGINE_RETRY_S = 5


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Serves `/v1/completions` and `/v1/chat/completions`.

    Attributes:
      client: the engine.
      keys, admission, reception: the way in, in this order.
      live: what is being served.
      texts: of tokens.
      model: the name in the answers.
      log_prompts: write prompts into the log.
    """

    client: EngineClient
    keys: KeyRing
    admission: Admission
    reception: Reception
    live: LiveRequests
    texts: TokenTexts
    model: str
    log_prompts: bool = False

    def endpoint(self, name: GenerationEndpoint) -> ASGIApp:
        """The ASGI application of one endpoint."""
        return _Endpoint(self, name)

    async def serve(self, name: GenerationEndpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """One request to an endpoint.

        Raises:
          ApiError: it is refused, or failed before its answer began.
        """
        arrival_s = time.monotonic()
        tenant = self.keys.tenant(scope["headers"])
        with self.admission.place(tenant) as place, contextlib.suppress(ClientLeftError):
            self._require_engine()
            request: GenerationRequest = await self.reception.read(name, scope["headers"], receive)
            place.widen(request.num_sequences)
            prefix = "cmpl-" if name == "completions" else "chatcmpl-"
            answer_id = prefix + (request.name or _header_name(scope) or uuid.uuid4().hex)
            with self.live.named(answer_id, len(request.prompts), tenant) as names:
                run = _Run(self, request, tenant, place, answer_id, names, arrival_s)
                try:
                    await while_connected(receive, run.stream(send) if request.stream else run.whole(send))
                except ClientLeftError:
                    run.status = 499  # the client's own doing; nobody gets to see it
                    raise
                finally:
                    run.log()

    def _require_engine(self) -> None:
        if not self.client.alive:
            self.admission.rejections["engine_not_ready"] += 1
            raise ApiError(
                503, f"the engine does not serve now (it is {self.client.state})", retry_after_s=_ENGINE_RETRY_S
            )


class _Endpoint:
    """Starlette takes functions for handlers of its own kind, and objects for ASGI applications."""

    def __init__(self, generation: Generation, name: GenerationEndpoint) -> None:
        self._generation = generation
        self._name: GenerationEndpoint = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._generation.serve(self._name, scope, receive, send)


class _Run:
    """A request that is being served."""

    def __init__(
        self,
        generation: Generation,
        request: GenerationRequest,
        tenant: Tenant,
        place: Place,
        answer_id: str,
        names: list[str],
        arrival_s: float,
    ) -> None:
        self._generation, self._request, self._tenant, self._place = generation, request, tenant, place
        self._answer_id, self._names, self._arrival_s = answer_id, names, arrival_s
        self._naming: dict[str, Any] = {"answer_id": answer_id, "created": int(time.time()), "model": generation.model}
        self.status = 500
        self._num_output_tokens = self._num_cached_tokens = 0
        self._first_s: float | None = None

    def _options(self, number: int) -> dict[str, Any]:
        return {
            "request_id": self._names[number],
            "priority": self._request.priority,
            "cache_salt": self._tenant.cache_salt(self._request.cache_salt),
            "arrival_s": self._arrival_s,
        }

    async def whole(self, send: Send) -> None:
        """Answers in one piece.

        Raises:
          ApiError: the engine refuses the request, or it failed.
        """
        client, request = self._generation.client, self._request
        try:
            outputs = await _all(
                [
                    client.generate(prompt.token_ids, request.params, **self._options(number))
                    for number, prompt in enumerate(request.prompts)
                ]
            )
        except (RequestError, EngineFailedError) as error:
            raise self._told(error) from None
        failed = next((output.error for output in outputs if output.error is not None), None)
        if failed is not None:
            raise self._failed(failed)
        if request.wants_logprobs or request.prompt_logprobs is not None:  # may be megabytes
            body = await asyncio.to_thread(self._body, outputs)
        else:
            body = self._body(outputs)
        self.status = 200
        length = (b"content-length", b"%d" % len(body))
        headers = [(b"content-type", b"application/json"), length, self._id_header()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send_last(send, body)

    def _body(self, outputs: Sequence[Output]) -> bytes:
        answer = whole_answer(self._request, outputs, self._generation.texts, **self._naming)
        self._num_output_tokens = answer["usage"]["completion_tokens"]
        self._num_cached_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return compact_json(answer)

    async def stream(self, send: Send) -> None:
        """Answers by events. What the engine refuses is refused before the first one.

        Raises:
          ApiError: as `whole`.
        """
        client, request = self._generation.client, self._request
        try:
            async with opened(
                [
                    client.stream(prompt.token_ids, request.params, **self._options(number))
                    for number, prompt in enumerate(request.prompts)
                ]
            ) as streams:
                if request.form is None:  # else it may be refused yet, when its form is compiled
                    await self._begin_events(send)
                last = await self._send_events(send, streams)
        except (RequestError, EngineFailedError) as error:
            raise self._told(error) from None
        await self._send_last(send, last)

    async def _send_last(self, send: Send, body: bytes) -> None:
        """Sends the end of the answer. Who has it may ask again at once: there is room, and the id is free."""
        if self._request.stream and self.status == 200:  # a client that does not read is waited for with its place
            await send({"type": "http.response.body", "body": b"", "more_body": True})
        self._place.leave()
        self._generation.live.forget(self._names)
        await send({"type": "http.response.body", "body": body})

    async def _begin_events(self, send: Send) -> None:
        if self.status != 200:
            self.status = 200
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # proxies: hand events on at once
                self._id_header(),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_events(self, send: Send, streams: Sequence[RequestStream]) -> bytes:
        """Sends all events but the last ones, which it returns.

        Raises:
          ApiError: it failed before the first one.
        """
        writer = EventWriter(self._request, self._generation.texts, **self._naming)
        opened_answers: set[int] = set()
        try:
            async with contextlib.aclosing(merged(streams)) as pieces:
                async for number, deltas in pieces:
                    if any(delta.finish_reason == "error" for delta in deltas):
                        return self._broken(self._failed, streams[number].error or "the request failed")
                    await self._begin_events(send)
                    written = b""
                    if number not in opened_answers:
                        opened_answers.add(number)
                        writer.num_cached_tokens += streams[number].num_cached_tokens
                        written = writer.opening(number, streams[number].prompt_logprobs)
                        self._first_s = self._first_s or time.monotonic()
                    written += writer.events(number, deltas)
                    if written:
                        await send({"type": "http.response.body", "body": written, "more_body": True})
            return writer.ending()
        except EngineFailedError as error:
            return self._broken(self._told, error)
        finally:
            self._num_output_tokens, self._num_cached_tokens = writer.num_output_tokens, writer.num_cached_tokens

    def _broken(self, told: Callable[[Any], ApiError], error: Any) -> bytes:
        """The last events of answers that fail; raised instead, if nothing was sent."""
        has_begun = self.status == 200
        error = told(error)
        if not has_begun:
            raise error
        return error_events(error)

    def _told(self, error: RequestError | EngineFailedError) -> ApiError:
        if isinstance(error, EngineFailedError):
            told = ApiError(503, str(error), retry_after_s=_ENGINE_RETRY_S)
        else:
            told = refusal(error, self._generation.reception.door.tables[self._request.endpoint], self._request.form)
        self.status = told.status
        return told

    def _failed(self, error: str) -> ApiError:
        """What is told of a request that ended with "error"."""
        told = failure(error, self._request.form)
        self.status = told.status
        return told

    def _id_header(self) -> tuple[bytes, bytes]:
        return b"x-request-id", self._answer_id.encode("ascii", "replace")

    def log(self) -> None:
        """One line about the request, whatever became of it."""
        now = time.monotonic()
        log_access(
            "request",
            request_id=self._answer_id,
            endpoint=self._request.endpoint,
            tenant=self._tenant.name,
            status=self.status,
            stream=self._request.stream,
            num_prompts=len(self._request.prompts),
            prompt_tokens=self._request.num_prompt_tokens,
            cached_tokens=self._num_cached_tokens,
            completion_tokens=self._num_output_tokens,
            first_event_ms=None if self._first_s is None else round(1e3 * (self._first_s - self._arrival_s), 1),
            duration_ms=round(1e3 * (now - self._arrival_s), 1),
            prompt_token_ids=[p.token_ids for p in self._request.prompts] if self._generation.log_prompts else None,
        )


async def _all(work: Sequence[Coroutine[Any, Any, Output]]) -> list[Output]:
    """All results; the first failure cancels the rest."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _header_name(scope: Scope) -> str | None:
    """The client's own id of the request, from the header X-Request-Id, if it can be used."""
    value = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    name = value.decode("ascii", "replace")
    return name if 1 <= len(name) <= 128 and name.isascii() and name.isprintable() else None
