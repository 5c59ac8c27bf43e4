"""Readers of traces and histograms: the columns they give, and the line that they name when something is wrong."""

import contextlib
import gzip
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.errors import ConfigError
from jpaged.lengths import Lengths
from jpaged.trace_file import read_histogram, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:47.1805900,879,0
"""
SHAREGPT = """num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio
74,918,992,0.08
1000,5,1005,0.3
70,711,781,1.9
70,9,79,2.7
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 513, "output_length": 5, "hash_ids": [0, 7]}
{"timestamp": 1500, "input_length": 512, "output_length": 6, "hash_ids": [0]}
"""


@pytest.fixture(params=["plain", "gzip", "gzip without the name"])
def file(request, tmp_path: Path):
    """Writes a text as a file."""

    def write(text: str) -> Path:
        path = tmp_path / ("trace.gz" if request.param == "gzip" else "trace")
        path.write_bytes(text.encode() if request.param == "plain" else gzip.compress(text.encode()))
        return path

    return write


def test_azure(file):
    lengths = read_trace(file(AZURE))
    assert lengths.prompt_tokens.tolist() == [374, 879, 396], "in order of arrival"
    assert lengths.output_tokens.tolist() == [44, 0, 109]
    assert lengths.arrival_s.tolist() == [0, 0.5, 4.314579]
    assert lengths.source.startswith("trace")
    assert (lengths.hash_ids, lengths.conversation_ids, lengths.weights) == (None, None, None)


def test_azure_times_may_have_a_zone(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00+00:00,1,2\n2024-05-10 02:00:01.5+02:00,3,4\n"
    )
    assert read_trace(path).arrival_s.tolist() == [0, 1.5]


def test_sharegpt(file):
    lengths = read_trace(file(SHAREGPT))
    assert lengths.prompt_tokens.tolist() == [74, 1000, 70, 70]
    assert lengths.output_tokens.tolist() == [918, 5, 711, 9]
    assert lengths.conversation_ids.tolist() == [0, 0, 1, 2], "a turn holds what was said before"
    assert lengths.arrival_s is None


def test_mooncake(file):
    lengths = read_trace(file(MOONCAKE))
    assert lengths.prompt_tokens.tolist() == [512, 513]
    assert lengths.output_tokens.tolist() == [6, 5]
    assert lengths.arrival_s.tolist() == [0, 1.5]
    assert (lengths.hash_ids, lengths.tokens_per_hash_id) == (((0,), (0, 7)), 512)


def test_columns_may_stand_in_another_order_and_lines_may_be_blank(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbf\r\n"GeneratedTokens", ContextTokens,more,TIMESTAMP\r\n\r\n4,3,x,2024-05-10\r\n')
    lengths = read_trace(path)
    assert (lengths.prompt_tokens.tolist(), lengths.output_tokens.tolist()) == ([3], [4])


def replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: ''; expected TIMESTAMP,ContextTokens,GeneratedTokens .*Mooncake"),
        ("a,b\n1,2\n", "line 1: 'a,b'; expected TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        (replaced(AZURE, "396,109", "396"), "line 3: 2 columns in .*; expected 3"),
        (replaced(AZURE, "396", "396.0"), "line 3: ContextTokens '396.0'; expected an integer of 1 to"),
        (replaced(AZURE, "396", "-3"), "line 3: ContextTokens '-3'"),
        (replaced(AZURE, "879", "0"), "line 4: ContextTokens 0; expected"),
        (replaced(AZURE, "879", "9" * 5000), "line 4: ContextTokens '9999"),
        (replaced(AZURE, "109", "٣"), "line 3: GeneratedTokens"),
        (replaced(AZURE, "2023-11-16 18:15:50.9951690", "yesterday"), "line 3: TIMESTAMP 'yesterday'; expected a time"),
        (replaced(SHAREGPT, "70,711", "x,711"), "line 4: num_prefill_tokens 'x'"),
        (replaced(MOONCAKE, "[0, 7]", "[0, 7, 8]"), "line 1: 3 hash_ids for 513 tokens; expected 2, one for each 512"),
        (replaced(MOONCAKE, "[0, 7]", "[0, -7]"), r"line 1: hash_ids \[0, -7\]; expected a list of integers"),
        (replaced(MOONCAKE, "[0, 7]", "[0, true]"), "line 1: hash_ids"),
        (replaced(MOONCAKE, "[0, 7]", "7"), "line 1: hash_ids 7"),
        (replaced(MOONCAKE, "1500", "NaN"), "line 2: timestamp nan; expected a number"),
        (replaced(MOONCAKE, "1500", "true"), "line 2: timestamp True"),
        (replaced(MOONCAKE, "1500", "1" + "0" * 400), "line 2: timestamp 1"),
        (replaced(MOONCAKE, '"input_length": 512', '"input_length": "512.5"'), "line 2: input_length '512.5'"),
        (replaced(MOONCAKE, '"output_length": 6, ', ""), "line 2: .*expected a JSON object with timestamp"),
        (replaced(MOONCAKE, "[0]}", "[0]"), "line 2: .*expected a JSON object"),
        (MOONCAKE + "[" * 100_000, "line 3: .*expected a JSON object"),
        (MOONCAKE + "[1]\n", r"line 3: '\[1\]'"),
    ],
)
def test_a_wrong_line_is_named(text: str, words: str, tmp_path: Path):
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words) as error:
        read_trace(path)
    assert "trace" in str(error.value)
    assert len(str(error.value)) < 500


def test_files_that_cannot_be_read_are_named(tmp_path: Path):
    packed = gzip.compress(AZURE.encode() * 1000)
    for name, data in {"cut": packed[:100], "head": packed[:5], "flipped": packed[:40] + b"\0" * 40}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=f"{name}, after line .*cannot be read"):
            read_trace(tmp_path / name)
    (tmp_path / "latin").write_bytes(AZURE.encode() + b"\xe9")
    with pytest.raises(ConfigError, match=r"latin, after line .*not UTF-8"):
        read_trace(tmp_path / "latin")
    with pytest.raises(ConfigError, match="missing does not exist"):
        read_trace(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace("a\0b")


LINES = [*AZURE.splitlines(), *SHAREGPT.splitlines(), *MOONCAKE.splitlines(), "1,2", "{}", "", '"', "[]", ",,", "#"]
DAMAGE = st.tuples(st.integers(0, 200), st.sampled_from(["", "0", "-", ",", "}", "\0", "é", "9" * 30, "\n", "e9"]))


@settings(max_examples=60)
@given(st.lists(st.sampled_from(LINES), max_size=5), st.lists(DAMAGE, max_size=3), st.sampled_from(["", "gzip"]))
def test_whatever_a_file_holds_the_answer_is_lengths_or_one_error(lines, damage, packed):
    text = "\n".join(lines)
    for place, new in damage:
        text = text[:place] + new + text[place + 1 :]
    data = gzip.compress(text.encode(), mtime=0) if packed else text.encode()
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        for read in (read_trace, read_histogram):
            with contextlib.suppress(ConfigError):
                assert isinstance(read(file.name), Lengths)


def test_histogram(file):
    lengths = read_histogram(file("prompt,output,weight\n# most\n1000,200,3\n\n50,10,0.5\n50,10,0\n7,0\n"))
    assert lengths.prompt_tokens.tolist() == [1000, 50, 7], "a weight of 0 is no request"
    assert lengths.output_tokens.tolist() == [200, 10, 0]
    assert lengths.weights.tolist() == [3, 0.5, 1]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "the histogram holds no requests"),
        (["1,1,0"], "the histogram holds no requests"),
        (["prompt,output", "1,2,3,4"], "line 2: '1,2,3,4'; expected prompt tokens, output tokens, weight"),
        (["1,2", "prompt,output"], "line 2: prompt tokens 'prompt'"),
        (["1"], "line 1: '1'"),
        (["0,2"], "line 1: prompt tokens 0; expected an integer of 1"),
        (["1,2,-1"], "line 1: the weight '-1'; expected a number of at least 0"),
        (["1,2,nan"], "line 1: the weight 'nan'"),
    ],
)
def test_a_wrong_row_of_a_histogram_is_named(rows, words):
    with pytest.raises(ConfigError, match=words):
        read_histogram(rows)
