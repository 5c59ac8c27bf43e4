"""`HealthWatch`: how long `/health` takes while something else goes on, asked by a process that does nothing else."""

import http.client
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from scripts.serving.measures import percentiles_ms

_PATIENCE_S = 120.0


class HealthWatch:
    """Asks again and again while the block runs.

    Args:
      url: of the server.
      interval_s: between an answer and the next question.

    Attributes:
      seconds: that each answer took.
      faults: answers other than 200, and connections that broke.
    """

    def __init__(self, url: str, *, interval_s: float = 0.02) -> None:
        self._place = urlsplit(url).netloc
        self._interval_s = interval_s
        self.seconds: list[float] = []
        self.faults: list[str] = []

    def __enter__(self) -> "HealthWatch":
        context = multiprocessing.get_context("spawn")
        self._link, theirs = context.Pipe()
        self._process = context.Process(target=_ask, args=(theirs, self._place, self._interval_s), daemon=True)
        self._process.start()
        theirs.close()
        if not self._link.poll(_PATIENCE_S):
            raise RuntimeError(f"the process that asks for /health did not start within {_PATIENCE_S:g} s")
        self._link.recv()
        return self

    def __exit__(self, *exception: object) -> None:
        self._link.send("end")
        if self._link.poll(_PATIENCE_S):
            self.seconds, self.faults = self._link.recv()
        self._link.close()
        self._process.join(_PATIENCE_S)

    def figures(self) -> dict[str, Any]:
        """In milliseconds; `None` for times if none came back."""
        return {"asked": len(self.seconds), "faults": self.faults[:5], "ms": percentiles_ms(self.seconds)}


def _ask(link: Connection, place: str, interval_s: float) -> None:
    """The process's whole life."""
    connection = http.client.HTTPConnection(place, timeout=_PATIENCE_S)
    seconds: list[float] = []
    faults: list[str] = []
    link.send("ready")
    while not link.poll(interval_s):
        begin_s = time.monotonic()
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            faults.append(f"{type(error).__name__}: {error}")
            continue
        seconds.append(time.monotonic() - begin_s)
        if answer.status != 200:
            faults.append(f"/health says {answer.status}")
    link.send((seconds, faults))
