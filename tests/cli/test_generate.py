"""`jpaged generate` against `LLM.generate` on the same model."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import SMALL

TEN = ("--max-tokens", "10", *SMALL)


@pytest.fixture(scope="module")
def answers(tiny_folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Text and tokens of ten-token answers, by the library."""
    from jpaged import LLM, SamplingParams

    llm = LLM(tiny_folder, max_num_seqs=4, num_pages=65, max_model_len=256)
    assert llm.tokenizer is not None
    chat = llm.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    params = SamplingParams(temperature=0.0, max_tokens=10)
    outputs = llm.generate(["Hi", "Hello there", chat], params)
    names = ("Hi", "Hello there", "chat")
    return {name: (output.text, list(output.token_ids)) for name, output in zip(names, outputs, strict=True)}


def test_one_answer_is_printed_as_it_is(jpaged, tiny_folder: Path, answers) -> None:
    result = jpaged("generate", "Hi", "--model", tiny_folder, *TEN)
    assert result.exit_code == 0
    assert result.stdout == answers["Hi"][0] + "\n"
    assert result.stderr == ""


def test_streamed_text_is_the_same(jpaged, tiny_folder: Path, answers) -> None:
    assert jpaged("generate", "Hi", "--stream", "--model", tiny_folder, *TEN).stdout == answers["Hi"][0] + "\n"


def test_several_answers_have_headers(jpaged, tiny_folder: Path, answers) -> None:
    result = jpaged("generate", "Hi", "Hello there", "--model", tiny_folder, *TEN)
    assert result.stdout == (f"==> Hi <==\n{answers['Hi'][0]}\n\n==> Hello there <==\n{answers['Hello there'][0]}\n")


def test_lines_of_standard_input_give_lines_of_json(jpaged, tiny_folder: Path, answers) -> None:
    result = jpaged("generate", "--json", "--model", tiny_folder, *TEN, input="Hi\n\n  \nHello there\r\n")
    assert result.exit_code == 0
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["index"] for record in records] == [0, 1]
    assert [record["prompt"] for record in records] == ["Hi", "Hello there"]
    for record in records:
        assert (record["text"], record["token_ids"]) == answers[record["prompt"]]
        assert record["finish_reason"] == "length"
        assert record["num_prompt_tokens"] == len(record["prompt"])


def test_a_dash_stands_for_standard_input(jpaged, tiny_folder: Path) -> None:
    args = ("generate", "first", "-", "last", "--json", "--model", tiny_folder, "--max-tokens", "1", *SMALL)
    records = [json.loads(line) for line in jpaged(*args, input="a\nb").stdout.splitlines()]
    assert [record["prompt"] for record in records] == ["first", "a", "b", "last"]


def test_chat_puts_prompts_through_the_template(jpaged, tiny_folder: Path, answers) -> None:
    result = jpaged("generate", "--chat", "Hi", "--json", "--model", tiny_folder, *TEN)
    record = json.loads(result.stdout)
    assert (record["prompt"], record["token_ids"]) == ("Hi", answers["chat"][1])


def test_a_seed_repeats_a_sample(jpaged, tiny_folder: Path) -> None:
    args = ("generate", "Hi", "--temperature", "2", "--json", "--model", tiny_folder, *TEN)
    texts = [json.loads(jpaged(*args, "--seed", seed).stdout)["token_ids"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_a_stop_text_ends_the_answer(jpaged, tiny_folder: Path) -> None:
    from tests.tiny_vocabs import byte_alphabet

    sampled = ("--temperature", "2", "--seed", "3", "--max-tokens", "200", "--json", *SMALL)
    text = json.loads(jpaged("generate", "Hi", "--model", tiny_folder, *sampled).stdout)["text"]
    stop = next(c for c in text[5:] if c in byte_alphabet() and c.isascii())
    record = json.loads(jpaged("generate", "Hi", "--model", tiny_folder, *sampled, "--stop", stop).stdout)
    assert (record["text"], record["stop_reason"]) == (text[: text.index(stop)], stop)


def test_log_probabilities(jpaged, tiny_folder: Path, answers) -> None:
    args = ("generate", "Hi", "--logprobs", "2", "--model", tiny_folder, *TEN)
    record = json.loads(jpaged(*args, "--json").stdout)
    assert [entry["token_id"] for entry in record["logprobs"]] == answers["Hi"][1]
    for entry in record["logprobs"]:
        assert entry["top"][0] == [entry["token_id"], entry["logprob"]]  # greedy: the likeliest
        assert entry["top"][1][1] <= entry["logprob"] < 0
    lines = jpaged(*args).stdout.removeprefix(answers["Hi"][0] + "\n").splitlines()
    assert len(lines) == 10
    assert lines[0].split()[0] == f"{record['logprobs'][0]['logprob']:.3f}"


def test_the_table_of_the_run_goes_to_the_error_stream(jpaged, tiny_folder: Path, answers) -> None:
    own = ("--num-pages", "33")  # an engine that no other test uses, so that its counters are those of this run
    result = jpaged("generate", "Hi", "--stats", "--model", tiny_folder, *TEN, *own)
    assert result.stdout == answers["Hi"][0] + "\n"
    rows = {line[:22].strip(): line[23:] for line in result.stderr.splitlines()}
    assert rows["requests"] == "1"
    assert rows["tokens"] == "2 in, 10 out"
    assert rows["pages at the peak"].startswith("1 of 32,")


@pytest.mark.parametrize(("given", "words"), [("", "standard input is empty"), (b"\xff\n", "not valid UTF-8")])
def test_unusable_standard_input_is_refused(jpaged, given: str | bytes, words: str) -> None:
    result = jpaged("generate", input=given)
    assert result.exit_code == 2
    assert words in result.stderr


def test_one_refused_prompt_refuses_the_run(jpaged, tiny_folder: Path) -> None:
    result = jpaged("generate", "fine", "x" * 300, "--model", tiny_folder, *TEN)
    assert result.exit_code == 2
    assert result.stdout == ""
