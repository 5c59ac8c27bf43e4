"""What holding weights in fewer bits costs: perplexity on a text, and how often the likeliest token stays the same.

    python scripts/measure_agreement.py [--model NAME] [--weights int8,fp8] [--max-tokens 64] [--windows N]
    python scripts/measure_agreement.py --render docs/benchmarks/weights-cpu.json      that record as Markdown

The prompts are the 20 short ones of `golden_prompts.py`: plain text, languages of many bytes, and conversations. The
model with its own weights continues each greedily; that continuation is the reference. Of the same model with quantised
weights, all else alike, two figures are taken:

- *agreement*: it is shown prompt and reference, and at each place of the reference asked for the likeliest next token.
  The part of the places where that is the reference's own.
- *prefix*: it continues the prompts by itself. The part of the reference before the first token that differs, on
  average over prompts. One early near-tie costs a whole prompt, so this is far lower.

The perplexity is that of `measure_perplexity.py`, on the same text. Prints a table and a last line of JSON.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jpaged import CacheConfig, EngineConfig, SamplingParams, SchedulerConfig
from jpaged.llm import LLM
from jpaged.models.parameter_map import WEIGHT_FORMS
from jpaged.request import Output
from scripts.golden_prompts import PROMPTS
from scripts.markdown import measured, table
from scripts.measure_perplexity import TEXT, compare, score
from scripts.report import print_json, print_table

ROWS = 20
SHOWN = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)


def make_llm(model: str, weights: str | None) -> LLM:
    """An engine of two step shapes: one for prompts, one for decoding all of them."""
    config = EngineConfig(
        cache=CacheConfig(num_pages=400, prefix_cache=False),
        scheduler=SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=128, max_model_len=512),
        token_buckets=(ROWS, 128),
    )
    return LLM(model, weights=weights, config=config, progress=False)


def encode_prompts(llm: LLM) -> list[list[int]]:
    """Token ids of the short prompts."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        sys.exit("the model has no tokenizer to read the prompts with")
    short = [prompt for prompt in PROMPTS if prompt.kind != "long"]
    return [tokenizer.encode_chat(list(p.messages)) if p.messages else tokenizer.encode(p.text or "") for p in short]


def agreement(shown: Output, num_prompt_tokens: int) -> float:
    """Part of the tokens after the prompt that were the likeliest ones there.

    Args:
      shown: of prompt and reference together, with `prompt_logprobs`.
      num_prompt_tokens: tokens of the prompt.
    """
    entries = (shown.prompt_logprobs or ())[num_prompt_tokens:]
    return statistics.fmean(entry is not None and entry.top[0][0] == entry.token_id for entry in entries)


def prefix(tokens: tuple[int, ...], reference: tuple[int, ...]) -> float:
    """Part of the reference before the first token that differs.

    Example:
      >>> prefix((1, 2, 9, 4), (1, 2, 3, 4))
      0.5
    """
    same = [a == b for a, b in zip(tokens, reference, strict=True)]
    return (same.index(False) if False in same else len(same)) / len(reference)


def measure(llm: LLM, prompts: list[list[int]], references: list[tuple[int, ...]], greedy: SamplingParams) -> dict:
    """Both figures, means over the prompts, and the lowest agreement of one."""
    texts = [[*prompt, *reference] for prompt, reference in zip(prompts, references, strict=True)]
    shown = [agreement(out, len(prompt)) for out, prompt in zip(llm.generate(texts, SHOWN), prompts, strict=True)]
    own = [output.token_ids for output in llm.generate(prompts, greedy)]
    return {
        "agreement": round(statistics.fmean(shown), 4),
        "lowest_agreement": round(min(shown), 4),
        "prefix": round(statistics.fmean(map(prefix, own, references)), 4),
    }


def render(record: dict) -> str:
    """A record of this script as Markdown."""
    found = record["results"]["weights"]
    rows = [
        [
            record["results"]["dtype"] if form == "none" else form,
            f"{r['perplexity']:.3f}",
            "–" if form == "none" else f"{r['rise_percent']:.2f} ± {r['error_percent']:.2f}",
            *(
                "–" if form == "none" else f"{100 * r[name]:.1f}"
                for name in ("agreement", "lowest_agreement", "prefix")
            ),
        ]
        for form, r in found.items()
    ]
    columns = ["Weights", "Perplexity", "Rise, %", "Agreement, %", "Lowest of a prompt, %", "Prefix, %"]
    return f"{table(columns, rows)}\n{measured(record)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what quantised weights change of a model's answers.")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, a Hugging Face repository or a path")
    parser.add_argument("--weights", default=",".join(WEIGHT_FORMS), help="forms, separated by commas")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of a continuation")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a window of the text")
    parser.add_argument("--windows", type=int, help="only so many windows of the text")
    parser.add_argument("--render", metavar="FILE", type=Path, help="print a record as Markdown and measure nothing")
    arguments = parser.parse_args()
    if arguments.render:
        print(render(json.loads(arguments.render.read_text(encoding="utf-8"))), end="")
        return
    forms = arguments.weights.split(",")
    for form in forms:
        if form not in WEIGHT_FORMS:
            parser.error(f"argument --weights: {form!r}; expected names among {', '.join(WEIGHT_FORMS)}")
    greedy = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens, ignore_eos=True)
    llm = make_llm(arguments.model, None)
    dtype, prompts = llm.engine.dtype, encode_prompts(llm)
    references = [output.token_ids for output in llm.generate(prompts, greedy)]
    del llm
    text = {"windows": arguments.windows, "tokens": arguments.tokens}
    base = score(arguments.model, dtype, **text)
    results: dict[str, Any] = {"none": compare(base, base)}
    for form in forms:
        start = time.perf_counter()
        results[form] = measure(make_llm(arguments.model, form), prompts, references, greedy)
        results[form] |= compare(score(arguments.model, dtype, **text, weights=form), base)
        print(f"{form}: {results[form]}, {time.perf_counter() - start:.0f} s", flush=True)
    names = ["perplexity", "rise_percent", "error_percent", "agreement", "lowest_agreement", "prefix"]
    rows = [[form, *(found.get(name, "") for name in names)] for form, found in results.items()]
    print_table(f"{arguments.model} in {dtype}", ["weights", *names], rows)
    summary = {
        "model": arguments.model,
        "dtype": dtype,
        "prompts": len(prompts),
        "max_tokens": arguments.max_tokens,
        "text": TEXT.name,
        "windows": len(base),
        "window_tokens": arguments.tokens,
        "weights": results,
    }
    print_json("measure_agreement", summary)


if __name__ == "__main__":
    main()
