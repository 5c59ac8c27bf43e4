"""What structured outputs cost the host: compiling grammars, making masks, and how much of it the device hides.

    python scripts/bench_structured.py             the tables below, and a JSON line
    python scripts/bench_structured.py --no-model  without the run of a model, which takes a minute to compile on a CPU

- Forms, with the vocabulary of the default model: the check at the door, the compile, then taking a token and making
  the next mask, for a sequence that walks at random through what its masks allow. Medians and 99th percentiles.
- Rows at once: the same for many sequences in one go, as a step does it, per row.
- A run of the default model: some rows with a form beside as many without. The masks are made while the device runs
  the step of the others; what the engine waited for them, and what they took, gives the share that is hidden.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jpaged.fetch import fetch
from jpaged.grammar import check_grammar, compile_grammar, grammar_vocabulary, run_with_deep_stack
from jpaged.request import SamplingParams
from jpaged.structured import StructuredOutput
from jpaged.token_mask import num_mask_words, unpack_mask
from jpaged.tokenizer import Tokenizer
from scripts.report import print_json, print_table

MODEL = "smollm2-135m-instruct"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["new", "paid", "vip", "closed"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
}
WIDE = {"type": "object", "properties": {f"field_{i}": {"type": ["string", "null"]} for i in range(300)}}
FORMS = {
    "a JSON object": StructuredOutput(json_object=True),
    "a schema of 8 fields": StructuredOutput(json=PERSON),
    "a schema of 300 fields": StructuredOutput(json=WIDE),
    "a regex": StructuredOutput(regex=r"[A-Z][a-z]{2,20}( [A-Z][a-z]{2,20}){1,3}, [0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "one of 500 choices": StructuredOutput(choice=[f"category {i:03}: {'abc'[i % 3]}" for i in range(500)]),
    "arithmetic, a grammar": StructuredOutput(
        grammar='start: sum\nsum: product (("+" | "-") product)*\nproduct: atom (("*" | "/") atom)*\n'
        'atom: /[0-9]{1,6}/ | "(" sum ")"\n'
    ),
}


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return function(), time.perf_counter() - start


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Microseconds."""
    cut = statistics.quantiles(seconds, n=100)[98]
    return {"median_us": round(1e6 * statistics.median(seconds), 1), "p99_us": round(1e6 * cut, 1)}


def form_times(form: StructuredOutput, vocabulary: Any, num_tokens: int) -> dict[str, Any]:
    """One form: the door, the compile, and a random walk, begun anew wherever it ends."""
    _, check_s = timed(lambda: check_grammar(form))
    grammar, compile_s = timed(lambda: run_with_deep_stack(lambda: compile_grammar(form, vocabulary)))
    rng, mask = random.Random(0), np.zeros(num_mask_words(vocabulary.vocab_size), np.uint32)
    take, make = [], []
    matcher, allowed = grammar.matcher.deep_copy(), unpack_mask(grammar.first_mask)
    for _ in range(num_tokens):
        token = rng.choice(allowed)
        if token in vocabulary.eos_tokens:
            matcher, allowed = grammar.matcher.deep_copy(), unpack_mask(grammar.first_mask)
            continue
        take.append(timed(lambda matcher=matcher, token=token: matcher.consume_token(token))[1])
        make.append(timed(lambda matcher=matcher: matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes))[1])
        allowed = unpack_mask(mask)
    return {
        "check_ms": round(1e3 * check_s, 2),
        "compile_ms": round(1e3 * compile_s, 2),
        "take": percentiles(take),
        "mask": percentiles(make),
    }


def row_times(vocabulary: Any, num_rows: int, num_tokens: int) -> float:
    """Microseconds a row, to take a token and to make the next mask, all forms mixed."""
    from llguidance import LLExecutor

    grammars = [run_with_deep_stack(lambda form=form: compile_grammar(form, vocabulary)) for form in FORMS.values()]
    executor, rng = LLExecutor(), random.Random(0)
    masks = np.zeros((num_rows, num_mask_words(vocabulary.vocab_size)), np.uint32)
    matchers = [grammars[row % len(grammars)].matcher.deep_copy() for row in range(num_rows)]
    allowed = [unpack_mask(grammars[row % len(grammars)].first_mask) for row in range(num_rows)]
    seconds = []
    for _ in range(num_tokens):
        tokens = []
        for row in range(num_rows):
            token = rng.choice(allowed[row])
            if token in vocabulary.eos_tokens:
                grammar = grammars[row % len(grammars)]
                matchers[row] = grammar.matcher.deep_copy()
                token = next(t for t in unpack_mask(grammar.first_mask) if t not in vocabulary.eos_tokens)
            tokens.append(token)
        start = time.perf_counter()
        executor.consume_token_par(list(zip(matchers, tokens, strict=True)))
        numbered = [(matcher, row) for row, matcher in enumerate(matchers)]
        executor.unsafe_compute_mask_ptr(numbered, masks.ctypes.data, masks.shape[1] * 4, num_rows)
        seconds.append(time.perf_counter() - start)
        allowed = [unpack_mask(mask) for mask in masks]
    return round(1e6 * statistics.median(seconds) / num_rows, 1)


