"""`Chromium`: a headless browser, driven by its DevTools protocol over a pair of pipes. Needs nothing but Chromium."""

import base64
import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any, Final

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# No sandbox: it does not start for root, and the only pages shown are our own. The rest keeps it from asking the
# network for what nobody asked it for.
_OPTIONS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_PATIENCE_S: Final = 30.0
_POLL_S: Final = 0.02


def find_chromium() -> str | None:
    """Path of a Chromium: that of the variable CHROMIUM, else the first that is found; `None` if there is none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


class Chromium:
    """One page of a browser that runs.

    Attributes:
      problems: exceptions of the page's scripts and errors on its console, what its policy forbids included.
      requested: addresses that the page asked for.
    """

    def __init__(self, path: str, folder: Path) -> None:
        to_browser, from_us = _pipe()
        from_browser, to_us = _pipe()
        null = os.open(os.devnull, os.O_RDWR)
        actions = [
            *((os.POSIX_SPAWN_DUP2, null, fd) for fd in (0, 1, 2)),
            (os.POSIX_SPAWN_DUP2, to_browser, 3),
            (os.POSIX_SPAWN_DUP2, to_us, 4),
        ]
        arguments = [path, *_OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        self._process = os.posix_spawn(path, arguments, os.environ, file_actions=actions, setpgroup=0)
        for fd in (to_browser, to_us, null):
            os.close(fd)
        self._out, self._in, self._rest = from_us, from_browser, b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.requested: list[str] = []
        pages = self._call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in pages if one["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Runtime", "Page", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Goes to a page, and waits until it has loaded."""
        failure = self._call("Page.navigate", url=url).get("errorText")
        if failure:
            raise RuntimeError(f"{url} does not open: {failure}")
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; of a promise, what it becomes.

        Raises:
          RuntimeError: it threw.
        """
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {_words(answer['exceptionDetails'])}")
        return answer["result"].get("value")

    def wait_for(self, expression: str, patience_s: float = _PATIENCE_S) -> Any:
        """Waits until a JavaScript expression is true; returns its value.

        Raises:
          TimeoutError: it is still false; the message has the text of the page.
        """
        end_s = time.monotonic() + patience_s
        while not (value := self.evaluate(expression)):
            if time.monotonic() > end_s:
                text = self.evaluate("document.body.innerText")
                raise TimeoutError(f"{expression} is {value!r} after {patience_s} s; the page says:\n{text}")
            time.sleep(_POLL_S)
        return value

    def click(self, selector: str) -> None:
        """Presses and lets go the mouse in the middle of an element."""
        place = self.evaluate(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            " one.scrollIntoView({block: 'nearest'}); const box = one.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self.move(*place)
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, *place, button="left", clickCount=1)

    def move(self, x: float, y: float) -> None:
        """Moves the mouse, in CSS pixels."""
        self._mouse("mouseMoved", x, y)

    def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def type(self, selector: str, text: str) -> None:
        """Replaces what is in a field, as if it were typed.

        Raises:
          RuntimeError: the field cannot be focused: it is hidden or disabled.
        """
        field = f"document.querySelector({json.dumps(selector)})"
        if not self.evaluate(f"({field}.focus(), {field}.select(), document.activeElement === {field})"):
            raise RuntimeError(f"{selector} cannot be typed into: it is hidden or disabled")
        self._call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        """Presses a key, such as ("Enter", 13), where the focus is."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def look(self, *, width: int, height: int, dark: bool = False, scale: float = 1.0) -> None:
        """Sets the size of the window in CSS pixels, and what the person prefers."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, selector: str | None = None) -> bytes:
        """A PNG of the window, or of one element."""
        options: dict[str, Any] = {"format": "png"}
        if selector is not None:
            box = self.evaluate(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
            options["clip"] = {name: box[name] for name in ("x", "y", "width", "height")} | {"scale": 1}
        return base64.b64decode(self._call("Page.captureScreenshot", **options)["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        left = json.dumps(message).encode() + b"\0"
        while left:
            left = left[os.write(self._out, left) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select([self._in], [], [], _PATIENCE_S)[0]:
                raise TimeoutError(f"Chromium has said nothing for {_PATIENCE_S} s")
            piece = os.read(self._in, 2**16)
            if not piece:
                raise RuntimeError("Chromium has ended")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.problems.append(_words(params["exceptionDetails"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    def close(self) -> None:
        """Ends the browser and all its processes."""
        os.close(self._out)
        os.close(self._in)
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)


@contextmanager
def chromium(path: str) -> Iterator[Chromium]:
    """A browser while the block runs, with a profile of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Chromium(path, Path(folder))
        try:
            yield browser
        finally:
            browser.close()


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are no numbers that a new process gives a meaning to."""
    reading, writing = os.pipe()
    high = fcntl.fcntl(reading, fcntl.F_DUPFD_CLOEXEC, 10), fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(reading)
    os.close(writing)
    return high


def _words(details: dict[str, Any]) -> str:
    return details.get("exception", {}).get("description") or details["text"]
