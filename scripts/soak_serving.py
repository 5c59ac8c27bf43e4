"""Thousands of random requests over HTTP, many of them bad or left: nothing may leak, hang, crash or grow.

    python scripts/soak_serving.py [--requests 10000] [--concurrency 48] [--seed 0]
    python scripts/soak_serving.py --equality --requests 1000     good requests only, each streamed and in one piece

`jpaged serve` runs a tiny random model on a page pool that is too small for all at once, with limits that are reached.
Clients chat and complete, stream or wait, send token ids and text, and leave at any moment: in the middle of their
request, in the queue, after some events. A tenth of them sends what must be refused. Some requests are sent twice, once
streaming, and must say the same. Meanwhile somebody with the admin key aborts others' requests, pauses the engine,
clears the cache, and looks at all pages of the server that show something. At the end the server gets SIGTERM while it
streams, and must end these answers first.

The run fails, with exit status 1, unless at its end: no request lives, no page is used, every request ended as it was
expected, none was stuck, the server's log tells of no error, its memory has not grown, and it ended in order. The soak
of `AsyncEngine` is scripts/soak.py. The last line is JSON.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from scripts.report import print_json, print_table
from scripts.serving.cpu_time import name_of, process_tree
from scripts.serving.http_client import HttpClient
from scripts.serving.server_process import ServerProcess, free_port, spawned
from scripts.serving.soak_case import ADMIN_KEY, API_KEYS, MAX_BODY_BYTES, MAX_LEN, MODEL, Case, random_case
from scripts.serving.soak_client import FaultError, serve_case
from scripts.soak import growth, resident_bytes

STUCK_S = 120.0
NUM_PAGES = 56
_ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
# Of a process's memory, a thousand requests, over the second half. Whatever a request leaves by mistake (its tokens,
# sequence, stream) is more than a KiB; what is given back to the system after the start is taken again bit by bit.
_MAX_GROWTH_KIB = 512
_DRAINED = 4


def command(folder: Path, max_requests: int) -> str:
    """How the server is started; {port} is to be filled in."""
    options: dict[str, Any] = {
        "port": "{port}",
        "served-model-name": MODEL,
        "page-size": 8,
        "num-pages": NUM_PAGES,
        "max-num-seqs": 8,
        "max-num-batched-tokens": 64,
        "max-model-len": MAX_LEN,
        "max-body-bytes": MAX_BODY_BYTES,
        "max-requests": max_requests,
        "max-requests-per-key": max(max_requests * 2 // 3, 1),
        "admin-key": ADMIN_KEY,
    }
    words = [f"--{name} {value}" for name, value in options.items()] + [f"--api-key {key}" for key in API_KEYS]
    return f"python -m jpaged.cli serve {folder} {' '.join(words)} --no-progress"


@dataclass
class Soak:
    """The clients, and what became of their requests."""

    client: HttpClient
    rng: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)

    async def serve(self, number: int, case: Case) -> None:
        """One request to its end, whatever that is."""
        try:
            async with asyncio.timeout(STUCK_S):
                outcome = await serve_case(self.client, case, f"soak-{number}")
        except TimeoutError:
            outcome = "stuck"
        except Exception as error:
            outcome = "fault"
            self.faults.append(f"request {number}: {_said(error)}: {case}")
        if outcome == "stuck":
            self.faults.append(f"request {number}: stuck: {case}")
        self.outcomes[outcome] += 1

    async def disturb(self) -> None:
        """Aborts others' requests, pauses the engine, clears the cache, and looks at everything."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / 0.3))
            kind = self.rng.random()
            if kind < 0.4:
                state = await self._look("/internal/state")
                names = [one["request_id"].partition("/")[0] for one in state["requests"] if one["request_id"]]
                if names:
                    await self._order("/abort_requests", {"request_ids": self.rng.sample(names, 1)})
            elif kind < 0.45:
                mode = self.rng.choice(["keep", "keep", "wait", "abort"])
                await self._order("/pause", {"mode": mode, "clear_cache": self.rng.random() < 0.5})
                await asyncio.sleep(self.rng.random() * 0.1)
                await self._order("/resume", {})
            elif kind < 0.5:
                await self._order("/reset_prefix_cache", {})
            else:
                for path in ("/metrics", "/v1/models", "/load", "/version", "/openapi.json"):
                    await self._look(path)

    def watch_health(self, url: str, end: threading.Event) -> None:
        """How long `/health` takes, all the time; in a thread, lest the clients' own work be in it."""
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=STUCK_S)
        while not end.wait(0.1):
            begin = time.monotonic()
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            self.health_s.append(time.monotonic() - begin)
            if answer.status != 200:
                self.faults.append(f"/health says {answer.status}")

    async def _look(self, path: str) -> Any:
        async with self.client.request("GET", path, headers=_ADMIN) as answer:
            body = await answer.body()
            if answer.status != 200:
                raise FaultError(f"{path} says {answer.status}: {body[:200]!r}")
            return json.loads(body) if answer.headers["content-type"] == "application/json" else body

    async def _order(self, path: str, body: dict[str, Any]) -> None:
        status, answer = await self.client.post(path, json.dumps(body).encode(), _ADMIN)
        if status not in (200, 404):  # 404: what was to be aborted has just ended
            raise FaultError(f"{path} says {status}: {answer[:200]!r}")


