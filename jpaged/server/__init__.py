"""The HTTP server: OpenAI's API over an `EngineClient`.

Names are resolved when they are first used, so that a server's settings can be made without starlette.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jpaged.server.app import Server
    from jpaged.server.config import ServerConfig
    from jpaged.server.run import bound, serve

__all__ = ["Server", "ServerConfig", "bound", "serve"]

_HOME = {
    "Server": "jpaged.server.app",
    "ServerConfig": "jpaged.server.config",
    "bound": "jpaged.server.run",
    "serve": "jpaged.server.run",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'jpaged.server' has no attribute {name!r}; its public names are {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
