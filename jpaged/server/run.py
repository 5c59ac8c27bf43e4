"""`serve`: listens, serves, and ends without cutting anybody off."""

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any, Final

import uvicorn
from starlette.types import Receive, Scope, Send

from jpaged.engine_client import EngineClient
from jpaged.errors import ConfigError
from jpaged.server.app import Server
from jpaged.server.config import ServerConfig
from jpaged.server.connection import Connection
from jpaged.server.turnstile import Turnstile
from jpaged.tokenizer import Tokenizer

_LOGGER: Final = logging.getLogger("jpaged.server")
_LAST_WORDS_S: Final = 5.0  # for answers to be written once their requests were ended
_BACKLOG: Final = 2048
_LEAST_REQUEST_S: Final = 1.0
_BEGUN_IN_A_TURN: Final = 16  # a turn of the event loop is then a few milliseconds long


async def serve(
    config: ServerConfig,
    client: EngineClient,
    tokenizer: Tokenizer | None,
    *,
    listener: socket.socket | None = None,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, or until `stop` is set; then ends in order.

    In order means: new requests are refused (503), those that are being served have `drain_timeout_s` to end, then they
    are ended ("abort"), and at last the port is closed. A second signal ends at once.

    Args:
      config: everything that the server is told.
      client: the engine, ready; it is left open.
      tokenizer: the model's.
      listener: what `bound(config)` gave, before the engine was made; it is closed. `None`: only now it is found out
        whether the address can be had.
      stop: another way to end it than signals, which only the main thread gets.
      on_ready: told the address once it can be connected to.

    Raises:
      ConfigError: the address cannot be listened on, or the certificate not be used.
    """
    stop = asyncio.Event() if stop is None else stop
    with (
        _listening(listener or bound(config), config) as listener,
        contextlib.closing(Server(config, client, tokenizer)) as app,
    ):
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{config.scheme}://{host}:{listener.getsockname()[1]}"

        def started() -> None:
            # Only now: uvicorn has just put its own handlers there, which would close the port at once.
            if threading.current_thread() is threading.main_thread():
                loop = asyncio.get_running_loop()
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.add_signal_handler(number, _on_signal, stop, server)
            if on_ready is not None:
                on_ready(address)

        server = uvicorn.Server(_uvicorn_config(config, _WithLifespan(app, started)))
        drain = asyncio.ensure_future(_drain(stop, app, server))
        try:
            await server.serve(sockets=[listener])
        finally:
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)


def _on_signal(stop: asyncio.Event, server: uvicorn.Server) -> None:
    if stop.is_set():
        server.should_exit = server.force_exit = True
    stop.set()


async def _drain(stop: asyncio.Event, app: Server, server: uvicorn.Server) -> None:
    await stop.wait()
    app.admission.is_draining = True
    _LOGGER.info("draining", extra={"fields": {"num_sequences": app.admission.num_sequences}})
    try:
        async with asyncio.timeout(app.config.drain_timeout_s):
            await app.admission.wait_empty()
    except TimeoutError:
        _LOGGER.warning("ending requests", extra={"fields": {"num_sequences": app.admission.num_sequences}})
        await app.client.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await app.admission.wait_empty()
    finally:
        server.should_exit = True


def bound(config: ServerConfig) -> socket.socket:
    """A socket that has the config's address and does not listen yet: clients are refused until `serve` serves them.

    For whoever loads a model for minutes before: what is wrong with address and certificate is known at once.

    Raises:
      ConfigError: the address cannot be had, or the certificate not be used.
    """
    _check_certificate(config)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Else an address is taken for minutes after a server on it has ended.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, config.host != "::")  # "::" is every address
        # Connections inherit it. Event loops set it only on sockets that were made with the protocol's number, and
        # without it the second write of an answer waits for the client's acknowledgement of the first one, 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise _not_to_be_had(config, error) from None
    # Two that have bound an address and do not listen do not see each other, but whoever listens is seen.
    return listener


def _listening(listener: socket.socket, config: ServerConfig) -> socket.socket:
    try:
        listener.listen(_BACKLOG)
        return listener
    except OSError as error:  # another one was quicker
        listener.close()
        raise _not_to_be_had(config, error) from None


def _not_to_be_had(config: ServerConfig, error: OSError) -> ConfigError:
    what = f"cannot listen on {config.host}, port {config.port}: {error.strerror}"
    return ConfigError(f"{what}; choose another --host or --port, or end the program that uses it")


def _check_certificate(config: ServerConfig) -> None:
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Without a password OpenSSL would ask the terminal for that of an encrypted key, and a service has none.
    password = config.ssl_keyfile_password or ""
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:  # `ssl.SSLError` is one
        raise ConfigError(
            f"the certificate or the key cannot be used: {error}; see --ssl-certfile, --ssl-keyfile, --ssl-ca-certs, "
            "and, for a key that is encrypted, --ssl-keyfile-password"
        ) from None


def _uvicorn_config(config: ServerConfig, app: Any) -> uvicorn.Config:
    tls: dict[str, Any] = {}
    if config.ssl_certfile is not None:
        names = ("ssl_keyfile", "ssl_certfile", "ssl_keyfile_password", "ssl_ca_certs", "ssl_cert_reqs")
        tls = {name: getattr(config, name) for name in names}
    made = uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=False,  # the server writes its own
        server_header=False,
        date_header=True,
        ws="none",
        timeout_keep_alive=int(config.keep_alive_s),
        timeout_graceful_shutdown=int(_LAST_WORDS_S),
        **tls,
    )
    made.load()
    made.http_protocol_class = functools.partial(  # type: ignore[assignment]  # all that is done with it is to call it
        Connection,
        made.http_protocol_class,
        turnstile=Turnstile(_BEGUN_IN_A_TURN),
        request_timeout_s=max(config.keep_alive_s, _LEAST_REQUEST_S),
        send_timeout_s=config.send_timeout_s,
    )
    return made


class _WithLifespan:
    """Tells when the server has started."""

    def __init__(self, app: Server, started: Callable[[], None]) -> None:
        self._app, self._started = app, started

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await receive()
        self._started()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
