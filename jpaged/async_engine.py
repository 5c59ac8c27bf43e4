"""`AsyncEngine`: the `EngineClient` of an engine in a thread (`EngineThread`) or in a process (`EngineProcess`)."""

import asyncio
import itertools
import math
import numbers
import time
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as AbstractSequence
from typing import Any, Protocol, get_args

from jpaged import errors
from jpaged.delta import Delta
from jpaged.engine_client import EngineInfo, EngineReport, EngineState, PauseMode, PoolPicture
from jpaged.engine_messages import (
    Abort,
    Add,
    Advanced,
    Answer,
    Ask,
    Begun,
    Command,
    Dead,
    Done,
    Ended,
    Event,
    Failing,
    Question,
    Ready,
    Refused,
    Resync,
    Taken,
)
from jpaged.errors import EngineFailedError, RequestError
from jpaged.intake import checked_name
from jpaged.request import Output, SamplingParams
from jpaged.request_stream import RequestStream


class EnginePort(Protocol):
    """The way to an engine. `receive` is called in the event loop."""

    async def open(self, receive: Callable[[list[Event]], None]) -> None:
        """Starts the engine; `Ready`, or `Dead`, comes when it can tell."""
        ...

    def send(self, command: Command) -> None:
        """Never waits; what cannot be sent any more is dropped, as the client is told by an event."""
        ...

    async def close(self) -> None:
        """Ends the engine, and waits for its end."""
        ...


