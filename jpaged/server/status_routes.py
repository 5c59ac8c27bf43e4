"""Routes that say how the server is and what it serves: models, health, load, metrics, the pool."""

import asyncio
import contextlib
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged import __version__
from jpaged.engine_client import EngineClient
from jpaged.errors import EngineFailedError
from jpaged.server.admission import Admission
from jpaged.server.api_error import ApiError, compact_json, shown
from jpaged.server.config import ServerConfig
from jpaged.server.keys import KeyRing
from jpaged.server.live_requests import LiveRequests
from jpaged.server.metrics import CONTENT_TYPE, ServerMetrics, render_metrics
from jpaged.server.openapi import openapi_document
from jpaged.server.pool_state import PoolState
from jpaged.server.reception import Reception
from jpaged.server.shared_answer import SharedAnswer


def json_response(value: Any, status: int = 200) -> Response:
    return Response(compact_json(value), status, media_type="application/json")


def status_routes(
    config: ServerConfig,
    client: EngineClient,
    *,
    keys: KeyRing,
    admission: Admission,
    reception: Reception,
    live: LiveRequests,
    metrics: ServerMetrics,
) -> list[Route]:
    """The routes. `/v1/models` and `/internal/state` need a key, if there are keys."""
    started = int(time.time())
    document = compact_json(openapi_document(reception.door.tables, needs_key=bool(config.api_keys)))

    def model_card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "jpaged",
            "root": config.models[0],
            "parent": None,
            "max_model_len": client.info.max_model_len,
        }

    async def models(request: Request) -> Response:
        keys.tenant(request.scope["headers"])
        return json_response({"object": "list", "data": [model_card(name) for name in config.models]})

    async def model(request: Request) -> Response:
        keys.tenant(request.scope["headers"])
        name = request.path_params["name"]
        if name not in config.models:
            raise ApiError(404, f"there is no model {shown(name)}; this server has {', '.join(config.models)}")
        return json_response(model_card(name))

    async def health(request: Request) -> Response:
        if client.alive and not admission.is_draining:
            return Response(status_code=200)
        why = "the server is about to end" if admission.is_draining else f"the engine is {client.state}"
        raise ApiError(503, why, retry_after_s=5)

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    async def load(request: Request) -> Response:
        return json_response({"server_load": metrics.num_active})

    async def openapi(request: Request) -> Response:
        return Response(document, media_type="application/json")

    async def exposition(request: Request) -> Response:
        report = info = age_s = None
        with contextlib.suppress(EngineFailedError, ApiError):  # the rest is told all the same
            (report, age_s), info = await shared_report.get(), client.info
        body = render_metrics(
            info,
            report,
            metrics,
            up=client.alive,
            report_age_s=age_s,
            model=config.models[0],
            rejections=admission.rejections,
            num_at_door=reception.num_waiting,
            vllm_names=config.vllm_metric_names,
        )
        return Response(body, headers={"content-type": CONTENT_TYPE})

    async def read_state() -> PoolState:
        report, picture = await asyncio.gather(client.report(), client.picture())
        return await asyncio.to_thread(PoolState, config.models[0], client.info, report, picture)

    async def state(request: Request) -> Response:
        tenant = keys.tenant(request.scope["headers"])
        try:
            now, age_s = await shared_state.get()
        except EngineFailedError:
            raise ApiError(503, f"the engine is {client.state}", retry_after_s=5) from None
        shows_all = tenant.is_admin or not config.api_keys
        body = now.seen_by(tenant, live, shows_all=shows_all, age_s=age_s)
        return Response(body, media_type="application/json")

    shared_report, shared_state = SharedAnswer(client.report), SharedAnswer(read_state)
    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version),
        Route("/load", load),
        Route("/openapi.json", openapi),
        Route("/metrics", exposition),
        Route("/internal/state", state),
    ]
