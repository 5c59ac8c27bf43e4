"""Listening: what connections inherit."""

import socket

from jpaged.server import ServerConfig
from jpaged.server.run import _listen


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """Without TCP_NODELAY the second write of an answer waits 40 ms."""
    with (
        _listen(ServerConfig(models=("tiny",), port=0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
