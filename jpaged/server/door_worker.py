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
from typing import Any, Final

from jpaged.server.api_error import ApiError
from jpaged.server.parameters import Endpoint, Limits
from jpaged.tokenizer import Tokenizer

_START_S: Final = 60.0
_END_S: Final = 5.0
_TOO_MUCH_MEMORY: Final = "reading the request takes too much memory; make it smaller"
_MORE_BYTES: Final = 4 * 2**30  # of address space, for what it reads


class DoorWorker:
    """Runs one call at a time. Started by the first one, and again after one that took too long.

    Args:
      tokenizer, limits: see `Door`.
      timeout_s: a call that takes longer is ended, with its process.
    """

    def __init__(self, tokenizer: Tokenizer | None, limits: Limits, *, timeout_s: float) -> None:
        # Now, and not when the process starts: a large vocabulary takes a while, in which nothing else runs.
        self._arguments = (pickle.dumps(tokenizer), limits)
        self._timeout_s = timeout_s
        self._process: BaseProcess | None = None
        self._link: Connection | None = None
        self._lock = threading.Lock()  # of the process, and of whose body it reads
        self._body: bytes | None = None

    def read(self, endpoint: Endpoint, body: bytes) -> Any:
        """As `Door.read`. Blocks; called by one thread at a time.

        Raises:
          ApiError: 400: it is refused, or takes too long or too much memory; 503: the process ended.
        """
        with self._lock:
            self._body = body
        try:
            link = self._started()
            link.send(endpoint)
            link.send_bytes(body)
            if not link.poll(self._timeout_s):
                self.close()
                raise ApiError(400, f"reading the request takes longer than {self._timeout_s:g} s; make it smaller")
            answer = link.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        finally:
            with self._lock:
                self._body = None
        if isinstance(answer, ApiError):
            raise answer
        return answer

    def give_up(self, body: bytes) -> None:
        """Nobody waits for this very body any more: if it is being read, in another thread, `read` ends at once."""
        with self._lock:
            if self._body is body and self._process is not None:
                self._process.kill()

    def _started(self) -> Connection:
        if self._process is not None and self._process.is_alive() and self._link is not None:
            return self._link
        self.close()
        context = multiprocessing.get_context("spawn")  # a fork would copy the locks of the server's threads
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, *self._arguments), daemon=True, name="door")
        process.start()
        theirs.close()
        with self._lock:
            self._process, self._link = process, ours
        if not ours.poll(_START_S):
            self.close()
            raise ApiError(503, "the process that reads large requests does not start", retry_after_s=5)
        ours.recv()
        return ours

    def _ended(self) -> ApiError:
        """What is told of a process that ended while it read; without memory the tokenizer, in Rust, aborts."""
        aborted = False
        if self._process is not None:
            self._process.join(_END_S)
            aborted = self._process.exitcode == -signal.SIGABRT
        self.close()
        if aborted:
            return ApiError(400, _TOO_MUCH_MEMORY)
        return ApiError(503, "the process that reads large requests ended; try again", retry_after_s=1)

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            process, link, self._process, self._link = self._process, self._link, None, None
        if link is not None:
            link.close()
        if process is not None:
            process.kill()
            process.join()
            process.close()


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
