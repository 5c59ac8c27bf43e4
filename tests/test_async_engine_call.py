"""How long a call to the engine may take: any positive number of seconds, however it is written."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from jpaged.async_engine import AsyncEngine
from jpaged.engine_loop import Deadline
from jpaged.engine_thread import EngineThread
from jpaged.errors import RequestError
from tests.client_driver import run
from tests.fake_engine import FakeEngine, process_id


def test_a_call_may_take_any_time():
    limits: list[Any] = [None, 1e-300, 1e308, math.inf, 10**400, 10**5000, Fraction(10**400), np.float32(1e30), True]

    async def main():
        async with AsyncEngine(EngineThread(FakeEngine())) as client:
            for limit_s in limits:
                assert await client.call(process_id, limit_s=limit_s) == client.info.process_id

    run(main())


def test_a_call_without_time_is_refused_and_the_next_one_goes_on():
    refused: list[tuple[Any, str]] = [
        (-1, "limit_s is -1, expected seconds, more than 0, or None"),
        (0, "limit_s is 0,"),
        (math.nan, "limit_s is nan,"),
        (-(10**5000), "limit_s is -inf,"),  # which Python does not write
        (Fraction(1, 10**400), "limit_s is 0,"),
        ("5", "limit_s is a str,"),
        (2j, "limit_s is a complex,"),
    ]

    async def main():
        async with AsyncEngine(EngineThread(FakeEngine())) as client:
            for limit_s, said in refused:
                with pytest.raises(RequestError, match=said):
                    await client.call(process_id, limit_s=limit_s)
            assert await client.call(process_id) == client.info.process_id

    run(main())


def test_a_call_that_may_take_for_ever_is_not_overdue():
    deadline = Deadline(300.0)
    with deadline.of("a call", math.inf):
        assert deadline.missed is None
