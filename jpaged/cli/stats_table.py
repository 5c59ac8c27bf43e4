"""What `jpaged generate --stats` prints."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from jpaged.request import Output

if TYPE_CHECKING:
    from jpaged.engine import Engine


def print_stats(engine: "Engine", outputs: Sequence[Output], seconds: float) -> None:
    """Prints a table of a run to the error stream.

    Args:
      engine: where it ran, and nothing else did.
      outputs: what came out.
      seconds: wall time, compiling included.
    """
    stats, peak = engine.stats(), engine.stats().peak
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.completions)
    found = stats.num_cached_tokens / max(stats.num_queried_tokens, 1)
    steps = max(stats.num_steps, 1)
    running_s = max(seconds - stats.compile_s, 1e-9)
    phases = ("plan", "pack", "dispatch", "wait", "update")
    rows = {
        "requests": f"{len(outputs)}",
        "tokens": f"{prompt_tokens} in, {output_tokens} out",
        "seconds": f"{running_s:.2f}, and {stats.compile_s:.2f} to compile or load {stats.num_compilations} steps",
        "tokens out a second": f"{output_tokens / running_s:.1f}",
        "steps": f"{stats.num_steps}, {stats.num_step_rows / steps:.1f} requests each",
        "milliseconds a step": ", ".join(f"{p} {getattr(stats, f'{p}_s') / steps * 1e3:.2f}" for p in phases),
        "pages at the peak": f"{peak.pages_used} of {stats.num_pages - 1}, {peak.wasted_fraction:.1%} of them empty",
        "prefix cache": f"{stats.num_cached_tokens} of {stats.num_queried_tokens} tokens found ({found:.1%})",
        "pages copied": f"{stats.num_copied_pages}",
        "preemptions": f"{stats.num_preemptions}, {stats.num_swaps} of them to the host",
        "attention": f"{engine.implementation} ({engine.implementation_reason})",
    }
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    for name, value in rows.items():
        console.print(f"{name:<22} {value}")
