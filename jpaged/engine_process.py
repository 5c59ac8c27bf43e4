"""`EngineProcess`: an engine in a process of its own, for `AsyncEngine`. This process never imports jax."""

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jpaged.engine_link import ClientLink
from jpaged.engine_messages import Ask, Boot, Close, Command, Dead, Event, Failing, Ready
from jpaged.restarts import RestartBudget, RestartPolicy

logger = logging.getLogger(__name__)

_LOOKS = 8  # for signs of life, until a process counts as dead


@dataclass(frozen=True, kw_only=True)
class EngineRecipe:
    """How the process makes its engine.

    Attributes:
      maker: "module:function", imported there; the function gives an `Engine`.
      options: its keyword arguments; they must pickle.
      prepare: likewise, a function that is called before anything else there, as to set up its log; `None`: none.
      prepare_options: its keyword arguments.
    """

    maker: str = "jpaged.llm:make_engine"
    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: str | None = None
    prepare_options: Mapping[str, Any] = field(default_factory=dict)


class EngineProcess:
    """The port to an engine that may crash, hang or be killed without harm to this process.

    The engine's process restarts its engine in place after failed steps; when that does not help, or the process dies,
    a new one is started, which also gives back all memory of the device.

    Args:
      recipe: what to serve.
      restarts: new processes, after the first one was ready once.
      engine_restarts: restarts in place, within one process.
      hang_s: a step with what it compiles, a command, or a restart in place that takes longer counts as a crash; a call
        (`AsyncEngine.call`) may have a limit of its own.
      load_s: likewise for making the engine: loading weights, compiling.
      silence_s: a process that gives no sign of life for so long is killed: it is stopped, or hangs in what lets none
        of its threads run. Its own watchdog, which minds `hang_s`, gives the signs.
      stop_s: the process is killed if it takes longer to end than this.
      retry_s: pause before the first new process in a row; it doubles with each.
    """

    def __init__(
        self,
        recipe: EngineRecipe,
        *,
        restarts: RestartPolicy | None = None,
        engine_restarts: RestartPolicy | None = None,
        hang_s: float = 300.0,
        load_s: float = 1800.0,
        silence_s: float = 60.0,
        stop_s: float = 10.0,
        retry_s: float = 0.5,
    ) -> None:
        self._boot = Boot(
            prepare=recipe.prepare,
            prepare_options=dict(recipe.prepare_options),
            maker=recipe.maker,
            options=dict(recipe.options),
            restarts=engine_restarts or RestartPolicy(),
            hang_s=hang_s,
            load_s=load_s,
        )
        self._budget = RestartBudget(restarts or RestartPolicy())
        self._silence_s = silence_s
        self._stop_s = stop_s
        self._retry_s = retry_s
        self._receive: Callable[[list[Event]], None] = lambda events: None
        self._process: subprocess.Popen | None = None
        self._link: ClientLink | None = None
        self._gone = asyncio.Event()  # the link to the present process is lost
        self._failure: str | None = None  # what the process said last of why it fails
        self._kind = "EngineFailedError"  # the error's, if the engine could not be made
        self._is_ready = False  # the present process was
        self._num_silent = 0  # looks in a row that found no sign of life of it
        self._has_spoken = False  # the present process has; before, it starts Python
        self._watcher: asyncio.Task[None] | None = None

    @property
    def process_id(self) -> int | None:
        """Of the engine's process, while there is one."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    async def open(self, receive: Callable[[list[Event]], None]) -> None:
        """Starts the process; loading and compiling go on when this returns."""
        self._receive = receive
        await self._start()
        self._watcher = asyncio.create_task(self._watch(), name="jpaged-engine-process")

    def send(self, command: Command) -> None:
        """As `EnginePort.send`; what does not pickle raises."""
        if isinstance(command, Ask) and command.what == "call":  # what the process cannot import is this call's fault
            function, *others = command.arguments
            command = command._replace(arguments=(pickle.dumps(function), *others))
        if self._link is not None:
            self._link.send(command)

    async def close(self) -> None:
        """Lets the process end, or kills it after `stop_s`; at once if it is still making its engine."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        if self._process is not None:
            self.send(Close())
            await asyncio.to_thread(self._reap, self._stop_s if self._is_ready else 0.0)
        if self._link is not None:
            self._link.close()

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "jpaged.engine_host", f"{theirs.fileno()}"],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                )
            except OSError:
                ours.close()
                raise
        self._gone, self._failure, self._is_ready = asyncio.Event(), None, False
        self._num_silent, self._has_spoken = 0, False
        self._link = ClientLink(self._take, self._gone.set)
        await asyncio.get_running_loop().create_connection(lambda: self._link, sock=ours)  # type: ignore[arg-type]
        self._link.send(self._boot)

    def _take(self, events: list[Event]) -> None:
        self._num_silent, self._has_spoken = 0, True
        if not events:  # a sign of life
            return
        for event in events:
            if isinstance(event, Failing):
                self._failure = event.failure
            elif isinstance(event, Dead):
                self._failure, self._kind = event
            elif isinstance(event, Ready):
                self._is_ready, self._failure = True, None
        if not isinstance(events[0], Dead):  # whether it is dead is said here
            self._receive(events)

    async def _watch(self) -> None:
        """Waits for the end of the process, and starts the next one."""
        was_ready, wait_s = False, self._retry_s
        while True:
            await self._end_of_process()
            if self._is_ready:
                was_ready, wait_s = True, self._retry_s
            if was_ready:  # those who wait are told at once, before it is known how the process ended
                self._receive([Failing(self._failure or "the engine's process ended")])
            ending = await asyncio.to_thread(self._reap, 5.0)
            failure = self._failure or f"the engine's process {ending}"
            logger.error("the engine's process %s%s", ending, f", after: {self._failure}" if self._failure else "")
            if not was_ready or not self._budget.take():
                self._receive([Dead(failure) if was_ready else Dead(failure, self._kind)])
                return
            self._receive([Failing(failure)])
            await asyncio.sleep(wait_s)
            wait_s *= 2
            try:
                await self._start()
            except OSError as error:  # no memory, no descriptors: `_gone` is still set, so the next turn tries again
                self._is_ready = False  # that was the last process; the pause goes on doubling
                self._failure = f"a new process cannot be started: {error.strerror or type(error).__name__}"

    async def _end_of_process(self) -> None:
        """Waits for the end of the process, or kills it when it is silent."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._silence_s / _LOOKS):
                    await self._gone.wait()
                    return
            # Looks are counted, not seconds: this process may have been stopped itself, and has not read yet.
            self._num_silent += self._has_spoken
            if self._num_silent >= _LOOKS and self._process is not None:
                self._failure = self._failure or f"the engine's process gave no sign of life for {self._silence_s:g} s"
                self._process.kill()

    def _reap(self, timeout_s: float) -> str:
        """Waits for the end of the process, or kills it; says how it ended."""
        process = self._process
        assert process is not None
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"did not end within {timeout_s:g} s and was killed"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"