def resident(process_id: int) -> dict[str, int]:
    """Bytes in RAM of the server's processes, by what they run."""
    held: dict[str, int] = {}
    for one in process_tree(process_id):
        with contextlib.suppress(OSError):  # it may just have ended
            name = "server" if one == process_id else name_of(one)
            held[name] = held.get(name, 0) + resident_bytes(one)
    return held


def _tenths(points: list[Any]) -> list[Any]:
    """The first point, eight in between, the last one."""
    return [points[round(part * (len(points) - 1) / 9)] for part in range(10)]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__} ({error})"


async def soak(options: argparse.Namespace, server: ServerProcess) -> dict[str, Any]:
    """The whole run, and what came of it."""
    rng = random.Random(options.seed)
    run = Soak(HttpClient(server.url), rng)
    structured = await _keeps_grammars(run.client)
    memory: dict[str, list[tuple[int, int]]] = {}  # by process: requests done, bytes
    processes = process_tree(server.process.pid)
    begin, todo, done = time.monotonic(), set[asyncio.Task[None]](), 0
    end = threading.Event()
    watching = asyncio.create_task(asyncio.to_thread(run.watch_health, server.url, end))
    disturbing = None if options.equality else asyncio.create_task(run.disturb())
    for number in range(options.requests):
        case = random_case(rng, structured=structured, only_twice=options.equality)
        todo.add(asyncio.create_task(run.serve(number, case)))
        if len(todo) >= options.concurrency:
            ended, todo = await asyncio.wait(todo, return_when=asyncio.FIRST_COMPLETED)
            done += len(ended)
        if number % max(options.requests // 200, 1) == 0:
            for name, held in resident(server.process.pid).items():
                memory.setdefault(name, []).append((done, held))
    await asyncio.wait(todo)
    seconds = time.monotonic() - begin
    if disturbing is not None:
        disturbing.cancel()
        await asyncio.wait([disturbing])
        if not disturbing.cancelled():
            run.faults.append(f"who disturbs failed: {_said(disturbing.exception() or RuntimeError('it ended'))}")
    end.set()
    await watching
    state = await _settled(run)
    stats = state["stats"]
    if (still := process_tree(server.process.pid))[:2] != processes[:2]:
        run.faults.append(f"the server's processes were {processes[:2]} and are {still[:2]}")
    metrics = (await run._look("/metrics")).decode()
    drained = await _drain(run, server)
    log = server.faults()
    return {
        "requests": options.requests,
        "concurrency": options.concurrency,
        "equality": options.equality,
        "structured": structured,
        "seconds": round(seconds, 1),
        "outcomes": dict(sorted(run.outcomes.items())),
        "compared": run.outcomes["compared"],
        "preemptions": stats["num_preemptions"],
        "cached_tokens": stats["num_cached_tokens"],
        "generated_tokens": stats["num_generated_tokens"],
        "leaked_pages": stats["num_pages"] - 1 - stats["pages_free"] - stats["pages_cached"],
        "live_at_the_end": len(state["requests"]) + stats["num_running"] + stats["num_waiting"],
        "engine_restarts": _metric(metrics, "jpaged:engine_restarts_total"),
        "failed_requests": _metric(metrics, "jpaged:corrupted_requests_total"),
        "refused_forms": _metric(metrics, "jpaged:refused_requests_total"),
        "stuck": run.outcomes["stuck"],
        "drained_in_order": drained,
        "faults": len(run.faults),
        "first_faults": [fault[:600] for fault in run.faults[:5]],
        "log_faults": len(log),
        "first_log_faults": [line[:1500] for line in log[:3]],
        "health_p99_ms": round(1e3 * float(np.percentile(run.health_s, 99)), 1),
        "health_max_ms": round(1e3 * max(run.health_s), 1),
        "resident_mib": {name: [round(held / 2**20, 1) for _, held in _tenths(p)] for name, p in memory.items()},
        "growth_kib_per_1000_requests": {n: round(growth(points) / 1024 * 1000, 1) for n, points in memory.items()},
    }


async def _keeps_grammars(client: HttpClient) -> bool:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": "[ab]{2}"}}
    status, _ = await client.post("/v1/completions", json.dumps(body).encode(), _ADMIN)
    return status == 200


async def _settled(run: Soak) -> Any:
    """The engine's state once it has ended what nobody waits for any more."""
    for _ in range(100):
        state = await run._look("/internal/state")
        if not state["requests"]:
            break
        await asyncio.sleep(0.1)
    return state


async def _drain(run: Soak, server: ServerProcess) -> bool:
    """Whether the server, told to end while it streams, ends its answers first, and then itself."""
    body = {"model": MODEL, "prompt": "once upon a time", "max_tokens": 100, "ignore_eos": True, "stream": True}
    cases = [Case("completions", body, API_KEYS[0]) for _ in range(_DRAINED)]
    streams = [asyncio.create_task(serve_case(run.client, case, f"last-{i}")) for i, case in enumerate(cases)]
    while len((await run._look("/internal/state"))["requests"]) < _DRAINED and not any(s.done() for s in streams):
        await asyncio.sleep(0.01)
    status = await asyncio.to_thread(server.stop)
    ends = await asyncio.gather(*streams, return_exceptions=True)
    run.client.close()
    if status == 0 and ends == ["answered"] * _DRAINED:
        return True
    run.faults.append(f"at SIGTERM streams ended with {ends}, and the server with status {status}")
    return False


def _metric(exposition: str, name: str) -> int:
    values = [line.rpartition(" ")[2] for line in exposition.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return int(sum(map(float, values)))


def _with_end(folder: Path) -> Path:
    """Gives the model a token that ends texts: grammars need one."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(settings | {"eos_token": "<|endoftext|>"}), encoding="utf-8")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--equality", action="store_true", help="good requests only, each sent twice")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server-log", type=Path, help="keep the server's output in this file")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    from tests.server.tiny_model import write_model

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        model = _with_end(write_model(folder / "model"))
        # A case may be two requests of three answers: the limit is met now and then, unless all must be answered.
        limit = 6 * options.concurrency if options.equality else options.concurrency * 3 // 2
        start = command(model, limit).replace("{port}", f"{port}")
        with spawned(start, f"http://127.0.0.1:{port}", options.server_log or folder / "log") as server:
            results = asyncio.run(soak(options, server))
    results["load_average"] = [load, os.getloadavg()[0]]
    print_table("soak over HTTP", ["what", "figure"], [[name, value] for name, value in results.items()])
    print_json("soak_serving", results)
    bad = ("leaked_pages", "live_at_the_end", "engine_restarts", "failed_requests", "stuck", "faults", "log_faults")
    growths = results["growth_kib_per_1000_requests"].values()
    grown = options.requests >= 5000 and max(growths) > _MAX_GROWTH_KIB
    return 1 if grown or not results["drained_in_order"] or any(results[name] for name in bad) else 0


if __name__ == "__main__":
    sys.exit(main())
