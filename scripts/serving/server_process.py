"""`ServerProcess`: a server that a script starts, waits for, and stops."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from jpaged.errors import ConfigError

_STOP_S = 60.0
_POLL_S = 0.1
_LAST_LINES = 15
_UNEXPECTED = ("error", "critical")
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class ServerProcess:
    """A server that runs.

    Attributes:
      process: its root.
      url: where.
      log: its output, both streams.
    """

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def faults(self) -> list[str]:
        """Lines of the log that tell of an error, an exception or a Python warning."""
        return [line for line in self.log.read_text("utf-8", "replace").splitlines() if is_fault(line)]

    def stop(self) -> int:
        """Ends it by SIGTERM, as a supervisor does; by SIGKILL if it does not end. Returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()


def is_fault(line: str) -> bool:
    """Whether a line of a server's log tells of an error or an exception.

    Example:
      >>> is_fault('{"level": "info", "message": "no error"}'), is_fault("Traceback (most recent call last):")
      (False, True)
      >>> is_fault('{"level": "warning", "message": "x", "exception": "ValueError"}')
      True
    """
    if line.startswith("{"):
        try:
            fields = json.loads(line)
        except ValueError:
            return True
        warned = fields.get("logger") == "py.warnings"
        return fields.get("level") in _UNEXPECTED or "exception" in fields or warned
    return any(word in line.lower() for word in ("traceback (", "error:", "exception", "warning:", "never awaited"))


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def spawned(command: str, url: str, log: Path, *, start_s: float = 600.0) -> Iterator[ServerProcess]:
    """A server while the block runs; ready when it begins.

    Args:
      command: as a shell would split it; "python" is this Python.
      url: where it will be; `/health` answers with 200 when it is ready.
      log: a file for its output.
      start_s: for it to be ready.

    Raises:
      ConfigError: it ends, or is not ready in time; the message has the last lines of its output.
    """
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    paths = [f"{_ROOT}", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if _is_ready(url):
        raise ConfigError(f"something answers at {url} already; end it, or choose another port")
    with open(log, "wb") as output:
        try:
            process = subprocess.Popen(
                words, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        except OSError as error:
            raise ConfigError(f"{words[0]!r} cannot be started: {error.strerror}") from None
    server = ServerProcess(process, url.rstrip("/"), log)
    try:
        end_s = time.monotonic() + start_s
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > end_s:
                what = "is not ready" if process.returncode is None else f"ended with status {process.returncode}"
                last = "\n".join(log.read_text("utf-8", "replace").splitlines()[-_LAST_LINES:])
                raise ConfigError(f"the server {what}; its last words are:\n{last}")
            time.sleep(_POLL_S)
        yield server
    finally:
        if process.poll() is None:
            server.stop()


def _is_ready(url: str) -> bool:
    try:
        with build_opener(ProxyHandler({})).open(f"{url.rstrip('/')}/health", timeout=5) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False
