"""Times a model with and without guessed tokens (`SpeculationConfig`), on texts to be edited and on questions.

    python scripts/bench_speculation.py [--model smollm2-135m-instruct] [--batches 1,8,32] [--repeats 3]
    python scripts/bench_speculation.py --token-buckets 1,16,64,256     fewer shapes to compile

Two engines of one model, alike but for the guesses, answer the same requests in turn, greedily, so many at a time; the
quickest of the repeats counts. Nothing is found in a prefix cache. An answer *loops* if somewhere a run of tokens
stands three times in a row or more, 24 tokens or more in all. Such answers are easily guessed, and of no use: they are
left out, and named. The prompts are in scripts/data/speculation_prompts.json. Prints tables and a last line of JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from jpaged.engine import Engine
from jpaged.fetch import fetch
from jpaged.models import load_model
from jpaged.request import Output, SamplingParams
from jpaged.tokenizer import Tokenizer
from scripts.report import print_json, print_table

PROMPTS: Final = Path(__file__).parent / "data" / "speculation_prompts.json"
MAX_MODEL_LEN: Final = 1024
_MAX_PERIOD: Final = 64
_LEAST_LOOP: Final = 24
_COUNTS: Final = ("num_steps", "num_guesses", "num_hits")


def loops(tokens: Sequence[int]) -> bool:
    """Whether a run of tokens stands three times in a row or more, 24 tokens or more in all.

    Example:
      >>> loops([1, 2, 3, 4, 5, 6, 7, 8] * 3), loops([1, 2, 3, 4, 5, 6, 7, 8] * 2), loops([5] * 23)
      (True, False, False)
    """
    values = np.asarray(tokens)
    for period in range(1, min(_MAX_PERIOD, len(values) // 3) + 1):
        least = max(3 * period, _LEAST_LOOP) - period
        same = values[period:] == values[:-period]
        ends = np.flatnonzero(np.diff(np.concatenate(([0], same, [0]))))
        if len(ends) and (ends[1::2] - ends[::2]).max() >= least:
            return True
    return False


@dataclass
class Group:
    """What an engine did for prompts that came at once: the quickest time, and what it counted the first time."""

    seconds: float
    steps: int
    guesses: int
    hits: int


@dataclass
class Served:
    """What an engine did: groups by their first prompt, and answers."""

    groups: dict[int, Group] = field(default_factory=dict)
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def add(self, first: int, group: Group, outputs: dict[int, Output]) -> None:
        """Of one repeat."""
        if first in self.groups:
            self.groups[first].seconds = min(self.groups[first].seconds, group.seconds)
            return
        self.groups[first] = group
        self.answers |= {number: output.token_ids for number, output in outputs.items()}

    @property
    def guesses(self) -> int:
        return sum(group.guesses for group in self.groups.values())

    @property
    def hits(self) -> int:
        return sum(group.hits for group in self.groups.values())

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers.values()))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / sum(group.seconds for group in self.groups.values())


def answer(engine: Engine, prompts: dict[int, list[int]], max_tokens: int) -> tuple[float, dict[int, Output]]:
    """Seconds that all of them took together, and their answers."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    outputs = {}
    start = time.perf_counter()
    for number, prompt in prompts.items():
        engine.add(prompt, params, request_id=f"{number}")
    while engine.has_work:
        outputs |= {int(output.request_id): output for output in engine.step()}
    return time.perf_counter() - start, outputs


def compare(
    engines: tuple[Engine, Engine], prompts: list[list[int]], batch: int, *, max_tokens: int, repeats: int
) -> tuple[Served, Served]:
    """Answers the prompts, `batch` at a time, by one engine and the other in turn."""
    found = Served(), Served()
    for first in range(0, len(prompts), batch):
        group = dict(enumerate(prompts[first : first + batch], first))
        for _ in range(repeats):
            for engine, served in zip(engines, found, strict=True):
                before = engine.stats()
                seconds, outputs = answer(engine, group, max_tokens)
                after = engine.stats()
                counts = [getattr(after, name) - getattr(before, name) for name in _COUNTS]
                served.add(first, Group(seconds, *counts), outputs)
    return found


def row_of(workload: str, batch: int, plain: Served, guessing: Served) -> dict[str, Any]:
    """One line of the results."""
    return {
        "workload": workload,
        "batch": batch,
        "answers": len(plain.answers),
        "tokens": plain.num_tokens,
        "plain_tokens_per_s": round(plain.tokens_per_s, 1),
        "guessing_tokens_per_s": round(guessing.tokens_per_s, 1),
        "speedup": round(guessing.tokens_per_s / plain.tokens_per_s, 3),
        "guesses": guessing.guesses,
        "hits": guessing.hits,
        "acceptance": _acceptance(guessing),
        "equal_answers": sum(guessing.answers[number] == tokens for number, tokens in plain.answers.items()),
    }


def _acceptance(served: Served | Group) -> float | None:
    return round(served.hits / served.guesses, 3) if served.guesses else None


