"""What a client and an engine say to each other, be it across threads or across processes.

A client numbers its requests and questions, and never uses a number twice: request ids may come again as soon as a
request has ended, when the last events of the old one may still be on their way.
"""

from array import array
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jpaged.engine_client import EngineInfo
from jpaged.request import Output, SamplingParams, TokenLogprobs
from jpaged.restarts import RestartPolicy
from jpaged.timing import RequestTiming

Question = Literal["report", "picture", "reset_prefix_cache", "pause", "resume", "call"]


class Boot(NamedTuple):
    """The first word to a new process.

    Attributes:
      prepare: "module:function" to call before anything else, with its arguments by name; `None`: nothing.
      maker, options: likewise, of what makes the engine.
      restarts: of the engine, in place.
      hang_s: a step, a command or a restart that takes longer ends the process.
      load_s: likewise of making the engine.
    """

    prepare: str | None
    prepare_options: Mapping[str, Any]
    maker: str
    options: Mapping[str, Any]
    restarts: RestartPolicy
    hang_s: float
    load_s: float


class Add(NamedTuple):
    """A request. The prompt is an array of 64-bit integers, so that a long one goes over as one block of memory."""

    number: int
    prompt: array
    params: SamplingParams
    request_id: str
    stream: bool
    priority: int
    cache_salt: str | None
    arrival_s: float


class Abort(NamedTuple):
    """Ends requests."""

    numbers: tuple[int, ...]


class Ask(NamedTuple):
    """A question, or an order whose end is reported: a method of `AsyncEngine`, and what the engine needs for it."""

    number: int
    what: Question
    arguments: tuple[Any, ...] = ()


class Resync(NamedTuple):
    """The client knows of the engine's failure: what it says from here on is about the engine as it is now."""


class Close(NamedTuple):
    """Ends the engine."""


Command = Add | Abort | Ask | Resync | Close


class Taken(NamedTuple):
    """The engine has a request."""

    number: int


class Refused(NamedTuple):
    """The engine has not taken a request, or could not answer a question. `kind`: the name of a jpaged error."""

    number: int
    kind: str
    message: str


class Begun(NamedTuple):
    """What is known of a streaming request when its first token comes."""

    number: int
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None


class Advanced(NamedTuple):
    """What a step added to streaming requests: (number, *fields of a `Delta`), those of a request in order.

    Plain tuples, since those pickle in a fifth of the time, which the engine's thread would have to wait for.
    """

    deltas: list[tuple[Any, ...]]


class Ended(NamedTuple):
    """A streaming request ended; its last deltas have gone before."""

    number: int
    num_cached_tokens: int
    num_preemptions: int
    error: str | None
    timing: RequestTiming | None


class Done(NamedTuple):
    """A request that does not stream ended."""

    number: int
    output: Output


class Answer(NamedTuple):
    """To a question."""

    number: int
    value: Any


class Ready(NamedTuple):
    """The engine serves, for the first time or again."""

    info: EngineInfo


class Failing(NamedTuple):
    """The engine failed: all its requests are lost, and it tries to restart."""

    failure: str


class Dead(NamedTuple):
    """The engine failed and does not come back. `kind`: as of `Refused`, of an engine that could not be made."""

    failure: str
    kind: str = "EngineFailedError"


Event = Taken | Refused | Begun | Advanced | Ended | Done | Answer | Ready | Failing | Dead
