"""Listening: what is found out before a model is loaded, TLS, and what connections inherit."""

import asyncio
import shutil
import socket
import ssl
import subprocess
import sys

import pytest

from jpaged.errors import ConfigError
from jpaged.server import ServerConfig, bound, serve

ANY_PORT = ServerConfig(models=("tiny",), port=0)


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """Without TCP_NODELAY the second write of an answer waits 40 ms."""
    with bound(ANY_PORT) as listener:
        listener.listen()
        with (
            socket.create_connection(listener.getsockname()),
            listener.accept()[0] as connection,
        ):
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_clients_are_refused_until_the_server_listens() -> None:
    with bound(ANY_PORT) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname())


def test_an_address_that_is_taken_is_found_out_at_once_or_when_it_listens() -> None:
    with bound(ANY_PORT) as first:
        config = ServerConfig(models=("tiny",), port=first.getsockname()[1])
        with bound(config) as second:  # neither listens yet
            first.listen()
            with pytest.raises(ConfigError, match="Address already in use"):
                asyncio.run(serve(config, None, None, listener=second))  # type: ignore[arg-type]  # not looked at
        with pytest.raises(ConfigError, match="Address already in use"):
            bound(config)


def test_every_address_of_ipv6_is_every_address_of_ipv4_too() -> None:
    try:
        listener = bound(ServerConfig(models=("tiny",), host="::", port=0))
    except ConfigError:
        pytest.skip("needs IPv6")
    with listener:
        listener.listen()
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])).close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One that signs itself; its key is encrypted."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    files = {"ssl_keyfile": f"{folder / 'key.pem'}", "ssl_certfile": f"{folder / 'cert.pem'}"}
    what = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -passout pass:secret -days 9 -subj /CN=localhost"
    where = ["-keyout", files["ssl_keyfile"], "-out", files["ssl_certfile"]]
    subprocess.run([openssl, *what.split(), *where], check=True, capture_output=True)
    return files


def test_a_server_speaks_tls(start, certificate) -> None:
    with start(**certificate, ssl_keyfile_password="secret") as server:
        context = ssl.create_default_context(cafile=certificate["ssl_certfile"])
        port = int(server.url.removeprefix("https://127.0.0.1:"))
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_nobody_is_asked_for_the_password_of_a_key(certificate) -> None:
    """A service has no terminal, and a server that is started from one would wait there."""
    code = f"from jpaged.server import *; bound(ServerConfig(models=['tiny'], port=0, **{certificate!r}))"
    command = [sys.executable, "-c", code]
    child = subprocess.run(
        command, stdin=subprocess.DEVNULL, start_new_session=True, capture_output=True, text=True, check=False
    )
    assert "pass phrase" not in child.stderr
    assert "for a key that is encrypted, --ssl-keyfile-password" in child.stderr