def run_times(num_rows: int, num_tokens: int) -> dict[str, Any]:
    """The default model, `num_rows` free rows; then as many with a form beside them."""
    from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig
    from jpaged.engine import Engine
    from jpaged.models import load_model

    path = fetch(MODEL)
    config = EngineConfig(
        cache=CacheConfig(num_pages=2 * num_rows * (num_tokens + 40) // 16 + 2 * num_rows),
        scheduler=SchedulerConfig(max_num_seqs=2 * num_rows, max_num_batched_tokens=64, max_model_len=512),
        token_buckets=(64,),
    )
    engine = Engine(load_model(path, dtype="float32"), config, tokenizer=Tokenizer.load(path))
    engine.warm_up()
    free = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    form = StructuredOutput(grammar="start: /(?s:.*[a-z ].*)/")  # goes on for ever, and nearly everything is allowed
    forms = [form, StructuredOutput(json={"type": "array", "items": PERSON, "minItems": 50})]
    results: dict[str, Any] = {"rows": num_rows, "tokens": num_tokens}
    for name, num_bound in (("free", 0), ("mixed", num_rows)):
        counter = engine._constraints.counter
        before = (counter.num_masks, counter.make_s, counter.wait_s)
        for row in range(num_bound):
            params = SamplingParams(seed=row, max_tokens=num_tokens, ignore_eos=True, structured=forms[row % 2])
            engine.add(f"Number {row}:", params)
        for row in range(num_rows):
            engine.add(f"Say {row}:", free, request_id=f"free{row}")
        start, num_steps, free_s = time.perf_counter(), engine.stats().num_steps, 0.0
        while engine.has_work:
            if any(output.request_id.startswith("free") for output in engine.step()):
                free_s = time.perf_counter() - start
        results[name] = {
            "seconds": round(time.perf_counter() - start, 3),
            "seconds_of_free_rows": round(free_s, 3),
            "steps": engine.stats().num_steps - num_steps,
            "masks": counter.num_masks - before[0],
            "make_s": round(counter.make_s - before[1], 4),
            "wait_s": round(counter.wait_s - before[2], 4),
        }
    mixed = results["mixed"]
    results["make_us_a_mask"] = round(1e6 * mixed["make_s"] / mixed["masks"], 1)
    results["hidden_share"] = round(1 - min(mixed["wait_s"] / mixed["make_s"], 1), 3)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=400, help="tokens of a random walk (default: %(default)s)")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64], help="rows at once")
    parser.add_argument("--no-model", action="store_true", help="leave out the run of the model")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    args = parser.parse_args()

    tokenizer = Tokenizer.load(fetch(MODEL))
    vocabulary, vocabulary_s = timed(
        lambda: grammar_vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    )
    forms = {name: form_times(form, vocabulary, args.tokens) for name, form in FORMS.items()}
    results: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "vocabulary_s": round(vocabulary_s, 3),
        "forms": forms,
        "us_a_row": {str(rows): row_times(vocabulary, rows, args.tokens // 4) for rows in args.rows},
    }
    if not args.no_model:
        results["run"] = run_times(num_rows=8, num_tokens=64)
    if not args.json:
        columns = ["form", "check, ms", "compile, ms", "take, us", "99 %", "mask, us", "99 %"]
        rows = [
            [name, t["check_ms"], t["compile_ms"], *t["take"].values(), *t["mask"].values()]
            for name, t in forms.items()
        ]
        print_table(f"A vocabulary of {tokenizer.vocab_size:,} tokens", columns, rows)
        print_table("Rows at once", ["rows", "us a row"], [list(pair) for pair in results["us_a_row"].items()])
        if "run" in results:
            run = results["run"]
            rows = [[name, *run[name].values()] for name in ("free", "mixed")]
            columns = ["rows", "s", "s, free rows", "steps", "masks", "made, s", "waited, s"]
            print_table(f"{run['rows']} rows without a form, then as many with one beside them", columns, rows)
            print(f"hidden: {run['hidden_share']:.0%} of {run['make_us_a_mask']} us a mask")
    print_json("bench_structured", results)


if __name__ == "__main__":
    main()
