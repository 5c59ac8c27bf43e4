"""`DoorWorker`: a door in a process of its own, for bodies that could stop everything else while they are read.

Those are large ones, since Python's JSON decoder holds the interpreter's lock until it is done (half a second for
27 MB of token ids), and those with a chat template of their own, which may take any time and memory. The process has
limits on both.
"""

import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, NamedTuple

from jpaged.server.api_error import ApiError
from jpaged.server.body import ClientLeftError
from jpaged.server.parameters import Endpoint, Limits
from jpaged.tokenizer import Tokenizer

_START_S: Final = 60.0
_END_S: Final = 5.0
_TOO_MUCH_MEMORY: Final = "reading the request takes too much memory; make it smaller"
_MORE_BYTES: Final = 4 * 2**30  # of address space, for what it reads


class _Running(NamedTuple):
    """The process, and the link to it."""

    process: BaseProcess
    link: Connection

    def end(self) -> None:
        self.link.close()
        self.process.kill()
        self.process.join()
        self.process.close()


class DoorWorker:
    """Runs one call at a time. Started by the first one, and again after one that took too long or was given up.

    Args:
      tokenizer, limits: see `Door`.
      timeout_s: a call that takes longer is ended, with its process.
    """

    def __init__(self, tokenizer: Tokenizer | None, limits: Limits, *, timeout_s: float) -> None:
        # Now, and not when the process starts: a large vocabulary takes a while, in which nothing else runs.
        self._arguments = (pickle.dumps(tokenizer), limits)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # of what follows
        self._running: _Running | None = None
        self._killed: _Running | None = None  # for the call that it was killed under to clean up
        self._left: threading.Event | None = None  # of the call that runs

    def read(self, endpoint: Endpoint, body: bytes, left: threading.Event | None = None) -> Any:
        """As `Door.read`. Blocks; called by one thread at a time.

        Args:
          endpoint, body: see `Door.read`.
          left: this call's own, for `give_up`.

        Raises:
          ApiError: 400: it is refused, or takes too long or too much memory; 503: the process ended.
          ClientLeftError: it was given up.
        """
        left = threading.Event() if left is None else left
        with self._lock:
            self._left = left
        try:
            link = self._started(left)
            link.send(endpoint)
            link.send_bytes(body)
            if not link.poll(self._timeout_s):
                self.close()
                raise ApiError(400, f"reading the request takes longer than {self._timeout_s:g} s; make it smaller")
            answer = link.recv()
        except (EOFError, OSError):
            raise self._ended(left) from None
        finally:
            with self._lock:
                self._left = None
                killed, self._killed = self._killed, None
            if killed is not None:
                killed.end()
        if isinstance(answer, ApiError):
            raise answer
        return answer

    def give_up(self, left: threading.Event) -> None:
        """Nobody waits any more for the call that was or will be given `left`: it ends at once, whatever it is at.

        Does not block. The call is another thread's, which may be about to begin it, be starting the process for it,
        or have its answer already. The process is no longer there for the next call as soon as it is killed.
        """
        with self._lock:
            left.set()
            if self._left is left and self._running is not None:
                self._running.process.kill()
                self._killed, self._running = self._running, None

    def _started(self, left: threading.Event) -> Connection:
        with self._lock:  # whoever gives up before sees no process to kill, and whoever does later kills it
            if left.is_set():
                raise ClientLeftError
            running = self._running
        if running is not None and running.process.is_alive():
            return running.link
        self.close()
        context = multiprocessing.get_context("spawn")  # a fork would copy the locks of the server's threads
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, *self._arguments), daemon=True, name="door")
        process.start()
        theirs.close()
        with self._lock:
            self._running = _Running(process, ours)
        if left.is_set():
            self.close()
            raise ClientLeftError
        if not ours.poll(_START_S):
            self.close()
            raise ApiError(503, "the process that reads large requests does not start", retry_after_s=5)
        ours.recv()
        return ours

    def _ended(self, left: threading.Event) -> Exception:
        """What is told of a process that ended while it read; without memory the tokenizer, in Rust, aborts."""
        running, aborted = self._taken(), False
        if running is not None:
            running.process.join(_END_S)
            aborted = running.process.exitcode == -signal.SIGABRT
            running.end()
        if left.is_set():
            return ClientLeftError()
        if aborted:
            return ApiError(400, _TOO_MUCH_MEMORY)
        return ApiError(503, "the process that reads large requests ended; try again", retry_after_s=1)

    def _taken(self) -> _Running | None:
        """The process, which is no longer this object's: nobody else ends it."""
        with self._lock:
            running, self._running = self._running, None
        return running

    def close(self) -> None:
        """Ends the process."""
        running = self._taken()
        if running is not None:
            running.end()


def _serve(link: Connection, tokenizer: bytes, limits: Limits) -> None:
    """The process's whole life: reads until the other side closes."""
    from jpaged.server.door import Door

    for name in (signal.SIGINT, signal.SIGTERM):  # they are for the server, which ends this process last
        signal.signal(name, signal.SIG_IGN)
    try:
        door = Door(pickle.loads(tokenizer), limits)
        _limit_memory()
        link.send("ready")
        while True:
            endpoint, body = link.recv(), link.recv_bytes()
            link.send(_answer(door.read, endpoint, body))
            del body
    except (EOFError, OSError):
        return


def _limit_memory() -> None:
    import resource

    statm = Path("/proc/self/statm")
    if not statm.exists():  # not Linux: there is no way to tell what it uses already
        return
    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + _MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _answer(read: Callable[[Endpoint, bytes], Any], endpoint: Endpoint, body: bytes) -> Any:
    try:
        return read(endpoint, body)
    except ApiError as error:
        return error
    except MemoryError:
        return ApiError(400, _TOO_MUCH_MEMORY)
    except Exception as error:  # this process has no log: the kind of fault must do
        return ApiError(500, f"reading the request failed: {type(error).__name__}")
