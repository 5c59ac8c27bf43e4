"""`measure_flood`: how long `/health` takes while a server is sent what takes long to read."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from scripts.serving.health import HealthWatch
from scripts.serving.http_client import HttpClient
from scripts.serving.work import PATHS

BODY_BYTES: Final = 27_000_000
NUM_AT_ONCE: Final = 1280
_TEXT_CHARACTERS: Final = 400
_COMPLETIONS: Final = PATHS["completions"]
_LARGE: Final = 3  # bodies, one after the other
_QUIET: Final = 20
_PAUSE_S: Final = 0.05
PATIENCE_S: Final = 20.0
_LETTERS: Final = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz    ", np.uint8)


def measure_flood(url: str, model: str, *, headers: dict[str, str], vocab_size: int) -> dict[str, Any]:
    """Figures by what is sent: nothing, large bodies one after the other, and many requests at once.

    Of many at once, those without an answer after 20 s leave, as clients do, and are counted as "left": what is
    measured is how requests are read, and a model on a CPU takes a quarter of an hour to serve all of them.

    Args:
      url: of the server.
      model: its name there.
      headers: that go with each request.
      vocab_size: ids are below it.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(3, vocab_size, BODY_BYTES // 7).tolist()
    many = [_text(rng, _TEXT_CHARACTERS) for _ in range(NUM_AT_ONCE)]
    long = _text(rng, BODY_BYTES)
    cases: dict[str, tuple[str, list[bytes], int]] = {
        "nothing": ("/tokenize", [_json(model, prompt="a")] * _QUIET, 1),
        "27 MB of token ids": (_COMPLETIONS, [_json(model, prompt=ids, max_tokens=1)] * _LARGE, 1),
        "27 MB of text": (
            _COMPLETIONS,
            [_json(model, prompt=long, max_tokens=1, truncate_prompt_tokens=-1)],
            1,
        ),
        "27 MB to /tokenize": ("/tokenize", [_json(model, prompt=long)] * _LARGE, 1),
        f"{NUM_AT_ONCE} requests": (
            _COMPLETIONS,
            [_json(model, prompt=one, max_tokens=1) for one in many],
            NUM_AT_ONCE,
        ),
        f"{NUM_AT_ONCE} to /tokenize": ("/tokenize", [_json(model, prompt=one) for one in many], NUM_AT_ONCE),
    }
    figures = {}
    for name, (path, bodies, at_once) in cases.items():
        with HealthWatch(url) as watch:
            statuses = asyncio.run(_send_all(HttpClient(url, headers=headers), path, bodies, at_once))
        figures[name] = {"statuses": dict(sorted(statuses.items())), "health": watch.figures()}
    return figures


async def _send_all(client: HttpClient, path: str, bodies: Sequence[bytes], at_once: int) -> Counter[str]:
    """All bodies, so many at once; the answers' statuses, and "left" for those that did not come in time."""
    queue = iter(bodies)
    statuses: Counter[str] = Counter()

    async def place() -> None:
        for body in queue:
            try:
                status, _ = await client.post(path, body)
                statuses[f"{status}"] += 1
            except OSError as error:
                statuses[type(error).__name__] += 1
            if at_once == 1:
                await asyncio.sleep(_PAUSE_S)

    try:
        async with asyncio.timeout(PATIENCE_S if at_once > 1 else None):
            await asyncio.gather(*(place() for _ in range(at_once)))
    except TimeoutError:
        statuses["left"] = len(bodies) - sum(statuses.values())
    client.close()
    return statuses


def _json(model: str, **fields: Any) -> bytes:
    return json.dumps({"model": model, **fields}).encode()


def _text(rng: np.random.Generator, num_characters: int) -> str:
    """Made-up words."""
    return rng.choice(_LETTERS, num_characters).tobytes().decode()
