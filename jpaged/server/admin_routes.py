"""Routes for whoever runs the server; they do not exist without an admin key."""

from typing import Any, Final, get_args

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.engine_client import EngineClient, PauseMode
from jpaged.server.api_error import ApiError
from jpaged.server.body import BodyReader
from jpaged.server.door import parse_json
from jpaged.server.keys import KeyRing
from jpaged.server.kinds import Boolean, Choice, ListOf, Text
from jpaged.server.live_requests import LiveRequests
from jpaged.server.parameters import Parameter, Table, read_parameters
from jpaged.server.status_routes import json_response

_PAUSE: Final = {
    "mode": Parameter(Choice(get_args(PauseMode)), "What becomes of live requests.", "abort"),
    "clear_cache": Parameter(Boolean(), "Forget cached prefixes.", True),
}
_ABORT: Final = {"request_ids": Parameter(ListOf(Text(1, 256), most=4096), "Ids of answers; all, if left out.")}


def admin_routes(client: EngineClient, *, keys: KeyRing, bodies: BodyReader, live: LiveRequests) -> list[Route]:
    """The routes. Bodies may be left out."""

    async def read(request: Request, table: Table) -> dict[str, Any]:
        keys.admin(request.scope["headers"])
        if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
            return read_parameters({}, table)
        body = await bodies.read(request.scope["headers"], request.receive)
        bodies.release(len(body))
        return read_parameters(parse_json(body), table)

    async def reset_prefix_cache(request: Request) -> Response:
        await read(request, {})
        await client.reset_prefix_cache()
        return json_response({})

    async def pause(request: Request) -> Response:
        values = await read(request, _PAUSE)
        await client.pause(values["mode"], clear_cache=values["clear_cache"])
        return json_response({"is_paused": client.is_paused})

    async def resume(request: Request) -> Response:
        await read(request, {})
        await client.resume()
        return json_response({"is_paused": client.is_paused})

    async def is_paused(request: Request) -> Response:
        keys.admin(request.scope["headers"])
        return json_response({"is_paused": client.is_paused})

    async def abort_requests(request: Request) -> Response:
        wanted = (await read(request, _ABORT))["request_ids"]
        names = None if wanted is None else live.of_answers(wanted)
        if names == []:
            raise ApiError(404, "no live request has one of these ids", param="request_ids")
        return json_response({"num_aborted": await client.abort(names)})

    return [
        Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
        Route("/pause", pause, methods=["POST"]),
        Route("/resume", resume, methods=["POST"]),
        Route("/is_paused", is_paused),
        Route("/abort_requests", abort_requests, methods=["POST"]),
    ]
