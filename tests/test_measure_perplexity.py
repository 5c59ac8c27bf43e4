"""What the perplexity script makes of scores."""

import math

import pytest

from jpaged.llm import Score
from scripts.measure_perplexity import TEXT, compare


def scores(*means: float) -> list[Score]:
    return [Score((1, 2, 3), (-mean - 0.25, -mean + 0.25)) for mean in means]


def test_the_rise_is_that_of_the_mean_over_windows() -> None:
    found = compare(scores(1.01, 3.03), scores(1.0, 3.0))
    assert found["perplexity"] == pytest.approx(math.exp(2.02), abs=1e-4)
    assert found["rise_percent"] == pytest.approx(100 * (math.exp(0.02) - 1), abs=1e-3)
    assert found["error_percent"] == pytest.approx(1.0)  # differences of 1 and 3 percent


def test_nothing_rises_above_itself() -> None:
    same = scores(2.0)
    assert compare(same, same) == {"perplexity": 7.3891, "rise_percent": 0.0, "error_percent": 0.0}


def test_the_text_is_what_the_record_names() -> None:
    text = TEXT.read_text(encoding="ascii")
    assert [f"CHAPTER {n}\n" in text for n in ("I", "II", "III", "IV", "V")] == [True] * 4 + [False]
    assert "Alice was beginning to get very tired" in text
