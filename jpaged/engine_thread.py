"""`EngineThread`: an engine in a thread of this process, for `AsyncEngine`."""

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from jpaged.engine_loop import EngineLoop, ServedEngine
from jpaged.engine_messages import Close, Command, Dead, Event
from jpaged.errors import EngineFailedError
from jpaged.restarts import RestartPolicy

logger = logging.getLogger(__name__)


class EngineThread:
    """The port to an engine that is at hand: notebooks, training loops, tests.

    Args:
      engine: nobody else may call it until the port is closed; then it is idle, and the caller's again.
      restarts: of the engine, after failed steps.
    """

    def __init__(self, engine: ServedEngine, *, restarts: RestartPolicy | None = None) -> None:
        self._engine = engine
        self._restarts = restarts
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def open(self, receive: Callable[[list[Event]], None]) -> None:
        """Starts the thread."""
        events = asyncio.get_running_loop()

        def emit(batch: list[Event]) -> None:
            try:
                events.call_soon_threadsafe(receive, batch)
            except RuntimeError:  # the event loop was closed, and nobody said so
                self._commands.put(Close())

        def run() -> None:
            try:
                EngineLoop(self._engine, self._commands, emit, self._restarts).run()
            except EngineFailedError as error:
                emit([Dead(str(error))])
            except BaseException as error:  # or the thread would end, and nobody be told
                emit([Dead(f"the engine's thread ended at a {type(error).__name__}")])
                raise

        self._thread = threading.Thread(target=run, name="jpaged-engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._commands.put(command)

    async def close(self) -> None:
        """Waits until the step in progress is done."""
        if self._thread is not None:
            self._commands.put(Close())
            await asyncio.to_thread(self._thread.join)
