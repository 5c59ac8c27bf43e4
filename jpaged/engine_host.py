"""What runs in the engine's process: `python -m jpaged.engine_host FD`, started by `EngineProcess`."""

import importlib
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

from jpaged.engine_link import EngineLink
from jpaged.engine_loop import EngineLoop, ServedEngine, failure_of
from jpaged.engine_messages import Answer, Boot, Close, Command, Dead, Event, Failing, Refused
from jpaged.errors import EngineFailedError, JpagedError

logger = logging.getLogger(__name__)

FAILED_TO_START = 3
FAILED = 4
ORPHANED = 5
HUNG = 6


def main(descriptor: int) -> int:
    """Makes the engine that the first message asks for, and serves until it is told to close; the exit status.

    The client's process decides when this one ends: a SIGTERM or Ctrl-C that goes to the whole group, as systemd and
    terminals send it, must not cut off requests that the client still drains. If the client is gone, this process ends
    at once, from whatever it does.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = EngineLink(socket.socket(fileno=descriptor))
    messages = link.messages()
    boot: Boot = next(messages)
    commands: SimpleQueue[Command] = SimpleQueue()
    threading.Thread(target=_read, args=(messages, commands), name="jpaged-link-reader", daemon=True).start()
    try:
        engine = make_engine(boot)
    except Exception as error:
        if not isinstance(error, JpagedError):
            logger.exception("the engine could not be made")
        link.send([Dead(str(error) if isinstance(error, JpagedError) else failure_of(error))])
        link.close()
        return FAILED_TO_START
    loop = EngineLoop(engine, commands, lambda events: link.send(_sendable(events)), boot.restarts)
    threading.Thread(target=_watch, args=(loop, link, boot.hang_s), name="jpaged-watchdog", daemon=True).start()
    try:
        loop.run()
    except EngineFailedError as error:
        logger.error("%s", error)
        link.close()
        return FAILED
    link.close()
    return 0


def make_engine(boot: Boot) -> ServedEngine:
    """Calls `module:function` with the options."""
    module, _, name = boot.maker.partition(":")
    return getattr(importlib.import_module(module), name)(**boot.options)


def _read(messages: Iterator[Any], commands: "SimpleQueue[Command]") -> None:
    command = None
    try:
        for command in messages:
            commands.put(command)
    finally:
        if not isinstance(command, Close):
            os._exit(ORPHANED)  # whatever the main thread is in: a step, a compile, loading weights


def _watch(loop: EngineLoop, link: EngineLink, hang_s: float) -> None:
    """Ends the process when a step does not end: a device that hangs raises nothing."""
    while True:
        since = loop.busy_since
        now = time.monotonic()
        if since is not None and now - since >= hang_s:
            failure = f"a step did not end within {hang_s:g} s"
            logger.error("%s", failure)
            link.send([Failing(failure)])
            link.close()
            os._exit(HUNG)
        time.sleep(min(hang_s / 4, 1.0))


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
