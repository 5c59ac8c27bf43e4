"""Answers a handful of questions at once with the default model, then shows what the pages saved.

make demo
python scripts/demo.py --json        the figures again as JSON, in the last line
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.report import print_json

if TYPE_CHECKING:
    from jpaged.llm import LLM
    from jpaged.request import Output
    from jpaged.stats import EngineStats

MIB = 1 << 20
MAX_TOKENS = 96
# Of different lengths on purpose: questions and answers that end at different times are what pages are for.
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colors.",
    "Rewrite this sentence in the past tense: I walk to school and eat an apple.",
    "What is a computer program? Answer in one sentence.",
    "Give me three tips for staying healthy.",
    "What are the benefits of reading books?",
    "What is photosynthesis?",
    "Summarize the following text in one sentence. The honey bee lives in colonies of many thousands. Most of them are "
    "workers, who gather nectar and pollen, feed the young, build the comb from wax, and guard the entrance. One queen "
    "lays all of the eggs. In winter the bees cluster together, shivering to keep the queen warm, and live on the "
    "honey that they stored in summer.",
)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the table shows.

    Attributes:
      requests: questions, all given at once.
      prompt_tokens, output_tokens: tokens in and out.
      seconds: wall time of all answers together, without compiling.
      compile_seconds: compiling the steps, or loading them from the cache.
      mean_batch_size: requests a step, averaged over the steps.
      pages_at_peak: pages in use when most were.
      num_pages: pages of the pool, the null page not counted.
      page_size: tokens a page.
      tokens_at_peak: tokens that those pages held.
      running_at_peak: requests that held them.
      bytes_per_token: K and V of a token, over all layers.
      reserved_tokens: tokens that a contiguous reservation would hold for each request.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    compile_seconds: float
    mean_batch_size: float
    pages_at_peak: int
    num_pages: int
    page_size: int
    tokens_at_peak: int
    running_at_peak: int
    bytes_per_token: float
    reserved_tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def paged_bytes(self) -> float:
        return self.pages_at_peak * self.page_size * self.bytes_per_token

    @property
    def paged_wasted_fraction(self) -> float:
        return 1 - self.tokens_at_peak / (self.pages_at_peak * self.page_size)

    @property
    def contiguous_bytes(self) -> float:
        return self.running_at_peak * self.reserved_tokens * self.bytes_per_token

    @property
    def contiguous_wasted_fraction(self) -> float:
        return 1 - self.tokens_at_peak / (self.running_at_peak * self.reserved_tokens)

    def as_dict(self) -> dict[str, float]:
        """Fields and derived figures."""
        derived = (
            "tokens_per_second",
            "paged_bytes",
            "paged_wasted_fraction",
            "contiguous_bytes",
            "contiguous_wasted_fraction",
        )
        return asdict(self) | {name: getattr(self, name) for name in derived}


def figures(llm: "LLM", outputs: Sequence["Output"], seconds: float) -> Figures:
    """The figures of one run.

    Args:
      llm: what ran it, and nothing else before.
      outputs: the answers.
      seconds: wall time, compiling included.
    """
    stats: EngineStats = llm.stats()
    plan = llm.engine.pool_plan
    return Figures(
        requests=len(outputs),
        prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        output_tokens=sum(len(output.token_ids) for output in outputs),
        seconds=seconds - stats.compile_s,
        compile_seconds=stats.compile_s,
        mean_batch_size=stats.num_step_rows / stats.num_steps,
        pages_at_peak=stats.peak.pages_used,
        num_pages=stats.num_pages - 1,
        page_size=plan.page_size,
        tokens_at_peak=stats.peak.tokens_held,
        running_at_peak=stats.peak.running,
        bytes_per_token=plan.bytes_per_page / plan.page_size,
        reserved_tokens=plan.max_model_len,
    )


def print_figures(f: Figures) -> None:
    """The table and what its rows assume."""
    from rich.console import Console
    from rich.table import Table

    run = Table(title="The run", title_justify="left", show_header=False)
    run.add_row("requests, all at once [1]", f"{f.requests}")
    run.add_row("tokens in, out", f"{f.prompt_tokens}, {f.output_tokens}")
    run.add_row("seconds [2]", f"{f.seconds:.1f}")
    run.add_row("tokens out a second [2]", f"{f.tokens_per_second:.0f}")
    run.add_row("mean batch size [3]", f"{f.mean_batch_size:.1f}")
    run.add_row("pages used at the peak [4]", f"{f.pages_at_peak} of {f.num_pages}, of {f.page_size} tokens each")

    memory = Table(title="KV memory at the peak [4]", title_justify="left")
    for name in ("", "pages", "one reservation a request [5]"):
        memory.add_column(name, justify="left" if not name else "right")
    paged, contiguous = f.paged_bytes / MIB, f.contiguous_bytes / MIB
    memory.add_row("held", f"{paged:,.1f} MiB", f"{contiguous:,.1f} MiB")
    memory.add_row("wasted [6]", f"{f.paged_wasted_fraction:.1%}", f"{f.contiguous_wasted_fraction:.1%}")

    notes = (
        f"[1] chat template, greedy, at most {MAX_TOKENS} tokens an answer",
        f"[2] wall time of all answers together; {f.compile_seconds:.1f} s to compile the steps, or to load them from "
        "the cache, come on top",
        "[3] requests in a step, averaged over all steps; answers that end early leave smaller steps behind",
        f"[4] the step with most pages in use: {f.running_at_peak} requests held {f.tokens_at_peak} tokens, "
        f"{f.bytes_per_token / 1024:.0f} KiB each",
        f"[5] what the same {f.running_at_peak} requests would hold if each reserved room for the longest sequence, "
        f"{f.reserved_tokens:,} tokens, as it must in one piece when nobody knows how long an answer will be",
        "[6] part of the held memory that has no token in it",
    )
    console = Console(highlight=False, markup=False)  # cells hold "[1]", which is no markup
    for table in (run, memory):
        console.print(table)
    console.print("\n".join(notes))
    console.print(f"\nThe pages held {f.contiguous_bytes / f.paged_bytes:.0f} times less memory for the same answers.")


def print_answers(outputs: Sequence["Output"]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        cut = " …" if output.finish_reason == "length" else ""
        console.print(Text(f"Q: {question}", style="bold"))
        console.print(f"A: {output.text.strip()}{cut}\n")


def load(model: str = "smollm2-135m-instruct", num_pages: int | None = None) -> "LLM":
    """The model in an engine that is just large enough for the questions."""
    print(f"Loading {model} (the first time it is downloaded, and two steps are compiled)", flush=True)
    from jpaged import LLM, EngineConfig, SchedulerConfig

    config = EngineConfig(
        scheduler=SchedulerConfig(max_num_seqs=len(QUESTIONS), max_num_batched_tokens=256),
        # Two shapes, one to decode and one to read questions: each is compiled the first time.
        token_buckets=(len(QUESTIONS), 256),
    )
    return LLM(model, config=config, num_pages=num_pages)


def run(llm: "LLM") -> Figures:
    """Answers, prints, gives the figures."""
    from jpaged import SamplingParams

    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    start = time.perf_counter()
    outputs = list(llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)))
    seconds = time.perf_counter() - start
    print()
    print_answers(outputs)
    result = figures(llm, outputs, seconds)
    print_figures(result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Answers a handful of questions at once, and shows what pages saved.")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON in the last line")
    as_json = parser.parse_args().json
    result = run(load())
    if as_json:
        print_json("demo", result.as_dict())


if __name__ == "__main__":
    main()