def read_prompts(tokenizer: Tokenizer, limit: int | None) -> dict[str, dict[str, list[int]]]:
    """Token ids by workload and name."""
    found = json.loads(PROMPTS.read_text(encoding="utf-8"))
    texts = {
        "editing": {one["name"]: f"{one['task']}\n\n{one['text']}" for one in found["editing"]},
        "questions": {text: text for text in found["questions"]},
    }
    return {
        workload: {
            name: tokenizer.encode_chat([{"role": "user", "content": text}])
            for name, text in list(named.items())[:limit]
        }
        for workload, named in texts.items()
    }


def make_engines(args: argparse.Namespace) -> tuple[Engine, Engine]:
    """Without guesses, and with."""
    path = fetch(args.model)
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    model, tokenizer = load_model(path, dtype=dtype), Tokenizer.load(path)
    num_rows = max(16, *args.batches)
    config = EngineConfig(
        cache=CacheConfig(num_pages=2 + num_rows * MAX_MODEL_LEN // 2 // 16, page_size=16, prefix_cache=False),
        scheduler=SchedulerConfig(
            max_num_seqs=num_rows, max_num_batched_tokens=args.token_buckets[-1], max_model_len=MAX_MODEL_LEN
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
    lines, by_prompt, looping = [], [], {}
    for workload, named in read_prompts(tokenizer, args.limit).items():
        names, prompts = list(named), list(named.values())
        answer(engines[0], {0: prompts[0]}, 8)  # nothing comes for the first time
        _, outputs = answer(engines[0], dict(enumerate(prompts)), args.max_tokens)
        kept = [number for number in range(len(prompts)) if not loops(outputs[number].token_ids)]
        looping[workload] = [names[number] for number in range(len(prompts)) if number not in kept]
        chosen = [prompts[number] for number in kept]
        for batch in args.batches:
            many = [chosen[index % len(chosen)] for index in range(max(batch, len(chosen)))]
            plain, guessing = compare(engines, many, batch, max_tokens=args.max_tokens, repeats=args.repeats)
            lines.append(row_of(workload, batch, plain, guessing))
            print(json.dumps(lines[-1]), file=sys.stderr)
            if batch == 1:
                by_prompt += _by_prompt(workload, [names[number] for number in kept], plain, guessing)
    return {
        "model": str(args.model),
        "num_tokens": args.num_tokens,
        "token_buckets": list(args.token_buckets),
        "decode_steps": engines[0].config.decode_steps,
        "max_tokens": args.max_tokens,
        "cells": lines,
        "looping": looping,
        "prompts": by_prompt,
    }


def _by_prompt(workload: str, names: list[str], plain: Served, guessing: Served) -> list[dict[str, Any]]:
    """Each prompt alone."""
    found = []
    for number, name in enumerate(names):
        group = guessing.groups[number]
        found.append(
            {
                "workload": workload,
                "prompt": name,
                "tokens": len(guessing.answers[number]),
                "steps": group.steps,
                "guesses": group.guesses,
                "hits": group.hits,
                "acceptance": _acceptance(group),
                "speedup": round(plain.groups[number].seconds / group.seconds, 2),
            }
        )
    return found


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description="Time a model with and without guessed tokens.")
    result.add_argument("--model", default="smollm2-135m-instruct", help="known name or folder")
    result.add_argument("--dtype", help="of weights and activations (default: float32 on a CPU, else bfloat16)")
    result.add_argument("--num-tokens", type=int, default=SpeculationConfig.num_tokens, help="guesses of a row")
    result.add_argument("--batches", type=_numbers, default=(1, 8, 32), metavar="B,...")
    result.add_argument("--token-buckets", type=_numbers, default=(1, 8, 16, 32, 64, 256), metavar="T,...")
    result.add_argument("--decode-steps", type=int, help="of one program, for both engines (default: the engine's)")
    result.add_argument("--max-tokens", type=int, default=192)
    result.add_argument("--repeats", type=int, default=1)
    result.add_argument("--limit", type=int, help="prompts of each kind at the most")
    return result


def main() -> None:
    results = run(parser().parse_args())
    columns = ["workload", "at a time", "tokens", "tokens/s", "with guesses", "times", "accepted", "equal answers"]
    keys = ("batch", "tokens", "plain_tokens_per_s", "guessing_tokens_per_s", "speedup", "acceptance")
    rows = [
        [one["workload"], *(one[key] for key in keys), f"{one['equal_answers']}/{one['answers']}"]
        for one in results["cells"]
    ]
    print_table("Guessed tokens", columns, rows)
    keys = ("tokens", "steps", "guesses", "hits", "acceptance", "speedup")
    rows = [[one["prompt"][:40], *(one[key] for key in keys)] for one in results["prompts"]]
    print_table("One at a time", ["prompt", *keys], rows)
    print("answers that loop, left out:", results["looping"])
    print_json("bench_speculation", results)


if __name__ == "__main__":
    main()
