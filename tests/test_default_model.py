"""What the demo and the README's first example say, with the model that they use."""

import ast
import json
from pathlib import Path

import pytest

from scripts import demo
from tests.examples import README, example, run


def test_the_demo_answers_sensibly(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["demo.py", "--json"])
    monkeypatch.setattr(demo, "MAX_TOKENS", 14)
    demo.main()
    shown = capsys.readouterr().out
    assert "A: The capital of France is Paris." in shown
    assert "A: I walked to school and ate an apple." in shown
    figures = json.loads(shown.splitlines()[-1])["results"]
    assert figures["paged_wasted_fraction"] < 0.2
    assert figures["contiguous_wasted_fraction"] > 0.95


def test_the_readmes_example_runs(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jpaged.config.default_token_buckets", lambda *_: (32, 512))  # one step compiles, not four
    source = example(README, "run with the default model", "LLM(")
    assert len([line for line in source.splitlines() if line.strip()]) <= 10
    sharing = example(README, "run with the default model", "best_of")
    names, printed = run(source + sharing, "README.md")
    assert "'The capital of France is' -> ' Paris" in printed
    assert "PoolUse(pages_used=" in printed
    *_, three, two = printed.splitlines()
    assert (len(ast.literal_eval(three)), len(ast.literal_eval(two))) == (3, 2)
    assert names["llm"].stats().num_copied_pages > 0
