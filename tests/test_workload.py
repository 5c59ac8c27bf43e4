"""`parse_lengths`: the words that describe a workload."""

from pathlib import Path

import pytest

from jpaged.errors import ConfigError
from jpaged.workload import parse_lengths

SHAREGPT = "num_prefill_tokens,num_decode_tokens\n74,918\n1400,5\n70,711\n50,2\n"


@pytest.mark.parametrize(
    ("text", "prompts", "outputs"),
    [
        ("1000+200", [1000], [200]),
        ("fixed:1000+200", [1000], [200]),
        ("fixed:7+0,max_total=7", [7], [0]),
        ("hist:10,20,3;30,40,1;", [10, 30], [20, 40]),
        ("hist:10,20,3;30,40,1,min_output=30", [30], [40]),
        ("lognormal:20+60.5,sigma=0,count=2,seed=9", [20, 20], [60, 60]),
    ],
)
def test_words(text: str, prompts: list[int], outputs: list[int]) -> None:
    lengths = parse_lengths(text)
    assert (lengths.prompt_tokens.tolist(), lengths.output_tokens.tolist()) == (prompts, outputs)


def test_files_and_selections(tmp_path: Path) -> None:
    trace, histogram = tmp_path / "a,b+1.csv", tmp_path / "h"
    trace.write_text(SHAREGPT)
    histogram.write_text("10,20,3\n30,40,1\n")
    assert len(parse_lengths(f"trace:{trace}")) == 4
    lengths = parse_lengths(f"trace:{trace},first_turns,max_prompt=1023,min_output=4")
    assert lengths.prompt_tokens.tolist() == [74, 70]
    assert lengths.source == "a,b+1.csv (first_turns, max_prompt=1023, min_output=4)"
    assert parse_lengths(f"hist:{histogram}").weights.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lengths are '', expected fixed:PROMPT"),
        ("1000", "expected fixed:PROMPT"),
        ("fixed:1.5+2", "expected fixed:PROMPT"),
        ("fixed:1+2+3", "expected fixed:PROMPT"),
        ("fixed:-1+2", "expected fixed:PROMPT"),
        ("fixed:٣+٣", "expected fixed:PROMPT"),
        ("trace:", "expected fixed:PROMPT"),
        ("lognormal:20", "expected fixed:PROMPT"),
        ("normal:20+30", "expected fixed:PROMPT"),
        ("fixed:1+2,first_turns", "fixed 1\\+2 knows no conversations"),
        ("fixed:1+2,seed=3", "seed belongs to lognormal alone"),
        ("fixed:1+2,max_total=1,max_total=5", "max_total twice"),
        ("fixed:1+2,max_total=x", "max_total is 'x', expected a number"),
        ("fixed:1+2,max_total", "max_total is None, expected a number"),
        ("fixed:1+2,first_turns=1", "first_turns takes no value"),
        ("fixed:0+2", "prompt_tokens of fixed 0\\+2 are 0"),
        ("fixed:9999999999+2", "9999999999"),
        ("lognormal:20+30,sigma=9", "sigma"),
        ("trace:no-such-file,first_turns", "no-such-file does not exist"),
    ],
)
def test_other_words_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_lengths(text)