class AsyncEngine:
    """An engine for asyncio code; see `EngineClient` for what it offers.

    Args:
      port: where the engine is.

    Example:
      >>> from flax import nnx
      >>> from jpaged import CacheConfig, Engine, EngineConfig
      >>> from jpaged.engine_thread import EngineThread
      >>> from jpaged.models import Llama, LlamaConfig
      >>> tiny = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
      ...                    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
      >>> engine = Engine(Llama(tiny, rngs=nnx.Rngs(0)), EngineConfig(cache=CacheConfig(num_pages=9)))
      >>> async def count_tokens():
      ...     async with AsyncEngine(EngineThread(engine)) as client:
      ...         stream = await client.stream([1, 2], SamplingParams(max_tokens=4, ignore_eos=True))
      ...         return sum([len(delta.token_ids) async for deltas in stream for delta in deltas])
      >>> asyncio.run(count_tokens())
      4
    """

    def __init__(self, port: EnginePort) -> None:
        self._port = port
        self._state: EngineState = "starting"
        self._failure: str | None = None
        self._info: EngineInfo | None = None
        self._is_paused = False
        self._num_restarts = 0
        self._serial = itertools.count()
        self._numbers: dict[str, int] = {}  # of live requests, by id
        self._names: dict[int, str] = {}
        self._streams: dict[int, RequestStream] = {}
        self._waiters: dict[int, asyncio.Future[Any]] = {}
        self._started: asyncio.Future[None] | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            Advanced: self._on_advanced,
            Begun: self._on_begun,
            Ended: self._on_ended,
            Taken: self._on_taken,
            Done: self._on_done,
            Refused: self._on_refused,
            Answer: lambda event: self._resolve(event.number, event.value),
            Ready: self._on_ready,
            Failing: self._on_failing,
            Dead: self._on_dead,
        }

    # ------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Starts the engine and waits until it is ready.

        Raises:
          JpagedError: it could not start: a ConfigError and the like, if that is why, else an EngineFailedError.
        """
        if self._started is not None:
            raise RuntimeError("this AsyncEngine was started before; make a new one")
        self._started = asyncio.get_running_loop().create_future()
        await self._port.open(self._receive)
        await self._started

    async def __aenter__(self) -> "AsyncEngine":
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all requests and the engine; its memory is given back. Idempotent."""
        if self._state == "closed":
            return
        self._state = "closed"
        self._fail_all("the engine was closed")
        await self._port.close()

    @property
    def info(self) -> EngineInfo:
        """What does not change. Raises EngineFailedError before the engine is ready for the first time."""
        if self._info is None:
            raise EngineFailedError(f"the engine is not ready yet (it is {self._state})")
        return self._info

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def alive(self) -> bool:
        """Whether new requests are taken."""
        return self._state == "ready"

    @property
    def failure(self) -> str | None:
        """Why it is restarting or dead."""
        return self._failure

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._numbers)

    # ------------------------------------------------------------------------------------------ requests

    async def generate(
        self,
        prompt: AbstractSequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_s: float | None = None,
    ) -> Output:
        """Serves a request to its end; see `EngineClient.generate`."""
        add = self._new(prompt, params, request_id, False, priority, cache_salt, arrival_s)
        return await self._send(add)

    async def stream(
        self,
        prompt: AbstractSequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_s: float | None = None,
    ) -> RequestStream:
        """Begins a request; see `EngineClient.stream`."""
        add = self._new(prompt, params, request_id, True, priority, cache_salt, arrival_s)
        stream = self._streams[add.number] = RequestStream(add.request_id, lambda: self._drop(add.number))
        await self._send(add)
        return stream

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """Ends requests at once, all if none are named; returns how many of them were live. Raises RequestError."""
        if isinstance(request_ids, str):
            raise RequestError(f"request_ids is {request_ids!r:.80}, expected a list of ids")
        given = self._numbers if request_ids is None else request_ids
        names = dict.fromkeys(checked_name("an entry of request_ids", name) for name in given)
        numbers = tuple(self._numbers[name] for name in names if name in self._numbers)
        if numbers:
            self._port.send(Abort(numbers))
        return len(numbers)

    def _new(self, prompt, params, request_id, stream, priority, cache_salt, arrival_s) -> Add:
        self._require_alive()
        if request_id is not None:
            checked_name("request_id", request_id)
        if request_id in self._numbers:
            raise RequestError(f"request {request_id!r:.80} is still being served: use another request_id")
        number = next(self._serial)
        name = request_id or next(name for name in (f"{number}", f"{number}-{id(self)}") if name not in self._numbers)
        add = Add(
            number=number,
            prompt=_token_array(prompt),
            params=SamplingParams() if params is None else params,
            request_id=name,
            stream=stream,
            priority=priority,
            cache_salt=cache_salt,
            arrival_s=time.monotonic() if arrival_s is None else arrival_s,
        )
        self._numbers[name], self._names[number] = number, name
        return add

    async def _send(self, command: Add | Ask) -> Any:
        """Sends a command and waits for what ends it; a task that is cancelled meanwhile ends its request."""
        waiter = self._waiters[command.number] = asyncio.get_running_loop().create_future()
        try:
            self._port.send(command)
            return await waiter
        except BaseException:
            self._drop(command.number)
            raise
        finally:
            self._waiters.pop(command.number, None)

    def _drop(self, number: int) -> None:
        """Nobody waits for this request any more."""
        if self._forget(number):
            self._port.send(Abort((number,)))

    def _forget(self, number: int) -> bool:
        """Whether the request was live until now."""
        self._streams.pop(number, None)
        name = self._names.pop(number, None)
        if name is not None:
            del self._numbers[name]
        return name is not None

    # ------------------------------------------------------------------------------------------ questions

    async def report(self) -> EngineReport:
        """Counters, histograms and the pool in sum."""
        return await self._ask("report", self._num_restarts)

    async def picture(self) -> PoolPicture:
        """The pool page by page, and who holds it."""
        return await self._ask("picture")

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; what runs keeps its pages."""
        await self._ask("reset_prefix_cache")

    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Stops stepping, until `resume`; see `EngineClient.pause`."""
        if mode not in get_args(PauseMode):
            raise RequestError(f"mode is {mode!r:.40}, expected one of {', '.join(get_args(PauseMode))}")
        await self._ask("pause", mode, clear_cache)
        self._is_paused = True

    async def resume(self) -> None:
        """Goes on after `pause`."""
        await self._ask("resume")
        self._is_paused = False

    async def call(self, function: Callable[..., Any], *, limit_s: float | None = None) -> Any:
        """Calls `function(engine)` between two steps, for what has no method here, such as new weights.

        Args:
          function: for an engine in another process it must be importable there, and its result must pickle.
          limit_s: if it takes longer, an engine in another process counts as hung and is replaced; `math.inf`: never;
            `None`: the `hang_s` of its `EngineProcess`, as for a step.

        Raises:
          RequestError: `limit_s` is no such number.
          JpagedError: it failed.
        """
        if limit_s is not None:
            if not isinstance(limit_s, numbers.Real):
                raise RequestError(f"limit_s is a {type(limit_s).__name__}, expected seconds, more than 0, or None")
            try:
                limit_s = float(limit_s)
            except OverflowError:  # an integer beyond all floats, which cannot be written either
                limit_s = math.inf if limit_s > 0 else -math.inf
            if not limit_s > 0:
                raise RequestError(f"limit_s is {limit_s:g}, expected seconds, more than 0, or None")
        return await self._ask("call", function, limit_s)

    async def _ask(self, what: Question, *arguments: Any) -> Any:
        self._require_alive()
        return await self._send(Ask(next(self._serial), what, arguments))

    def _require_alive(self) -> None:
        if self._state != "ready":
            why = f": {self._failure}" if self._failure else ""
            raise EngineFailedError(f"the engine is {self._state}{why}")

    # ------------------------------------------------------------------------------------------ events

    def _receive(self, events: list[Event]) -> None:
        for event in events:
            self._handlers[type(event)](event)

    def _resolve(self, number: int, value: Any) -> None:
        waiter = self._waiters.get(number)
        if waiter is not None and not waiter.done():
            waiter.set_result(value)

    def _on_taken(self, event: Taken) -> None:
        if event.number in self._streams:
            self._resolve(event.number, None)

    def _on_advanced(self, event: Advanced) -> None:
        streams = self._streams
        for number_and_delta in event.deltas:
            stream = streams.get(number_and_delta[0])
            if stream is not None:
                stream.push(Delta._make(number_and_delta[1:]))

    def _on_begun(self, event: Begun) -> None:
        if (stream := self._streams.get(event.number)) is not None:
            stream.begin(event)

    def _on_ended(self, event: Ended) -> None:
        if (stream := self._streams.get(event.number)) is not None:
            stream.end(event)
            self._forget(event.number)

    def _on_done(self, event: Done) -> None:
        self._forget(event.number)
        self._resolve(event.number, event.output)

    def _on_refused(self, event: Refused) -> None:
        self._forget(event.number)
        waiter = self._waiters.get(event.number)
        if waiter is not None and not waiter.done():
            waiter.set_exception(getattr(errors, event.kind)(event.message))

    def _on_ready(self, event: Ready) -> None:
        if self._state == "closed":
            return
        self._num_restarts += self._state == "restarting"
        self._state, self._failure, self._info = "ready", None, event.info
        if self._started is not None and not self._started.done():
            self._started.set_result(None)

    def _on_failing(self, event: Failing) -> None:
        if self._state not in ("closed", "dead"):
            self._state, self._failure = "restarting", event.failure
            self._fail_all(event.failure)
            self._port.send(Resync())

    def _on_dead(self, event: Dead) -> None:
        if self._state == "closed":
            return
        self._state, self._failure = "dead", event.failure
        self._fail_all(event.failure)
        if self._started is not None and not self._started.done():
            self._started.set_exception(getattr(errors, event.kind)(event.failure))

    def _fail_all(self, failure: str) -> None:
        error = f"the engine failed: {failure}" if self._state != "closed" else failure
        self._is_paused = False
        streams, waiters = self._streams, self._waiters
        self._streams, self._waiters = {}, {}
        self._numbers.clear()
        self._names.clear()
        for stream in streams.values():
            stream.fail(EngineFailedError(error))
        for waiter in waiters.values():
            if not waiter.done():
                waiter.set_exception(EngineFailedError(error))


def _token_array(prompt: Any) -> array:
    """Token ids as one block of memory, which pickles in no time; the engine checks their range."""
    try:
        if isinstance(prompt, str | bytes | bytearray | memoryview) or bool in set(map(type, prompt)):
            raise TypeError
        return prompt if isinstance(prompt, array) and prompt.typecode == "q" else array("q", prompt)
    except (TypeError, OverflowError):
        raise RequestError(f"a prompt must be a list of token ids, got {type(prompt).__name__}") from None
