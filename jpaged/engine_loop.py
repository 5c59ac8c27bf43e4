"""`EngineLoop`: runs an engine in its own thread or process: commands in between two steps, events out after each."""

import logging
import math
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol

from jpaged.delta import StreamNews
from jpaged.engine_client import EngineInfo, EngineReport, PauseMode, PoolPicture
from jpaged.engine_messages import (
    Abort,
    Add,
    Advanced,
    Answer,
    Ask,
    Begun,
    Close,
    Command,
    Done,
    Ended,
    Event,
    Failing,
    Ready,
    Refused,
    Resync,
    Taken,
)
from jpaged.errors import EngineFailedError, JpagedError, RequestError
from jpaged.request import Output, SamplingParams
from jpaged.request_metrics import RequestMetrics
from jpaged.restarts import RestartBudget, RestartPolicy
from jpaged.stats import EngineStats

logger = logging.getLogger(__name__)


class ServedEngine(Protocol):
    """What the loop needs of an `Engine`."""

    info: EngineInfo
    metrics: RequestMetrics

    @property
    def has_work(self) -> bool: ...
    def add(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool | Literal["deltas"] = False,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_s: float | None = None,
    ) -> str: ...
    def abort(self, request_id: str) -> Output | None: ...
    def step(self) -> list[Output]: ...
    def take_news(self) -> StreamNews: ...
    def restart(self) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def stats(self) -> EngineStats: ...
    def picture(self) -> PoolPicture: ...


def failure_of(error: BaseException) -> str:
    """An error in one short line that may leave the process: errors of steps and of loading know no prompts."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


class Deadline:
    """What a thread does that must end some time; another one looks whether it does.

    Args:
      limit_s: for whatever has no limit of its own.

    Example:
      >>> deadline = Deadline(300.0)
      >>> with deadline.of("loading", limit_s=0.0):
      ...     deadline.missed
      'loading did not end within 0 s'
      >>> deadline.missed
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._current: tuple[str, float, float] | None = None

    @contextmanager
    def of(self, what: str, limit_s: float | None = None) -> Iterator[None]:
        """Counts the time while the block runs; not what it waits for in the blocks around it."""
        limit_s = self._limit_s if limit_s is None else limit_s
        before, self._current = self._current, (what, limit_s, time.monotonic() + limit_s)
        try:
            yield
        finally:
            self._current = before

    @property
    def missed(self) -> str | None:
        """What has not ended in time, in a sentence."""
        current = self._current
        if current is None or time.monotonic() < current[2]:
            return None
        return f"{current[0]} did not end within {current[1]:g} s"


