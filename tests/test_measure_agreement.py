"""What the agreement script makes of outputs."""

import json
from pathlib import Path

import pytest

from jpaged.model_bytes import weight_bytes
from jpaged.model_shapes import model_shape
from jpaged.models.quantised import FEW_TOKENS_IN_PIECES, FEW_TOKENS_WIDENED
from jpaged.request import Output, TokenLogprobs
from scripts.golden_prompts import PROMPTS
from scripts.measure_agreement import ROWS, agreement, prefix, render


class Shown:
    """What of an `Output` is looked at."""

    def __init__(self, *entries: tuple[int, int]):
        self.prompt_logprobs = (None, *(TokenLogprobs(token, -0.5, ((best, -0.5),)) for token, best in entries))


def test_only_what_follows_the_prompt_counts() -> None:
    shown = Shown((1, 9), (2, 2), (3, 3), (4, 9), (5, 5))
    assert agreement(shown, 2) == pytest.approx(3 / 4)  # type: ignore[arg-type]
    assert agreement(shown, 5) == 1  # type: ignore[arg-type]
    assert "prompt_logprobs" in Output.__dataclass_fields__


@pytest.mark.parametrize(("tokens", "part"), [((1, 2, 3, 4), 1), ((1, 2, 9, 4), 0.5), ((9, 2, 3, 4), 0)])
def test_the_prefix_ends_where_the_first_token_differs(tokens, part) -> None:
    assert prefix(tokens, (1, 2, 3, 4)) == part


def test_there_are_as_many_prompts_as_the_text_says() -> None:
    assert len([prompt for prompt in PROMPTS if prompt.kind != "long"]) == ROWS == 20


def test_a_record_becomes_a_table() -> None:
    plain = {"perplexity": 20.0, "rise_percent": 0.0, "error_percent": 0.0}
    form = plain | {"rise_percent": 0.219, "agreement": 0.9766, "lowest_agreement": 0.92, "prefix": 0.5}
    versions = {"jax": "0.11.2"}
    record = {"date": "2026-11-30", "device": "CPU", "commit": "0a1b", "versions": versions, "python": "3.12"}
    text = render(record | {"results": {"dtype": "float32", "weights": {"none": plain, "int8": form}}})
    assert "| float32 | 20.000 | – | – | – | – |" in text
    assert "| int8 | 20.000 | 0.22 ± 0.00 | 97.7 | 92.0 | 50.0 |" in text


def test_the_page_has_the_record() -> None:
    docs = Path(__file__).parent.parent / "docs"
    record = json.loads((docs / "benchmarks" / "weights-cpu.json").read_text(encoding="utf-8"))
    assert render(record) in (docs / "models.md").read_text(encoding="utf-8")
    int8 = record["results"]["weights"]["int8"]
    assert int8["rise_percent"] + int8["error_percent"] < 1  # what was asked of it
    assert int8["agreement"] >= 0.95
    fp8 = record["results"]["weights"]["fp8"]
    assert fp8["rise_percent"] - fp8["error_percent"] > 1  # and what the page says of it


def test_what_the_page_says_of_sizes_and_steps_is_so() -> None:
    text = (Path(__file__).parent.parent / "docs" / "models.md").read_text(encoding="utf-8")
    llama = model_shape("llama-3.1-8b")
    whole, int8 = (weight_bytes(llama, "bfloat16", form) / 1e9 for form in (None, "int8"))
    assert f"Llama-3.1-8B in bfloat16, int8 leaves {int8:.0f} GB of {whole:.0f}" in " ".join(text.split())
    assert f"| up to {FEW_TOKENS_IN_PIECES}: activations in two int8 pieces" in text
    assert f"| up to {FEW_TOKENS_WIDENED}: codes are widened" in text
