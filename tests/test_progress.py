"""Bars on a terminal, silence elsewhere."""

from types import SimpleNamespace

import pytest

from jpaged.progress import GenerationProgress, progress_wanted


class Engine:
    """Says what it did, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.tokens = 100  # of earlier runs

    def stats(self) -> SimpleNamespace:
        self.asked += 1
        now = SimpleNamespace(pages_used=3)
        return SimpleNamespace(num_generated_tokens=self.tokens, num_running=2, num_pages=9, now=now)


@pytest.fixture
def as_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes rich take a captured stream for a wide terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")


def test_what_is_asked_holds_and_a_captured_stream_is_no_terminal() -> None:
    assert (progress_wanted(True), progress_wanted(False), progress_wanted(None)) == (True, False, False)


def test_a_disabled_bar_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine()
    with GenerationProgress(enabled=False, total=2) as bar:
        bar.note("compiling")
        bar.advance(1, engine)
    with GenerationProgress.loading("loading", False) as report:
        assert report is None
    assert engine.asked == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("as_terminal")
def test_a_bar_shows_notes_and_the_state_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine()
    with GenerationProgress(enabled=True, total=2) as bar:
        bar.note("compiling T8 S8 P4")
        bar.advance(0, engine)
        bar.advance(1, engine)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "compiling T8 S8 P4" in shown.err
    assert "2 running, 3/8 pages" in shown.err
    assert "1/2" in shown.err


@pytest.mark.usefixtures("as_terminal")
def test_loading_reports_parts(capsys: pytest.CaptureFixture[str]) -> None:
    with GenerationProgress.loading("loading a model", True) as report:
        assert report is not None
        report(1, 2)
        report(2, 2)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "loading a model" in shown.err


@pytest.mark.usefixtures("as_terminal")
def test_a_bar_is_taken_away_when_an_error_passes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), GenerationProgress(enabled=True, total=1):
        raise KeyError
    assert "\x1b[?25h" in capsys.readouterr().err  # the cursor is shown again
