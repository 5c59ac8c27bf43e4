"""What storing K and V in fewer bits costs: a model's perplexity on a text, for each dtype of the pages.

    python scripts/measure_perplexity.py [--model NAME] [--dtypes float32,int8] [--windows N]

(`measure_agreement.py` does the same for the weights, and looks at answers as well.)

The text is the first four chapters of Lewis Carroll's "Alice's Adventures in Wonderland" (1865, in the public domain),
`scripts/data/alice.txt`. It is cut into windows of `--tokens` tokens, each scored by itself. Weights and activations
have one dtype throughout, so that only the pages differ; what a query reads is what the pages hold, in prefill as well.
The error is that of the mean over windows, of the difference to the first dtype in the same window. Prints a table and
a last line of JSON.
"""

import argparse
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jpaged import CacheConfig, EngineConfig, SchedulerConfig
from jpaged.llm import LLM, Score
from jpaged.pallas_kernels.pages import PAGE_DTYPES
from scripts.report import print_json, print_table

TEXT = Path(__file__).resolve().parent / "data" / "alice.txt"
DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
PAGE_SIZE = 16


def score(model: str, dtype: str, windows: int | None, tokens: int, *, weights: str | None = None) -> list[Score]:
    """Scores the text's windows with pages of `dtype`, and weights of a form of `LLM`'s."""
    bucket = min(tokens, 512)
    pages: Any = dtype
    config = EngineConfig(
        cache=CacheConfig(page_size=PAGE_SIZE, num_pages=2 + -(-tokens // PAGE_SIZE), dtype=pages, prefix_cache=False),
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=bucket, max_model_len=tokens),
        token_buckets=(bucket,),
    )
    llm = LLM(model, weights=weights, config=config, progress=False)
    if llm.tokenizer is None:
        sys.exit(f"{model} has no tokenizer to read the text with")
    ids = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    cut = [ids[i : i + tokens] for i in range(0, len(ids) - tokens + 1, tokens)]
    return [llm.score([window])[0] for window in cut[:windows]]


def compare(scores: list[Score], reference: list[Score]) -> dict:
    """Perplexity over all windows, and how far it is above that of `reference`."""

    def mean(s: Score) -> float:
        return -s.total_logprob / len(s.logprobs)

    differences = [mean(a) - mean(b) for a, b in zip(scores, reference, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return {
        "perplexity": round(math.exp(statistics.fmean(map(mean, scores))), 4),
        "rise_percent": round(100 * math.expm1(statistics.fmean(differences)), 3),
        "error_percent": round(100 * error, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a model's perplexity for each dtype of the pages.")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, a Hugging Face repository or a path")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="the first one is what the others are compared with")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--windows", type=int, help="only so many windows")
    arguments = parser.parse_args()
    dtypes = arguments.dtypes.split(",")
    for dtype in dtypes:
        if dtype not in PAGE_DTYPES:
            parser.error(f"argument --dtypes: {dtype!r}; expected names among {', '.join(PAGE_DTYPES)}")
    results, reference = {}, []
    for dtype in dtypes:
        start = time.perf_counter()
        scores = score(arguments.model, dtype, arguments.windows, arguments.tokens)
        reference = reference or scores
        results[dtype] = compare(scores, reference)
        print(f"{dtype}: {results[dtype]}, {time.perf_counter() - start:.0f} s", flush=True)
    columns = ["pages", "perplexity", "rise, %", "error, %"]
    print_table(
        f"{arguments.model}, {len(reference)} windows of {arguments.tokens} tokens of {TEXT.name}",
        columns,
        [[dtype, r["perplexity"], r["rise_percent"], r["error_percent"]] for dtype, r in results.items()],
    )
    print_json(
        "measure_perplexity",
        {
            "model": arguments.model,
            "text": f"Lewis Carroll, Alice's Adventures in Wonderland, chapters 1 to 4 ({TEXT.name})",
            "windows": len(reference),
            "tokens": arguments.tokens,
            "pages": results,
        },
    )


if __name__ == "__main__":
    main()
