"""The bench of guessed tokens: what it leaves out, what it asks, and that it compares answers."""

import dataclasses

import pytest

from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from jpaged.engine import Engine
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.tokenizer import Tokenizer
from scripts.bench_speculation import compare, loops, read_prompts, row_of
from tests.fakes import tiny_llama
from tests.tiny_vocabs import byte_level_metadata


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], False),
        ([7] * 23, False),
        ([7] * 24, True),
        ([*range(12)] * 2, False),
        ([99, *range(12), *range(12), *range(12), 98], True),
        ([*range(70)] * 3, False),  # longer than what is looked for
        ([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 9] * 2, False),
    ],
)
def test_an_answer_loops_if_a_run_of_tokens_stands_three_times_in_a_row(tokens, expected):
    assert loops(tokens) == expected


def test_prompts_are_many_and_fit():
    tokenizer = Tokenizer(gguf_vocabulary(byte_level_metadata(), "tiny"), "tiny")
    prompts = read_prompts(tokenizer, None)
    assert len(prompts["editing"]) >= 20
    assert len(prompts["questions"]) >= 10
    assert [len(named) for named in read_prompts(tokenizer, 3).values()] == [3, 3]


def test_two_engines_answer_in_turn_and_their_answers_are_compared():
    config = EngineConfig(
        cache=CacheConfig(page_size=8, num_pages=64, prefix_cache=False),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64),
        token_buckets=(16,),
        compilation_cache=False,
    )
    guesses = SpeculationConfig(num_tokens=7, shortest_match=1, token_cost=0.0, wait_cost=0.0)
    model = tiny_llama(vocab_size=64, num_hidden_layers=1)
    engines = Engine(model, config), Engine(model, dataclasses.replace(config, speculation=guesses))
    plain, guessing = compare(engines, [[5, 6, 7], [8, 9], [3]], 2, max_tokens=30, repeats=2)
    assert [*plain.groups] == [*guessing.groups] == [0, 2]
    assert guessing.groups[0].steps < plain.groups[0].steps
    line = row_of("editing", 2, plain, guessing)
    assert (line["answers"], line["equal_answers"], line["tokens"]) == (3, 3, 90)
    assert 0 < line["hits"] <= line["guesses"]
    assert plain.guesses == 0
    guessing.answers[1] = (1, 2)
    assert row_of("editing", 2, plain, guessing)["equal_answers"] == 2
