"""All records at once: what is run, what is kept, and that a failure keeps the old record."""

import json
import sys
from pathlib import Path

import pytest

from jpaged.errors import ConfigError
from scripts.render_benchmarks import ROOT
from scripts.serving import retake
from scripts.serving.retake import PARTS, Part
from tests.server import tiny_model

LINE = {"script": "x", "commit": "c", "date": "d", "device": "e", "python": "p", "versions": {}, "results": {"a": 1}}
GOOD = Part("good", "serving-good", "-c \"import os; print('a table'); print(os.environ['LINE'])\"")
BAD = Part("bad", "serving-bad", "-c 'import sys; print(1); sys.exit(\"it is so\")'")


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    for name in ("docs/benchmarks", "docs/images"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "docs/benchmarks/serving-bad.json").write_text("old")
    monkeypatch.setattr(retake, "stale_documents", lambda root, write: [])
    monkeypatch.setattr(tiny_model, "write_model", lambda folder, max_position_embeddings: folder)
    monkeypatch.setenv("LINE", json.dumps(LINE))
    monkeypatch.setattr(retake, "PARTS", (GOOD, BAD))
    monkeypatch.setattr(retake, "_RECORDS", tmp_path)
    return tmp_path


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


def test_what_fails_keeps_the_old_record(root, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["retake"])
    assert retake.main() == 1
    kept = root / "docs/benchmarks"
    assert json.loads((kept / "serving-good.json").read_text()) == LINE
    assert (kept / "serving-bad.json").read_text() == "old"
    said = capsys.readouterr()
    assert "exit status 1" in said.err
    assert "it is so" in said.err
    last = json.loads(said.out.splitlines()[-1])
    assert last["results"]["failed"] == ["bad"]
    assert set(last["results"]["seconds"]) == {"good", "bad"}


def test_short_runs_keep_nothing(root, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["retake", "--short", "--only", "good"])
    assert retake.main() == 0
    assert not (root / "docs/benchmarks/serving-good.json").exists()


def test_what_cannot_be_run_is_refused(monkeypatch, capsys) -> None:
    with pytest.raises(ConfigError, match="there is no part 'x', expected some of soak, "):
        retake.chosen("soak,x")
    monkeypatch.setattr(sys, "argv", ["retake", "--only", "trace"])
    assert retake.main() == 2
    assert "trace needs --trace FILE" in capsys.readouterr().err
