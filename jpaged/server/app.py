"""`Server`: the ASGI application and what it consists of."""

import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpaged.engine_client import EngineClient
from jpaged.errors import EngineFailedError, JpagedError, RequestError
from jpaged.server.admin_routes import admin_routes
from jpaged.server.admission import Admission
from jpaged.server.api_error import ApiError
from jpaged.server.body import BodyReader, ClientLeftError
from jpaged.server.config import ServerConfig
from jpaged.server.connection import STATE_KEY, Connection
from jpaged.server.door import Door
from jpaged.server.door_worker import DoorWorker
from jpaged.server.generation import Generation
from jpaged.server.keys import KeyRing
from jpaged.server.live_requests import LiveRequests
from jpaged.server.log import log_access
from jpaged.server.metrics import ServerMetrics
from jpaged.server.page import page_routes
from jpaged.server.parameters import Endpoint, Limits
from jpaged.server.reception import Reception
from jpaged.server.status_routes import status_routes
from jpaged.server.token_text import TokenTexts
from jpaged.tokenizer import Tokenizer

_LOGGER: Final = logging.getLogger("jpaged.server")


class Server:
    """An ASGI application that serves one engine.

    Args:
      config: everything that it is told.
      client: the engine, ready.
      tokenizer: the model's; `None`: prompts are token ids, answers have no text.

    Attributes:
      admission: how many are served at once; set `admission.is_draining` and nothing new is let in.

    Example: docs/server.md.
    """

    def __init__(self, config: ServerConfig, client: EngineClient, tokenizer: Tokenizer | None) -> None:
        self.config, self.client = config, client
        keys = KeyRing(config.api_keys, config.admin_keys)
        live, self._metrics = LiveRequests(), ServerMetrics()
        self.admission = Admission(max_requests=config.max_requests, max_requests_per_key=config.max_requests_per_key)
        bodies = BodyReader(
            max_bytes=config.max_body_bytes,
            max_total_bytes=config.max_total_body_bytes,
            timeout_s=config.body_timeout_s,
        )
        self._keys = keys
        self._reception = _reception(config, client, bodies, tokenizer)
        generation = Generation(
            client=client,
            keys=keys,
            admission=self.admission,
            reception=self._reception,
            live=live,
            texts=TokenTexts(tokenizer),
            model=config.models[0],
            log_prompts=config.log_prompts,
        )
        routes = [
            Route("/v1/completions", generation.endpoint("completions"), methods=["POST"]),
            Route("/v1/chat/completions", generation.endpoint("chat"), methods=["POST"]),
            Route("/tokenize", self._reading("tokenize"), methods=["POST"]),
            Route("/detokenize", self._reading("detokenize"), methods=["POST"]),
            *status_routes(
                config,
                client,
                keys=keys,
                admission=self.admission,
                reception=self._reception,
                live=live,
                metrics=self._metrics,
            ),
            *admin_routes(client, keys=keys, bodies=bodies, live=live),
            *(page_routes() if config.page else ()),
        ]
        middleware = []
        if config.allowed_origins:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(config.allowed_origins),
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],  # OpenAI's client in a browser sends some of its own
                    expose_headers=["retry-after", "x-request-id"],
                )
            )
        app = Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers={  # coroutines: Starlette runs plain functions in threads
                ApiError: _refused,
                HTTPException: _not_found,
                EngineFailedError: _engine_failed,
                RequestError: _engine_refused,
                JpagedError: _engine_refused,
                ClientLeftError: _client_left,
                Exception: _failed,
            },
        )
        self._app = _Counted(app, self._metrics, {route.path for route in routes})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def close(self) -> None:
        """Ends the threads and the process that read requests; the engine is left alone."""
        self._reception.close()

    def _reading(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """The handler of an endpoint that needs no engine."""

        async def handle(request: Request) -> Response:
            headers = request.scope["headers"]
            with self.admission.place(self._keys.tenant(headers)):
                answer = await self._reception.read(endpoint, headers, request.receive)
                return Response(answer, media_type="application/json")

        return handle


def _reception(
    config: ServerConfig, client: EngineClient, bodies: BodyReader, tokenizer: Tokenizer | None
) -> Reception:
    info = client.info
    limits = Limits(
        models=tuple(config.models),
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        max_logprobs=info.max_logprobs,
        max_n=min(config.max_n, info.max_num_seqs),
        max_prompts=config.max_prompts,
        has_priorities=info.policy == "priority",
        trusts_templates=config.trust_request_chat_template,
    )
    worker = DoorWorker(tokenizer, limits, timeout_s=config.reading_timeout_s)
    return Reception(bodies, Door(tokenizer, limits), worker, foreign_templates=config.trust_request_chat_template)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    # A template's own words may repeat the conversation.
    why = None if error.param == "messages" else error.message
    log_access("refused", path=request.url.path[:200], status=error.status, param=error.param, why=why)
    response = Response(error.body(), error.status, media_type="application/json")
    response.raw_headers += error.headers()
    return response


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: "there is no such endpoint", 405: f"this endpoint does not take {request.method}"}
    response = await _refused(request, ApiError(error.status_code, messages.get(error.status_code, error.detail)))
    response.headers.update(error.headers or {})
    return response


async def _engine_failed(request: Request, error: Exception) -> Response:
    return await _refused(request, ApiError(503, str(error), retry_after_s=5))


async def _engine_refused(request: Request, error: Exception) -> Response:
    return await _refused(request, ApiError(400 if isinstance(error, RequestError) else 500, str(error)))


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # which nobody reads; the log and the metrics do


async def _failed(request: Request, error: Exception) -> Response:
    return await _refused(request, ApiError(500, "the server failed at this request"))


class _Counted:
    """Counts requests and answers; what nobody foresaw becomes a line in the log.

    An answer counts before its last piece goes out: who has all of it finds it in the figures.

    The outermost application, so that `send` is uvicorn's own: `Connection.without_chunks` counts on it.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: set[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, is_counted = 0, False

        def count() -> None:
            nonlocal is_counted
            if not is_counted:
                is_counted = True
                self._metrics.num_active -= 1
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.responses[path, status or 499] += 1

        async def noted(message: Message) -> None:
            nonlocal status
            if status == 0 and message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                count()
            await send(message)

        connection: Connection | None = scope.get("state", {}).get(STATE_KEY)
        if connection is not None and scope["http_version"] == "1.0":
            send = connection.without_chunks(send)
        self._metrics.num_active += 1
        try:
            with contextlib.nullcontext() if connection is None else connection.serving():
                await self._app(scope, receive, noted)
        except ClientLeftError:
            pass
        except Exception as error:
            _LOGGER.error("a request failed: %s", type(error).__name__, exc_info=error)
        finally:
            count()
