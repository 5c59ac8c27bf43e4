"""`run_load`: sends the requests of a load test when they are due, from one process or several."""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.serving.http_client import HttpClient
from scripts.serving.record import Record
from scripts.serving.sender import send
from scripts.serving.work import Work

_TICK_S = 0.02
_AHEAD_S = 0.2  # between the order to begin and the begin, in each process
_START_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where requests go.

    Attributes:
      url: of the server.
      path: of the endpoint.
      headers: that go with each request.
      timeout_s: for one answer.
    """

    url: str
    path: str
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one process of the client did.

    Attributes:
      records: of its requests.
      cpu_s: that it took, from the first request to the last answer.
      wall_s: likewise.
      lags_s: how late its event loop was, each 20 ms.
    """

    records: list[Record]
    cpu_s: float
    wall_s: float
    lags_s: list[float]


def run_load(target: Target, works: Sequence[Work], *, concurrency: int | None, processes: int = 1) -> list[Share]:
    """Sends all requests and waits for all answers.

    Args:
      target: where.
      works: the requests, by due time if they have one.
      concurrency: requests at once at the most; `None`: no limit, whatever is due is sent.
      processes: of the client; the requests are dealt out among them.

    Raises:
      RuntimeError: a process of the client ended.
    """
    processes = min(processes, len(works), concurrency or len(works))
    shares = [works[first::processes] for first in range(processes)]
    limits = [None if concurrency is None else len(range(concurrency)[first::processes]) for first in range(processes)]
    if processes == 1:
        return [_run(target, shares[0], limits[0], time.monotonic() + _AHEAD_S)]
    context = multiprocessing.get_context("spawn")
    links, children = [], []
    try:
        for share, limit in zip(shares, limits, strict=True):
            ours, theirs = context.Pipe()
            children.append(context.Process(target=_child, args=(theirs, target, list(share), limit), daemon=True))
            children[-1].start()
            theirs.close()
            links.append(ours)
        for link in links:
            if not link.poll(_START_S):
                raise RuntimeError(f"a process of the client did not start within {_START_S:g} s")
            link.recv()
        begin_s = time.monotonic() + _AHEAD_S
        for link in links:
            link.send(begin_s)
        return [link.recv() for link in links]
    except EOFError:
        raise RuntimeError("a process of the client ended; its error is above") from None
    finally:
        for link in links:
            link.close()
        for child in children:
            child.join(_START_S)


def _child(link: Any, target: Target, works: list[Work], concurrency: int | None) -> None:
    link.send("ready")
    link.send(_run(target, works, concurrency, link.recv()))


def _run(target: Target, works: Sequence[Work], concurrency: int | None, begin_s: float) -> Share:
    try:
        from uvloop import new_event_loop  # half the cost of an event, where it is there
    except ImportError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_send_all(target, works, concurrency, begin_s))


async def _send_all(target: Target, works: Sequence[Work], concurrency: int | None, begin_s: float) -> Share:
    client = HttpClient(target.url, headers=target.headers)
    records: list[Record] = []
    lags_s: list[float] = []

    async def one(work: Work) -> None:
        if work.due_s is not None:
            await asyncio.sleep(begin_s + work.due_s - time.monotonic())
        records.append(await send(client, target.path, work, begin_s=begin_s, timeout_s=target.timeout_s))

    async def place() -> None:
        for work in queue:
            await one(work)

    queue = iter(works)
    ticking = asyncio.create_task(_tick(lags_s))
    await asyncio.sleep(begin_s - time.monotonic())
    cpu_s, wall_s = _cpu_s(), time.monotonic()
    if concurrency is None:
        await asyncio.gather(*map(one, works))
    else:
        await asyncio.gather(*(place() for _ in range(concurrency)))
    cpu_s, wall_s = _cpu_s() - cpu_s, time.monotonic() - wall_s
    ticking.cancel()
    client.close()
    return Share(records=records, cpu_s=cpu_s, wall_s=wall_s, lags_s=lags_s)


async def _tick(lags_s: list[float]) -> None:
    while True:
        due_s = time.monotonic() + _TICK_S
        await asyncio.sleep(_TICK_S)
        lags_s.append(time.monotonic() - due_s)


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system
