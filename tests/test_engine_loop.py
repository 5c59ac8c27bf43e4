"""Whatever a client says and whenever the engine fails: each request is answered once, and by its own tokens."""

import math
from array import array
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.engine_loop import Deadline, EngineLoop, failure_of
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
    Failing,
    Ready,
    Refused,
    Resync,
    Taken,
)
from jpaged.errors import EngineFailedError, PromptTooLongError
from jpaged.request import SamplingParams
from jpaged.restarts import RestartPolicy
from tests.fake_engine import FakeEngine


class Script:
    """Commands that come turn by turn; after the last turn, and once all requests have ended, `Close`."""

    def __init__(self, turns: list[list[Command]]) -> None:
        self._turns = [list(turn) for turn in turns]

    def get_nowait(self) -> Command:
        if not self._turns:
            raise Empty
        if not self._turns[0]:
            self._turns.pop(0)
            raise Empty
        return self._turns[0].pop(0)

    def get(self) -> Command:
        while self._turns:
            if self._turns[0]:
                return self._turns[0].pop(0)
            self._turns.pop(0)
        return Close()


def serve(engine: FakeEngine, turns: list[list[Command]], policy: RestartPolicy | None = None) -> list[Any]:
    """All events, in order."""
    events: list[Any] = []
    script: Any = Script(turns)
    EngineLoop(engine, script, events.extend, policy).run()
    return events


def add(number: int, prompt: list[int], max_tokens: int, *, stream: bool) -> Add:
    params = SamplingParams(max_tokens=max_tokens)
    return Add(number, array("q", prompt), params, f"r{number % 5}-{number}", stream, 0, None, 0.0)


requests = st.tuples(st.integers(1, 110), st.integers(1, 4), st.booleans())
steps = st.one_of(
    requests,
    requests,
    st.integers(0, 12),  # aborts the request of this number
    st.sampled_from(["report", "picture", "reset_prefix_cache", "resume"]),
    st.sampled_from([("pause", mode, clear) for mode in ("keep", "wait", "abort") for clear in (False, True)]),
)


def commands(turns: list[list[Any]]) -> list[list[Command]]:
    """What a client would say: numbers ascend; at the end it resumes."""
    serial = iter(range(10_000))
    said: list[list[Command]] = []
    for turn in turns:
        said.append([])
        for step in turn:
            match step:
                case int():
                    said[-1].append(Abort((step,)))
                case "report":
                    said[-1].append(Ask(next(serial), "report", (0,)))
                case str():
                    said[-1].append(Ask(next(serial), step))
                case ("pause", mode, clear):
                    said[-1].append(Ask(next(serial), "pause", (mode, clear)))
                case (token, max_tokens, stream):
                    said[-1].append(add(next(serial), [token], max_tokens, stream=stream))
    return [*said, [Ask(next(serial), "resume")]]


@settings(max_examples=150)
@given(st.lists(st.lists(steps, max_size=4), max_size=10))
def test_each_request_is_answered_once(turns):
    said = commands(turns)
    engine = FakeEngine()
    events = serve(engine, said)
    assert isinstance(events[0], Ready)
    assert not engine.live
    for command in (command for turn in said for command in turn):
        if isinstance(command, Add):
            check_request(command, events)
        elif isinstance(command, Ask):
            (answer,) = [
                event for event in events if isinstance(event, Answer | Refused) and event.number == command.number
            ]
            assert isinstance(answer, Answer) or command.what == "pause"


def check_request(command: Add, events: list[Any]) -> None:
    number, token, most = command.number, command.prompt[0], command.params.max_tokens or 0
    about = [event for event in events if getattr(event, "number", None) == number]
    if token >= 100 or token == 13:  # out of the vocabulary, and the fake's internal error
        assert [type(event) for event in about] == [Refused]
        return
    kinds = [type(event) for event in about]
    if not command.stream:
        assert kinds == [Taken, Done]
        output = about[1].output
        tokens, reason = list(output.token_ids), output.finish_reason
    else:
        deltas = [item for event in events if isinstance(event, Advanced) for item in event.deltas if item[0] == number]
        tokens, reason = [token for item in deltas for token in item[3]], deltas[-1][5]
        assert kinds == ([Taken, Begun, Ended] if tokens else [Taken, Ended])
    assert tokens == [(token + i) % 100 for i in range(len(tokens))]
    assert reason == "abort" or (reason == "length" and len(tokens) == most)


def test_after_a_failure_nothing_is_heard_until_the_client_knows():
    fail = iter([False, True, False, False, False])

    def on_step(engine):
        if next(fail, False):
            raise OSError("device lost\nand much more")

    engine = FakeEngine(on_step=on_step)
    turns = [
        [add(0, [1], 5, stream=True)],
        [add(1, [2], 5, stream=False)],  # the step after this one fails
        [add(2, [3], 1, stream=False), Abort((0,)), Ask(3, "report", (0,))],  # sent before the client knew
        [Resync(), add(4, [5], 1, stream=False)],
    ]
    events = serve(engine, turns)
    kinds = [type(event) for event in events]
    assert kinds == [Ready, Taken, Begun, Advanced, Taken, Failing, Ready, Taken, Done]
    assert events[5] == Failing("OSError: device lost")
    assert events[-1].output.token_ids == (5,)


def test_no_more_failures_than_allowed():
    def on_step(engine):
        raise OSError("device lost")

    turns = [[add(0, [1], 5, stream=True)], [Resync(), add(1, [1], 5, stream=True)]]
    with pytest.raises(EngineFailedError, match="too often; the last time: OSError: device lost"):
        serve(FakeEngine(on_step=on_step), turns, RestartPolicy(max_restarts=1))


def test_refusals_keep_their_kind():
    events = serve(FakeEngine(), [[add(0, [1] * 2000, 5, stream=True), add(1, [13], 5, stream=True)]])
    too_long, internal = [event for event in events if isinstance(event, Refused)]
    assert (too_long.kind, too_long.message) == (PromptTooLongError.__name__, "2000 tokens are too many")
    assert internal.kind == "JpagedError"
    assert "thirteen" not in internal.message


def test_a_watchdog_sees_steps_commands_and_restarts():
    deadline, seen, patient, queue = Deadline(0.0), [], [], SimpleQueue[Command]()

    class Slow(FakeEngine):
        def restart(self) -> None:
            seen.append(deadline.missed)
            super().restart()

    def on_step(engine: FakeEngine) -> None:
        seen.append(deadline.missed)
        raise OSError

    def emit(events) -> None:
        if isinstance(events[0], Ready):
            queue.put(Ask(1, "call", (lambda engine: seen.append(deadline.missed), None)))
            queue.put(Ask(2, "call", (lambda engine: patient.append(deadline.missed), math.inf)))
            queue.put(Close() if len(seen) > 1 else add(0, [1], 2, stream=False))

    queue.put(Resync())
    EngineLoop(Slow(on_step=on_step), queue, emit, deadline=deadline).run()
    assert seen == [f"a {what} did not end within 0 s" for what in ("call", "step", "restart")]
    assert set(patient) == {None}  # a call may have a limit of its own
    assert deadline.missed is None  # to wait for commands takes as long as it takes


def test_failures_are_one_short_line():
    assert failure_of(ValueError("a\nb")) == "ValueError: a"
    assert len(failure_of(ValueError("a" * 1000))) == 300