class EngineLoop:
    """Serves the commands of one client.

    Whatever fails outside of single requests (a step, first of all) loses all requests and restarts the engine in
    place. From then on commands are dropped until the client says `Resync`: those sent before it knew are about
    requests that it has given up.

    Args:
      engine: nobody else may call it while the loop runs.
      commands: from the client.
      emit: takes the events of a step, at once, in the loop's thread.
      policy: restarts of the engine.
      deadline: told of each step, command and restart, for a watchdog.
    """

    def __init__(
        self,
        engine: ServedEngine,
        commands: "SimpleQueue[Command]",
        emit: Callable[[list[Event]], None],
        policy: RestartPolicy | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        self._engine = engine
        self._commands = commands
        self._emit = emit
        self._budget = RestartBudget(policy or RestartPolicy())
        self._events: list[Event] = []
        self._names: dict[int, str] = {}  # request ids by the client's numbers
        self._numbers: dict[str, int] = {}
        self._streaming: set[int] = set()
        self._held: dict[int, Add] = {}  # came while live requests are served to their end, before a pause
        self._paused = False
        self._pause_due: tuple[int, bool] | None = None  # the question to answer once they are, and `clear_cache`
        self._deaf = False
        self._closed = False
        self._deadline = deadline or Deadline(math.inf)

    def run(self) -> None:
        """Serves until the client says `Close`.

        Raises:
          EngineFailedError: the engine failed more often than it may restart, or could not.
        """
        self._emit([Ready(self._engine.info)])
        while not self._closed:
            failure = self._turn()
            if failure is not None:  # the exception is gone: its traceback would keep the old page pool alive
                self._restart(failure)

    def _turn(self) -> str | None:
        """Takes all commands that are there and does one step; why it failed, if it did."""
        try:
            first = None if self._steps or self._events else self._commands.get()  # may wait for ever
            with self._deadline.of("a command"):
                self._take_commands(first)
            with self._deadline.of("a step"):
                if self._steps:
                    self._tell(self._engine.step())
                    self._pause_if_due()
                if self._events:
                    events, self._events = self._events, []
                    self._emit(events)
            return None
        except Exception as error:
            logger.exception("the engine failed; all its requests are lost")
            return failure_of(error)

    @property
    def _steps(self) -> bool:
        return self._engine.has_work and not self._paused and not self._closed

    def _restart(self, failure: str) -> None:
        while True:
            self._names.clear()
            self._numbers.clear()
            self._streaming.clear()
            self._held.clear()
            self._paused, self._pause_due, self._deaf = False, None, True
            events, self._events = self._events, []  # of what was done before the failure
            self._emit([*events, Failing(failure)])
            if not self._budget.take():
                raise EngineFailedError(f"the engine failed too often; the last time: {failure}")
            try:
                with self._deadline.of("a restart"):
                    self._engine.restart()
                break
            except Exception as error:
                logger.exception("the engine could not be restarted")
                failure = failure_of(error)
        logger.warning("the engine was restarted after: %s", failure)
        self._emit([Ready(self._engine.info)])

    # ------------------------------------------------------------------------------------------ commands

    def _take_commands(self, first: Command | None) -> None:
        if first is not None:
            self._take(first)
        while not self._closed:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            self._take(command)

    def _take(self, command: Command) -> None:
        match command:
            case Close():
                self._closed = True
                for name in list(self._numbers):  # the engine may be somebody's who goes on with it
                    self._engine.abort(name)
                self._engine.take_news()
                self._events.clear()
            case Resync():
                self._deaf = False
            case _ if self._deaf:
                pass
            case Add():
                self._add(command)
            case Abort():
                self._abort(command.numbers)
            case Ask():
                self._ask(command)

    def _add(self, command: Add) -> None:
        if self._pause_due is not None:
            self._held[command.number] = command
            return
        try:
            self._engine.add(
                command.prompt,
                command.params,
                request_id=command.request_id,
                stream="deltas" if command.stream else False,
                priority=command.priority,
                cache_salt=command.cache_salt,
                arrival_s=command.arrival_s,
            )
        except Exception as error:
            self._events.append(self._refusal(command.number, error))
            return
        self._names[command.number] = command.request_id
        self._numbers[command.request_id] = command.number
        if command.stream:
            self._streaming.add(command.number)
        self._events.append(Taken(command.number))

    def _refusal(self, number: int, error: Exception) -> Refused:
        if isinstance(error, RequestError):
            return Refused(number, type(error).__name__, str(error))
        if isinstance(error, JpagedError):
            return Refused(number, "JpagedError", str(error))
        # Its message may quote a prompt: neither the client nor the log get it.
        logger.error("an internal error (%s) refused a command; others go on", type(error).__name__)
        return Refused(number, "JpagedError", f"an internal error ({type(error).__name__}); the engine goes on")

    def _abort(self, numbers: tuple[int, ...]) -> None:
        outputs = []
        for number in numbers:
            if (held := self._held.pop(number, None)) is not None:
                due, self._pause_due = self._pause_due, None
                self._add(held)
                self._pause_due = due
            name = self._names.get(number)
            if name is not None and (output := self._engine.abort(name)) is not None:
                outputs.append(output)
        self._tell(outputs)
        self._pause_if_due()

    def _ask(self, command: Ask) -> None:
        try:
            match command.what:
                case "pause":
                    self._pause(command.number, *command.arguments)
                    return  # the answer may take its time
                case "resume":
                    value = self._resume()
                case "report":
                    value = self._report(*command.arguments)
                case "picture":
                    value = self._engine.picture()
                case "reset_prefix_cache":
                    value = self._engine.reset_prefix_cache()
                case "call":
                    value = self._call(*command.arguments)
        except Exception as error:
            self._events.append(self._refusal(command.number, error))
        else:
            self._events.append(Answer(command.number, value))

    def _call(self, function: Callable[[ServedEngine], Any] | bytes, limit_s: float | None) -> Any:
        with self._deadline.of("a call", limit_s):
            return (pickle.loads(function) if isinstance(function, bytes) else function)(self._engine)

    def _report(self, num_restarts: int) -> EngineReport:
        metrics = self._engine.metrics
        return EngineReport(
            stats=self._engine.stats(),
            histograms=metrics.histograms(),
            finished=dict(metrics.finished),
            num_prompt_tokens=metrics.num_prompt_tokens,
            num_cached_prompt_tokens=metrics.num_cached_tokens,
            num_refused=metrics.num_refused,
            num_restarts=num_restarts,
            is_paused=self._paused,
        )

    # ------------------------------------------------------------------------------------------ pause

    def _pause(self, number: int, mode: PauseMode, clear_cache: bool) -> None:
        if self._pause_due is not None:
            raise RequestError("the engine is about to be paused; wait for that, or resume it first")
        if mode == "abort":
            self._abort(tuple(self._names))
        if mode == "wait":
            self._paused = False  # those that were frozen before are served too
        self._pause_due = (number, clear_cache)
        if mode == "keep":
            self._pause_now()
        self._pause_if_due()

    def _pause_if_due(self) -> None:
        if self._pause_due is not None and not self._engine.has_work:
            self._pause_now()

    def _pause_now(self) -> None:
        assert self._pause_due is not None
        number, clear_cache = self._pause_due
        self._paused = True
        if clear_cache:
            self._engine.reset_prefix_cache()
        self._events.append(Answer(number, None))
        self._take_held()

    def _resume(self) -> None:
        if self._pause_due is not None:
            self._events.append(Refused(self._pause_due[0], "RequestError", "the engine was resumed before it paused"))
        self._paused = False
        self._take_held()

    def _take_held(self) -> None:
        held, self._held, self._pause_due = self._held, {}, None
        for command in held.values():
            self._add(command)

    # ------------------------------------------------------------------------------------------ events

    def _tell(self, outputs: list[Output]) -> None:
        """What the engine gave out since the last call."""
        news, numbers = self._engine.take_news(), self._numbers
        for start in news.starts:
            self._events.append(Begun(numbers[start.request_id], *start[1:]))
        if news.deltas:
            self._events.append(Advanced([(numbers[name], *delta) for name, delta in news.deltas]))
        for output in outputs:
            number = numbers.pop(output.request_id)
            del self._names[number]
            if number not in self._streaming:
                self._events.append(Done(number, output))
                continue
            self._streaming.remove(number)
            about = (output.num_cached_tokens, output.num_preemptions, output.error, output.timing)
            self._events.append(Ended(number, *about))
