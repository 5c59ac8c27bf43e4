"""The built-in page: `/`, and the files that it loads. No build step: what is in `static/` is what is served."""

import hashlib
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# The page runs its own scripts alone, and talks to the server that it came from alone: an API key is typed into it.
_POLICY: Final = "; ".join(
    [
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ]
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Kept, but asked for each time, which costs a 304: files of two versions never meet in one page.
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """`/` and a route for each file of `static/`. They hold nothing secret and need no key.

    Example:
      >>> [route.path for route in page_routes()][:4]
      ['/static/api.js', '/static/chat.js', '/static/figures.js', '/static/history.js']
    """
    folder = files("jpaged.server") / "static"
    routes = []
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/static/{file.name}"
            routes.append(_route(path, file.read_bytes(), kind))
    return routes


def _route(path: str, content: bytes, kind: str) -> Route:
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = _HEADERS | {"etag": etag}

    async def serve(request: Request) -> Response:
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if etag in known or known == ["*"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    return Route(path, serve)
