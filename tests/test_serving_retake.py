"""All records at once: what is run, what is refused, what is kept, and that a failure keeps the old record."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jpaged.errors import ConfigError
from scripts.render_benchmarks import ROOT
from scripts.serving import retake
from scripts.serving.retake import PARTS, Part
from tests.server import tiny_model

LINE = {"script": "x", "commit": "c", "date": "d", "device": "e", "python": "p", "versions": {}, "results": {"a": 1}}
PRINT = "import os; print('a table'); print(os.environ['LINE'])"
GOOD = Part("good", "serving-good", f'-c "{PRINT}"')
BAD = Part("bad", "serving-bad", "-c 'import sys; print(1); sys.exit(\"it is so\")'")


@pytest.fixture
def root(tmp_path, monkeypatch) -> Iterator[Path]:
    for name in ("docs/benchmarks", "docs/images"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "docs/benchmarks/serving-bad.json").write_text("old")
    rendered: list[Path] = []
    monkeypatch.setattr(retake, "stale_documents", lambda root, write: rendered.append(root))
    monkeypatch.setattr(retake, "environment", lambda: {"commit": "c"})
    monkeypatch.setattr(tiny_model, "write_model", lambda folder, max_position_embeddings: folder)
    monkeypatch.setenv("LINE", json.dumps(LINE))
    monkeypatch.setattr(retake, "_RECORDS", tmp_path)
    yield tmp_path
    if (tmp_path / "docs/benchmarks/serving-good.json").exists():
        assert set(rendered) == {tmp_path}


def run(monkeypatch, *arguments: str, parts: tuple[Part, ...] = (GOOD, BAD)) -> int:
    monkeypatch.setattr(retake, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["retake", *arguments])
    return retake.main()


def results(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])["results"]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
@pytest.mark.parametrize("short", [False, True])
def test_commands_are_complete(part: Part, short: bool) -> None:
    words = part.words(short=short, folder="/a", port=1234, trace="'/b c/d'", lm_eval="--lm-eval '/e f'")
    assert words[0] == sys.executable
    assert not any("{" in word or "'" in word for word in words)
    script = words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1]
    assert (ROOT / script).is_file()
    if part.name == "trace":
        assert "trace:/b c/d,max_total=1800" in words
    if part.name == "clients":
        assert words[-2:] == ["--lm-eval", "/e f"]
    for _, place in part.pictures:
        assert (ROOT / place).is_file()  # it is replaced
    if part.record is not None:
        assert (ROOT / "docs/benchmarks" / f"{part.record}.json").is_file()


def is_alive(process_id: int) -> bool:
    """And no zombie, which waits for whoever reaps orphans here."""
    try:
        os.kill(process_id, 0)
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_what_fails_keeps_the_old_record(root, monkeypatch, capsys) -> None:
    assert run(monkeypatch) == 1
    kept = root / "docs/benchmarks"
    assert json.loads((kept / "serving-good.json").read_text()) == LINE
    assert (kept / "serving-bad.json").read_text() == "old"
    said = capsys.readouterr()
    assert "exit status 1" in said.err
    assert "it is so" in said.err
    last = json.loads(said.out.splitlines()[-1])
    assert set(last["results"]["failed"]) == {"bad"}
    assert "it is so" in last["results"]["failed"]["bad"]
    assert set(last["results"]["seconds"]) == {"good", "bad"}


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (Part("bad", "serving-bad", "-c pass"), "expected the JSON line"),
        (Part("bad", "serving-bad", "-c 'print(1)'"), "expected an object"),
        (Part("bad", "serving-bad", GOOD.command, "", (("x.png", "docs/images/x.png"),)), "it made no x.png"),
        (Part("bad", None, "-c pass"), "expected the JSON line"),
        (Part("bad", "serving-bad", f'-c "{PRINT.replace("LINE", "OTHER")}"'), "of commit z, expected c"),
    ],
)
def test_what_a_part_made_is_checked_before_anything_is_written(root, monkeypatch, capsys, part, why) -> None:
    monkeypatch.setenv("OTHER", json.dumps(LINE | {"commit": "z"}))
    assert run(monkeypatch, parts=(GOOD, part)) == 1
    assert (root / "docs/benchmarks/serving-good.json").exists()
    assert (root / "docs/benchmarks/serving-bad.json").read_text() == "old"
    failed = results(capsys)["failed"]
    assert set(failed) == {"bad"}
    assert why in failed["bad"]


def test_rendering_that_fails_is_told(root, monkeypatch, capsys) -> None:
    render = retake.stale_documents

    def fail(root: Path, write: bool) -> None:
        render(root, write)
        raise ValueError("a record lacks a figure")

    monkeypatch.setattr(retake, "stale_documents", fail)
    assert run(monkeypatch, parts=(GOOD,)) == 1
    assert results(capsys)["failed"] == {"rendering": "a record lacks a figure"}


def test_a_part_that_takes_too_long_ends_with_all_that_it_started(root, monkeypatch, capsys, tmp_path) -> None:
    """What knows an end by Ctrl-C, as a server's script does, has it; the rest is killed."""
    told, child = tmp_path / "told", tmp_path / "child"
    code = (
        "import subprocess, sys, time\n"
        "ignores = 'import signal, time; signal.signal(2, signal.SIG_IGN); print(1, flush=True); time.sleep(3600)'\n"
        "child = subprocess.Popen([sys.executable, '-c', ignores], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        f"open('{child}', 'w').write(str(child.pid))\n"
        "try:\n    time.sleep(3600)\n"
        f"finally:\n    open('{told}', 'w').write('ended')\n"
    )
    script = tmp_path / "slow.py"
    script.write_text(code)

    class Impatient(subprocess.Popen):
        """Its time is over when it sleeps, whenever that is."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout != 0.125:
                return super().wait(timeout)
            while not (child.exists() and child.read_text()):
                assert self.poll() is None
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(retake.subprocess, "Popen", Impatient)
    monkeypatch.setattr(retake, "_LIMIT_S", 0.125)
    monkeypatch.setattr(retake, "_STOP_S", 3600)
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as behind `&`
    try:
        assert run(monkeypatch, parts=(Part("slow", "serving-bad", f"{script}"),)) == 1
    finally:
        assert signal.signal(signal.SIGINT, ignored) is signal.SIG_IGN
    assert results(capsys)["failed"] == {"slow": "not done within 0.125 s"}
    assert told.read_text() == "ended"
    while is_alive(int(child.read_text())):
        time.sleep(0.01)


def test_short_runs_keep_nothing(root, monkeypatch) -> None:
    monkeypatch.setattr(retake, "environment", lambda: {"commit": "c-dirty"})
    monkeypatch.setenv("LINE", json.dumps(LINE | {"commit": "c-dirty"}))
    assert run(monkeypatch, "--short", "--only", "good") == 0
    assert not (root / "docs/benchmarks/serving-good.json").exists()


def test_a_tree_that_differs_from_its_commit_is_refused(root, monkeypatch, capsys) -> None:
    monkeypatch.setattr(retake, "environment", lambda: {"commit": "c-dirty"})
    monkeypatch.setenv("LINE", json.dumps(LINE | {"commit": "c-dirty"}))
    assert run(monkeypatch, parts=(GOOD,)) == 2
    assert "the checkout is c-dirty, expected a clean one; commit" in capsys.readouterr().err
    assert not (root / "docs/benchmarks/serving-good.json").exists()
    assert run(monkeypatch, "--dirty", parts=(GOOD,)) == 0
    assert (root / "docs/benchmarks/serving-good.json").exists()


@pytest.mark.parametrize("had", [True, False])
def test_the_clients_record_keeps_its_part_of_lm_eval(root, monkeypatch, capsys, had) -> None:
    clients = Part("clients", "serving-clients-cpu", "-c \"import os; print(os.environ['LINE'])\" {lm_eval}")
    record = root / "docs/benchmarks/serving-clients-cpu.json"
    record.write_text(json.dumps(LINE | {"results": {"lm_eval": {"accuracy": 1} if had else None}}))
    assert run(monkeypatch, parts=(GOOD, clients)) == (2 if had else 0)
    assert ("clients needs --lm-eval PROGRAM" in capsys.readouterr().err) == had
    assert run(monkeypatch, "--lm-eval", "/a b", parts=(GOOD, clients)) == 0


@pytest.mark.parametrize("before", [None, "cuda"])
def test_the_platform_of_jax_is_left_as_it_was(root, monkeypatch, before) -> None:
    seen = []
    monkeypatch.delenv("JAX_PLATFORMS")
    if before is not None:
        monkeypatch.setenv("JAX_PLATFORMS", before)
    monkeypatch.setattr(retake, "print_json", lambda *_: seen.append(os.environ["JAX_PLATFORMS"]))
    assert run(monkeypatch, "--only", "good") == 0
    assert (seen, os.environ.get("JAX_PLATFORMS")) == (["cpu"], before)


def test_what_cannot_be_run_is_refused(monkeypatch, capsys) -> None:
    with pytest.raises(ConfigError, match="there is no part 'x', expected some of soak, "):
        retake.chosen("soak,x")
    monkeypatch.setattr(sys, "argv", ["retake", "--only", "trace"])
    assert retake.main() == 2
    assert "trace needs --trace FILE" in capsys.readouterr().err
