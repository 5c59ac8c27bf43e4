"""The bench of guessed tokens: what it leaves out, what it asks, that it compares answers, and the replay."""

import dataclasses
import json

import pytest

from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from jpaged.engine import Engine
from jpaged.gguf_vocab import gguf_vocabulary
from jpaged.tokenizer import Tokenizer
from scripts.bench_speculation import cell_of, compare
from scripts.speculation.prompts import PROMPTS, loops, read_prompts
from scripts.speculation.replay import DEVICES, Answer, World, replay
from scripts.speculation.tables import cells_table, replay_table
from tests.fakes import tiny_llama
from tests.tiny_vocabs import byte_level_metadata

CPU, *GPUS = DEVICES
COPIED = [Answer([*range(20 * n + 5, 20 * n + 25)], [*range(20 * n + 5, 20 * n + 25)]) for n in range(8)]
NEW = [Answer([*range(20 * n + 5, 20 * n + 25)], [*range(500 + 30 * n, 530 + 30 * n)]) for n in range(8)]


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


def test_prompts_are_many_and_half_of_them_are_held_out():
    tokenizer = Tokenizer(gguf_vocabulary(byte_level_metadata(), "tiny"), "tiny")
    whole, chosen, held_out = (read_prompts(tokenizer, half) for half in ("all", "chosen", "held out"))
    listed = json.loads(PROMPTS.read_text(encoding="utf-8"))
    assert {"question", "chat", "summary", "code", "writing"} == {one["kind"] for one in listed["others"]}
    for workload in ("editing", "others"):
        assert len(whole[workload]) == len(listed[workload]) >= 35  # none has the name of another
        assert whole[workload].keys() == chosen[workload].keys() | held_out[workload].keys()
        assert chosen[workload].keys().isdisjoint(held_out[workload])


def test_two_engines_answer_in_turn_and_their_answers_are_compared():
    config = EngineConfig(
        cache=CacheConfig(page_size=8, num_pages=64),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64),
        token_buckets=(16,),
        compilation_cache=False,
    )
    guesses = SpeculationConfig(num_tokens=7, shortest_match=1, token_cost=0.0, wait_cost=0.0)
    model = tiny_llama(vocab_size=64, num_hidden_layers=1)
    engines = Engine(model, config), Engine(model, dataclasses.replace(config, speculation=guesses))
    prompts = [[5, 6, 7], [8, 9], [3]]
    plain, guessing = compare(engines, prompts, 2, max_tokens=30, repeats=2, temperature=0.0, ignore_eos=True)
    assert [*map(len, plain.seconds)] == [*map(len, guessing.cpu_seconds)] == [2, 2]
    cell = cell_of("editing", "greedy", 2, plain, guessing)
    assert (cell["answers"], cell["equal_answers"], cell["tokens"]) == (3, 3, 90)
    assert 0 < cell["hits"] <= cell["guesses"]
    assert cell["guessing_steps"] < cell["plain_steps"]
    assert plain.counts["num_guesses"] == 0
    guessing.answers[1] = (1, 2)
    assert cell_of("editing", "greedy", 2, plain, guessing)["equal_answers"] == 2


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_who_copies_ends_sooner_and_nobody_ends_later_for_it(device):
    alone = replay(device, COPIED * 2, 1)
    assert alone["speedup"] > 1.2
    assert alone["acceptance"] > 0.5
    together = replay(device, [*COPIED[:7], *NEW] * 2, 8)
    assert together["slow_row"] > 0.93


def test_what_never_stood_before_is_not_guessed():
    assert replay(CPU, NEW, 4) == {
        "device": CPU.name,
        "speedup": 1.0,
        "slow_row": 1.0,
        "guesses": 0,
        "acceptance": None,
    }


def test_a_step_begins_when_it_was_planned_and_the_one_before_has_ended():
    device = dataclasses.replace(CPU, steps={16: 10.0}, plan=1.0, plan_row=0.0, read=2.0, read_row=0.0)
    world = World(device, guesses=False)
    ends = world.answer([Answer([1, 2, 3], [4, 5, 6])])
    assert ends.tolist() == [1 + 3 * 10 + 2]  # the host works beside the device, but for the first plan and last read


def test_tables_show_each_device_and_cell():
    cell = {"workload": "editing", "kind": "greedy", "rows": 8, "answers": 3, "tokens": 90, "speedup": 1.25}
    cell |= {"plain_tokens_per_s": 10.0, "guessing_tokens_per_s": 12.5, "cpu_speedup": 1.5, "guesses": 8, "hits": 6}
    cell |= {"acceptance": 0.75, "equal_answers": 3, "plain_steps": 30, "guessing_steps": 24}
    lines = [{"workload": "editing", "kind": "greedy", "rows": 8, **replay(CPU, COPIED, 8)}]
    record = dataclasses.make_dataclass("Record", ["script", "results", "device", "date", "commit", "name"])(
        "bench_speculation", {"cells": [cell], "replayed": lines, "model": "m"}, "a CPU", "2026-01-31", "0a1b", "n"
    )
    assert (
        "| a CPU | m | editing, greedy | 8 | 30 | 24 | 8 | 75 % | 10.0 | 12.5 | 1.25 | 1.50 | 3 of 3 |"
        in cells_table([record])
    )
    assert CPU.name in replay_table([record])
