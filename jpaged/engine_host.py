"""What runs in the engine's process: `python -m jpaged.engine_host FD`, started by `EngineProcess`."""

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from queue import SimpleQueue
from typing import Any

from jpaged.engine_link import EngineLink
from jpaged.engine_loop import Deadline, EngineLoop, ServedEngine, failure_of
from jpaged.engine_messages import Answer, Boot, Close, Command, Dead, Event, Failing, Refused
from jpaged.errors import EngineFailedError, JpagedError

logger = logging.getLogger(__name__)

FAILED_TO_START = 3
FAILED = 4
ORPHANED = 5
HUNG = 6
_LAST_WORDS_S = 2.0
_M_ARENA_MAX = -8  # of malloc.h
_YOUNG_OBJECTS = 5_000  # more than have gone when the next collection of the youngest begins; Python: 700


def main(descriptor: int) -> int:
    """Makes the engine that the first message asks for, and serves until it is told to close; the exit status.

    The client's process decides when this one ends: a SIGTERM or Ctrl-C that goes to the whole group, as systemd and
    terminals send it, must not cut off requests that the client still drains. If the client is gone, this process ends
    at once, from whatever it does.
    """
    limit_arenas()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = EngineLink(socket.socket(fileno=descriptor))
    messages = link.messages()
    boot: Boot | None = next(messages, None)
    if boot is None:  # the client ended before it could say what to serve
        return ORPHANED
    commands: SimpleQueue[Command] = SimpleQueue()
    threading.Thread(target=_read, args=(messages, commands), name="jpaged-link-reader", daemon=True).start()
    deadline = Deadline(boot.hang_s)
    threading.Thread(target=_watch, args=(deadline, link, boot), name="jpaged-watchdog", daemon=True).start()
    try:
        with deadline.of("making the engine", boot.load_s):
            if boot.prepare is not None:
                call(boot.prepare, boot.prepare_options)
            engine: ServedEngine = call(boot.maker, boot.options)
    except Exception as error:
        if not isinstance(error, JpagedError):
            logger.exception("the engine could not be made")
        known = isinstance(error, JpagedError)
        dead = Dead(str(error) if known else failure_of(error))
        if known and type(error).__module__ == JpagedError.__module__:  # else the client does not know it
            dead = dead._replace(kind=type(error).__name__)
        link.send([dead])
        link.close()
        return FAILED_TO_START
    freeze_objects()
    try:
        EngineLoop(engine, commands, lambda events: link.send(_sendable(events)), boot.restarts, deadline).run()
    except EngineFailedError as error:
        logger.error("%s", error)
        link.close()
        return FAILED
    link.close()
    return 0


def call(name: str, options: Mapping[str, Any]) -> Any:
    """Calls "module:function" with the options.

    Example:
      >>> call("builtins:dict", {"a": 1})
      {'a': 1}
    """
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)(**options)


def limit_arenas() -> None:
    """Keeps glibc's malloc to one arena, unless MALLOC_ARENA_MAX says otherwise; call it before threads are started.

    Each thread would take memory from one of its own, where what others have freed does not help it: a process of
    twenty threads goes on growing for hours, though it holds no more.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        if "MALLOC_ARENA_MAX" not in os.environ:
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def freeze_objects() -> None:
    """Leaves what is there now out of all garbage collections to come: it lives as long as the process.

    Else each full collection would look at hundreds of thousands of objects, and Python begins one only when a quarter
    as many are new: what requests leave behind would pile up until then.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # counts what is left, which decides when the next one comes
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)  # loading and compiling have freed a good part of what they took


def collect_seldom() -> None:
    """Makes garbage collections several times as rare, for a process that has thousands of requests at once.

    Each of them holds hundreds of objects while it waits. A thousand that begin together would start several full
    collections, each of which looks at all of them while nothing else runs; and nearly nothing is in cycles.
    """
    gc.set_threshold(_YOUNG_OBJECTS)


def _read(messages: Iterator[Any], commands: "SimpleQueue[Command]") -> None:
    command = None
    try:
        for command in messages:
            commands.put(command)
    finally:
        if not isinstance(command, Close):
            os._exit(ORPHANED)  # whatever the main thread is in: a step, a compile, loading weights


def _watch(deadline: Deadline, link: EngineLink, boot: Boot) -> None:
    """Ends the process when something does not end: a device that hangs raises nothing. Gives signs of life."""
    while (failure := deadline.missed) is None:
        link.greet()
        time.sleep(min(boot.hang_s / 4, boot.load_s / 4, 1.0))
    logger.error("%s", failure)
    # A client that does not read, or whatever the main thread holds, must not keep this process alive.
    telling = threading.Thread(target=_tell, args=(link, failure), daemon=True)
    telling.start()
    telling.join(_LAST_WORDS_S)
    os._exit(HUNG)


def _tell(link: EngineLink, failure: str) -> None:
    link.send([Failing(failure)])
    link.close()


def _sendable(events: list[Event]) -> list[Event]:
    """Answers are values of any kind (`AsyncEngine.call`), which may not pickle."""
    for index, event in enumerate(events):
        if isinstance(event, Answer):
            try:
                pickle.dumps(event)
            except Exception as error:
                why = f"the answer cannot be sent to this process: {failure_of(error)}"
                events[index] = Refused(event.number, "JpagedError", why)
    return events


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
