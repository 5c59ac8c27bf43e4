"""The demo: its arithmetic, and a run with a tiny model. What the real one answers: tests/test_default_model.py."""

from pathlib import Path

import pytest

from scripts import demo
from tests.cli.conftest import tiny_folder

__all__ = ["tiny_folder"]  # a fixture


def some_figures() -> demo.Figures:
    return demo.Figures(
        requests=2,
        prompt_tokens=30,
        output_tokens=50,
        seconds=2.0,
        compile_seconds=1.0,
        mean_batch_size=1.5,
        pages_at_peak=5,
        num_pages=100,
        page_size=16,
        tokens_at_peak=60,
        running_at_peak=2,
        bytes_per_token=1024.0,
        reserved_tokens=120,
    )


def test_figures() -> None:
    figures = some_figures().as_dict()
    assert figures["tokens_per_second"] == 25
    assert figures["paged_bytes"] == 5 * 16 * 1024
    assert figures["paged_wasted_fraction"] == 0.25
    assert figures["contiguous_bytes"] == 2 * 120 * 1024
    assert figures["contiguous_wasted_fraction"] == 0.75


def test_the_table_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    demo.print_figures(some_figures())
    shown = capsys.readouterr().out
    for words in ("5 of 100, of 16 tokens", "25.0%", "75.0%", "0.1 MiB", "0.2 MiB", "[6]", "3 times less"):
        assert words in shown
    for note in range(1, 7):
        assert shown.count(f"[{note}]") >= 2, "a footnote that no row points at, or a row without its footnote"


def test_a_run_with_a_tiny_model(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = demo.run(demo.load(str(tiny_folder), num_pages=513))
    shown = capsys.readouterr().out
    for question in demo.QUESTIONS:
        assert question.split(".")[0][:40] in shown
    assert figures.requests == len(demo.QUESTIONS)
    assert figures.prompt_tokens > sum(map(len, demo.QUESTIONS))  # a token a byte, and the template
    assert 0 < figures.tokens_at_peak <= figures.pages_at_peak * figures.page_size
    assert 1 <= figures.mean_batch_size <= len(demo.QUESTIONS)
    assert figures.reserved_tokens == 512 * 16
    assert figures.bytes_per_token == 2 * 2 * 2 * 8 * 4  # K and V, layers, heads, width, float32
    # No sequence wastes more than a page but for one token.
    assert figures.paged_wasted_fraction <= figures.running_at_peak * 15 / (figures.pages_at_peak * 16)
    assert figures.paged_wasted_fraction < figures.contiguous_wasted_fraction < 1
