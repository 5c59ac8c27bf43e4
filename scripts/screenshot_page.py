"""Pictures of the server's built-in page for the documents, while several requests run.

    python scripts/screenshot_page.py [--model smollm2-135m-instruct] [--out docs/images] [--seconds 20]
    python scripts/screenshot_page.py --url http://127.0.0.1:8000       of a server that runs already

`jpaged serve` runs the model; clients that share a system prompt keep it busy, and a headless Chromium (CHROMIUM, or
the first one found) opens the page and talks to the model. server-chat.png is the whole page, server-pool.png its
right half in dark colours, with a colour a request. The last line is JSON.
"""

import argparse
import contextlib
import http.client
import json
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jpaged.errors import ConfigError
from scripts.chromium import Chromium, chromium, find_chromium
from scripts.report import print_json
from scripts.serving.server_process import spawned

ROOT: Final = Path(__file__).resolve().parents[1]
# Fewer at once than clients ask for, and a pool that they nearly fill: some wait, and cached pages are given out again.
_OPTIONS: Final = {"num-pages": 145, "max-num-seqs": 6, "max-num-batched-tokens": 128, "max-model-len": 1024}
_NUM_CLIENTS: Final = 6
_SYSTEM: Final = (
    "You are a patient teacher of natural science. Answer in full sentences, in the order in which things happen, name "
    "the parts and what each of them does, say what is known and what is not, and give one example from daily life. "
    "Do not greet, do not thank, and do not speak of yourself. Begin with the answer itself."
)
_QUESTIONS: Final = (
    "Why is the sky blue at noon and red in the evening?",
    "How does a river find its way to the sea?",
    "What makes bread rise?",
    "Why do leaves change their colour in autumn?",
    "How does a compass know where north is?",
    "Why does ice float on water?",
    "What is inside the Sun?",
    "How do birds find their way home?",
)
_FIRST: Final = "How does a bicycle stay upright?"
_SECOND: Final = "And why is it harder to stay upright when it is slow?"
_PATIENCE_S: Final = 400.0  # two answers at once wait until as many as may pass them have passed


def keep_asking(url: str, number: int, stop: threading.Event) -> None:
    """Asks one question after another, and leaves in the middle of an answer when `stop` is set."""
    host = urlsplit(url).netloc
    turn = number
    while not stop.is_set():
        question = _QUESTIONS[turn % len(_QUESTIONS)]
        body = {
            "messages": [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}],
            "max_tokens": 120 + 60 * number,
            "temperature": 0.7,
            "seed": turn,
            "stream": True,
        }
        connection = http.client.HTTPConnection(host, timeout=_PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            while not stop.is_set() and answer.readline():
                pass
        turn += _NUM_CLIENTS


def take(page: Chromium, url: str, seconds: float, out: Path) -> dict[str, Any]:
    """Takes both pictures; returns what was to be seen on the page."""
    page.look(width=1440, height=760)
    page.open(url)
    page.wait_for("document.querySelector('#health').textContent === 'ready'")
    page.click("summary")
    page.type("#system", _SYSTEM)
    page.type("#max-tokens", "48")
    page.evaluate("document.querySelector('#system').scrollTop = 0")
    time.sleep(seconds)  # for the sparklines to grow
    page.type("#prompt", _FIRST)
    page.press("Enter", 13)
    page.wait_for("document.querySelector('#stop').disabled", _PATIENCE_S)
    page.type("#max-tokens", "")
    page.type("#answers", "2")
    page.type("#prompt", _SECOND)
    page.press("Enter", 13)
    page.wait_for(
        "[...document.querySelectorAll('article:last-child .answers p')]"
        ".filter((answer) => answer.textContent.length > 100).length === 2"
        " && Number(document.querySelector('#legend .shared b').textContent) > 0",
        _PATIENCE_S,
    )
    (out / "server-chat.png").write_bytes(page.screenshot())
    page.click("#colours label:last-child")
    page.look(width=1440, height=760, dark=True)
    time.sleep(0.5)
    (out / "server-pool.png").write_bytes(page.screenshot("#watch"))
    seen = page.evaluate(
        "[...document.querySelectorAll('#figures > div')]"
        ".map((one) => [one.querySelector('dt').textContent, one.querySelector('span').textContent])"
    )
    page.click("#stop")
    if page.problems:
        raise ConfigError(f"the page has problems: {page.problems}")
    return dict(seen)


@contextlib.contextmanager
def _served(model: str) -> Iterator[str]:
    """A server while the block runs; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = " ".join(f"--{name} {value}" for name, value in _OPTIONS.items())
    command = f"python -m jpaged.cli serve {model} --port {port} {words} --no-progress"
    with (
        tempfile.TemporaryDirectory() as folder,
        spawned(command, f"http://127.0.0.1:{port}", Path(folder, "log")) as it,
    ):
        yield it.url


def _under_load(url: str, path: str, seconds: float, out: Path) -> dict[str, Any]:
    stop = threading.Event()
    clients = [threading.Thread(target=keep_asking, args=(url, number, stop)) for number in range(_NUM_CLIENTS)]
    # The server has an answer to give from now on, however long a step takes: the page would show a 503 as a problem.
    urllib.request.urlopen(f"{url}/internal/state", timeout=60).close()
    with chromium(path) as page:
        for client in clients:
            client.start()
        try:
            return take(page, url, seconds, out)
        finally:
            stop.set()
            for client in clients:
                client.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--url", help="of a server that runs; none is started")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--seconds", type=float, default=20.0, help="of load before the pictures")
    options = parser.parse_args()
    path = find_chromium()
    if path is None:
        raise ConfigError("there is no Chromium; install it, or name one in the variable CHROMIUM")
    options.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        url = options.url or stack.enter_context(_served(options.model))
        seen = _under_load(url, path, options.seconds, options.out)
    sizes = {name: (options.out / name).stat().st_size for name in ("server-chat.png", "server-pool.png")}
    print(*(f"{options.out / name}: {size:,} bytes" for name, size in sizes.items()), sep="\n")
    print_json("screenshot_page", {"seen": seen, "bytes": sizes})
    return 0


if __name__ == "__main__":
    sys.exit(main())
