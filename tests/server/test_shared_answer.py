"""One question to the engine for all who look, and none waits for ever."""

import asyncio

import pytest

from jpaged.errors import EngineFailedError
from jpaged.server.api_error import ApiError
from jpaged.server.shared_answer import SharedAnswer
from tests.client_driver import run


class Engine:
    """Answers 1, 2, ..., once `gate` is set."""

    def __init__(self) -> None:
        self.gate, self.num_asked = asyncio.Event(), 0
        self.failure: Exception | None = None

    async def ask(self) -> int:
        self.num_asked += 1
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return self.num_asked


def test_those_who_look_at_once_share_a_question():
    async def main():
        engine = Engine()
        shared = SharedAnswer(engine.ask, fresh_s=60, patience_s=60)
        waiting = [asyncio.ensure_future(shared.get()) for _ in range(5)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # the one who asked first leaves
        engine.gate.set()
        assert {(await one)[0] for one in waiting[1:]} == {1}
        assert (await shared.get())[0] == engine.num_asked == 1  # it is fresh
        stale = SharedAnswer(engine.ask, fresh_s=0, patience_s=60)
        assert [(await stale.get())[0] for _ in range(2)] == [2, 3]

    run(main())


def test_an_engine_that_is_late_has_its_last_answer_and_its_age():
    async def main():
        engine = Engine()
        shared = SharedAnswer(engine.ask, fresh_s=0, patience_s=0.01)
        for _ in range(2):
            with pytest.raises(ApiError, match="too busy") as refused:
                await shared.get()
            assert (refused.value.status, refused.value.retry_after_s) == (503, 5)
        assert engine.num_asked == 1  # the first question is still there
        engine.gate.set()
        assert (await shared.get())[0] == 1
        engine.gate.clear()
        answer, age_s = await shared.get()
        assert (answer, age_s >= 0.01) == (1, True)

    run(main())


def test_a_failed_engine_has_no_last_answer():
    async def main():
        engine = Engine()
        shared = SharedAnswer(engine.ask, fresh_s=0, patience_s=0.01)
        engine.gate.set()
        await shared.get()
        engine.failure = EngineFailedError("gone")
        with pytest.raises(EngineFailedError):
            await shared.get()
        engine.gate.clear()
        with pytest.raises(ApiError):
            await shared.get()

    run(main())
