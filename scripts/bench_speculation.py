"""Times a model with and without guessed tokens (`SpeculationConfig`), on texts to be edited and on others.

    python scripts/bench_speculation.py [--model smollm2-135m-instruct] [--rows 1,4,8,16] [--half "held out"]
    python scripts/bench_speculation.py --replay          other devices' costs, by the same answers

Two engines of one model, alike but for the guesses, answer the same requests, so many at a time, greedily and sampled;
they take turns, and who begins changes with each group. Prompts are in the prefix cache, so what is timed is the
decoding: by the clock, and by the seconds that all threads of the process computed, which say more on a busy machine.

An answer *loops* if somewhere a run of tokens stands three times in a row or more, 24 tokens or more in all. Such
answers are easily guessed, and of no use: they are left out, and named. The prompts are in
scripts/data/speculation_prompts.json; constants of the rule were chosen by every second one, and the others are held
out. Prints tables and a last line of JSON.

With `--replay`, answers of the first engine are then given once more by the scheduler alone, in a world where steps
take what they are said to on other devices (`scripts.speculation.replay`).
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from jpaged.engine import Engine
from jpaged.fetch import fetch
from jpaged.models import load_model
from jpaged.request import SamplingParams
from jpaged.tokenizer import Tokenizer
from scripts.report import print_json, print_table
from scripts.speculation.prompts import Half, loops, read_prompts
from scripts.speculation.replay import DEVICES, Answer, replay

MAX_MODEL_LEN: Final = 1024
KINDS: Final = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.7, "top_p": 0.95}}
_COUNTS: Final = ("num_steps", "num_guesses", "num_hits")


@dataclass
class Served:
    """What an engine did: seconds and counts by group and repeat, and answers by number."""

    seconds: list[list[float]] = field(default_factory=list)
    cpu_seconds: list[list[float]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers.values()))

    def total(self, name: str) -> float:
        """Seconds of all groups, each by the median of its repeats."""
        return sum(map(median, getattr(self, name)))


def answer(engine: Engine, prompts: dict[int, list[int]], max_tokens: int, **params) -> dict[int, tuple[int, ...]]:
    """The answers to prompts that come at once, by their number, which is the seed too."""
    answers = {}
    for number, prompt in prompts.items():
        options = SamplingParams(max_tokens=max_tokens, seed=number, **params)
        engine.add(prompt, options, request_id=f"{number}")
    while engine.has_work:
        answers |= {int(output.request_id): output.token_ids for output in engine.step()}
    return answers


def compare(
    engines: tuple[Engine, Engine], prompts: list[list[int]], rows: int, *, max_tokens: int, repeats: int, **params
) -> tuple[Served, Served]:
    """Answers the prompts, `rows` at a time, by one engine and the other in turn."""
    found = Served(), Served()
    for first in range(0, len(prompts), rows):
        group = dict(enumerate(prompts[first : first + rows], first))
        for served in found:
            served.seconds.append([])
            served.cpu_seconds.append([])
        for engine in engines:
            answer(engine, group, 1, **params)
        for turn in range(repeats):
            pairs = list(zip(engines, found, strict=True))
            for engine, served in pairs if (first // rows + turn) % 2 == 0 else reversed(pairs):
                before, start, cpu_start = engine.stats(), time.perf_counter(), time.process_time()
                answers = answer(engine, group, max_tokens, **params)
                served.seconds[-1].append(time.perf_counter() - start)
                served.cpu_seconds[-1].append(time.process_time() - cpu_start)
                after = engine.stats()
                if not turn:
                    served.answers |= answers
                    for name in _COUNTS:
                        served.counts[name] += getattr(after, name) - getattr(before, name)
    return found


def cell_of(workload: str, kind: str, rows: int, plain: Served, guessing: Served) -> dict[str, Any]:
    """One line of the results."""
    num_guesses, num_hits = guessing.counts["num_guesses"], guessing.counts["num_hits"]
    seconds, guessing_seconds = plain.total("seconds"), guessing.total("seconds")
    cpu_seconds, guessing_cpu_seconds = plain.total("cpu_seconds"), guessing.total("cpu_seconds")
    return {
        "workload": workload,
        "kind": kind,
        "rows": rows,
        "answers": len(plain.answers),
        "tokens": plain.num_tokens,
        "plain_tokens_per_s": round(plain.num_tokens / seconds, 1),
        "guessing_tokens_per_s": round(guessing.num_tokens / guessing_seconds, 1),
        "speedup": round(seconds / guessing_seconds * guessing.num_tokens / plain.num_tokens, 3),
        "cpu_speedup": round(cpu_seconds / guessing_cpu_seconds * guessing.num_tokens / plain.num_tokens, 3),
        "plain_steps": plain.counts["num_steps"],
        "guessing_steps": guessing.counts["num_steps"],
        "guesses": num_guesses,
        "hits": num_hits,
        "acceptance": round(num_hits / num_guesses, 3) if num_guesses else None,
        "equal_answers": sum(guessing.answers[number] == tokens for number, tokens in plain.answers.items()),
    }


def make_engines(args: argparse.Namespace) -> tuple[Engine, Engine]:
    """Without guesses, and with."""
    path = fetch(args.model)
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    model, tokenizer = load_model(path, dtype=dtype), Tokenizer.load(path)
    num_rows = max(16, *args.rows)
    config = EngineConfig(
        cache=CacheConfig(num_pages=2 + num_rows * MAX_MODEL_LEN // 2 // 16, page_size=16),
        scheduler=SchedulerConfig(
            max_num_seqs=num_rows, max_num_batched_tokens=args.max_batched_tokens, max_model_len=MAX_MODEL_LEN
        ),
        token_buckets=args.token_buckets,
        decode_steps=args.decode_steps,
        warmup="eager",
        recompile="error",
    )
    guessing = replace(config, speculation=SpeculationConfig(num_tokens=args.num_tokens))
    return Engine(model, config, tokenizer=tokenizer), Engine(model, guessing, tokenizer=tokenizer)


def run(args: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    engines = make_engines(args)
    print(f"two engines in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    tokenizer = engines[0].tokenizer
    assert tokenizer is not None
    cells, looping, replayed = [], {}, []
    for workload, named in read_prompts(tokenizer, args.half).items():
        names, prompts = list(named), list(named.values())
        for kind in args.kinds:
            answers = answer(engines[0], dict(enumerate(prompts)), args.max_tokens, **KINDS[kind])
            kept = [number for number in range(len(prompts)) if not loops(answers[number])]
            looping[f"{workload}, {kind}"] = [names[number] for number in range(len(prompts)) if number not in kept]
            if args.replay:
                known = [Answer(prompts[number], answers[number]) for number in kept]
                for device in DEVICES:
                    replayed += [
                        {"workload": workload, "kind": kind, "rows": rows, **replay(device, known, rows)}
                        for rows in args.rows
                    ]
            for rows in args.rows if not args.only_replay else ():
                count = max(rows, min(args.prompts or len(kept), len(kept)))
                many = [prompts[kept[index % len(kept)]] for index in range(count)]
                found = compare(engines, many, rows, max_tokens=args.max_tokens, repeats=args.repeats, **KINDS[kind])
                cells.append(cell_of(workload, kind, rows, *found))
                print(json.dumps(cells[-1]), file=sys.stderr)
    return {
        "model": str(args.model),
        "num_tokens": args.num_tokens,
        "token_buckets": sorted({shape.num_tokens for shape in engines[1].step_shapes}),
        "decode_steps": engines[0].config.decode_steps,
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
        "half": args.half,
        "cells": cells,
        "looping": looping,
        "replayed": replayed,
    }


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description="Time a model with and without guessed tokens.")
    result.add_argument("--model", default="smollm2-135m-instruct", help="known name or folder")
    result.add_argument("--dtype", help="of weights and activations (default: float32 on a CPU, else bfloat16)")
    result.add_argument("--num-tokens", type=int, default=SpeculationConfig.num_tokens, help="guesses of a row")
    result.add_argument("--rows", type=_numbers, default=(1, 4, 8, 16), metavar="N,...", help="requests at a time")
    result.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS), metavar="KIND,...")
    result.add_argument("--half", choices=get_args(Half), default="held out", help="of the prompts")
    result.add_argument("--prompts", type=int, help="in a cell at the most, those that loop left out (default: all)")
    result.add_argument("--token-buckets", type=_numbers, metavar="T,...", help="default: the engine's")
    result.add_argument("--max-batched-tokens", type=int, default=256)
    result.add_argument("--decode-steps", type=int, help="of one program, for both engines (default: the engine's)")
    result.add_argument("--max-tokens", type=int, default=192)
    result.add_argument("--repeats", type=int, default=1)
    result.add_argument("--replay", action="store_true", help="replay the answers on other devices' costs too")
    result.add_argument("--only-replay", action="store_true", help="and time no guesses on this one")
    return result


def _print(title: str, cells: Sequence[dict[str, Any]], keys: dict[str, str]) -> None:
    rows = [[f"{one['workload']}, {one['kind']}", *(one[key] for key in keys)] for one in cells]
    print_table(title, ["workload", *keys.values()], rows)


def main() -> None:
    args = parser().parse_args()
    args.replay |= args.only_replay
    results = run(args)
    keys = {"rows": "rows", "tokens": "tokens", "plain_tokens_per_s": "tokens/s", "guessing_tokens_per_s": "guessing"}
    keys |= {"speedup": "times", "cpu_speedup": "by CPU", "acceptance": "accepted", "equal_answers": "equal"}
    _print("Guessed tokens", results["cells"], keys | {"answers": "of"})
    keys = {"device": "device", "rows": "rows", "speedup": "times", "slow_row": "slow row", "acceptance": "accepted"}
    _print("Replayed", results["replayed"], keys)
    print("answers that loop, left out:", results["looping"])
    print_json("bench_speculation", results)


if __name__ == "__main__":
    main()
