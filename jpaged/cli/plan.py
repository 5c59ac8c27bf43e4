"""`jpaged plan`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from jpaged.config import DEFAULT_PAGE_SIZE, CacheConfig

if TYPE_CHECKING:
    from rich.console import Console


_DEFAULT_LENGTHS: Final = "fixed:1000+200"


def plan(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Well-known name such as llama-3-8b, config.json, folder, .gguf file."),
    ],
    memory: Annotated[
        str, typer.Option(help="Memory of the device: 141GB is decimal, 80GiB binary.", show_default=False)
    ],
    lengths: Annotated[
        str,
        typer.Option(help="fixed:PROMPT+OUTPUT, hist:FILE, trace:FILE, or lognormal:PROMPT+OUTPUT[,sigma=1.0]."),
    ] = _DEFAULT_LENGTHS,
    page_size: Annotated[
        int, typer.Option(help="Tokens a page; a multiple of 8. The kernel for TPU takes 64 or 128 by default.")
    ] = DEFAULT_PAGE_SIZE,
    memory_fraction: Annotated[
        float, typer.Option(help="Part of the memory for weights, sampler's state and pages together.")
    ] = CacheConfig.memory_fraction,
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "bfloat16",
    weights: Annotated[
        str | None, typer.Option(help="int8 or fp8: the layers' weights take a byte each; by default --dtype.")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Of K and V, also int8 and float8_e4m3fn; by default that of the weights.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences that the engine may run at once; by default what fits.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer at the most; by default the model's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a picture into a .png file.")] = None,
) -> None:
    """Say how many sequences of a workload fit into a device's memory, and what would be wasted, without the device.

    The same is told for contiguous reservations and for other page sizes. Nothing is downloaded and nothing allocated.

    Lengths may end in ,first_turns ,max_prompt=N ,max_total=N ,min_output=N to select requests; a trace is a CSV of the
    Azure LLM inference traces or of ShareGPT lengths, or the JSON lines of a Mooncake trace, plain or .gz.
    """
    from jpaged.capacity import plan_capacity
    from jpaged.model_bytes import parse_bytes
    from jpaged.model_configs import config_of
    from jpaged.workload import parse_lengths

    result = plan_capacity(
        config_of(model),
        parse_lengths(lengths),
        device_bytes=parse_bytes(memory),
        memory_fraction=memory_fraction,
        page_size=page_size,
        dtype=dtype,
        weights=weights,
        kv_dtype=kv_dtype,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
    )
    report = {"model": model, **result.as_dict()}
    if plot is not None:
        from jpaged.plots import plot_capacity

        plot_capacity(report, plot)
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _print_report(report)
    if plot is not None:
        print(f"wrote {plot}", file=sys.stderr)


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console

    from jpaged.model_bytes import format_bytes

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)
    usable = int(report["device_bytes"] * report["memory_fraction"])
    size, tokens = report["page_size"], report["token_capacity"]
    refused = report["num_refused"]
    rows = {
        "memory": format_bytes(report["device_bytes"]),
        f"{100 * report['memory_fraction']:g}% of it": format_bytes(usable),
        "weights": f"{format_bytes(report['weight_bytes'])}: {report['num_parameters']:,} in {report['dtype']}"
        + (f", the layers' in {report['weights']}" if report["weights"] else ""),
        "sampler's state": f"{format_bytes(report['sampler_bytes'])}: {report['max_num_seqs']:,} sequences",
        "pages": f"{format_bytes(report['pool_bytes'])}: {report['num_pages'] - 1:,} and the null page",
        "tokens that fit": f"{tokens:,}: {size} a page",
        "a page": f"{format_bytes(report['bytes_per_page'])} in {report['kv_dtype']}",
        "a token": format_bytes(report["bytes_per_token"]),
        "longest sequence": f"{report['max_model_len']:,} tokens",
        "sliding window": f"{report['sliding_window']} tokens" if report["sliding_window"] else "none",
        "workload": f"{report['source']}: {report['mean_prompt_tokens']:,.1f} tokens in, "
        f"{report['mean_output_tokens']:,.1f} out on average",
        "requests": f"{report['num_requests']:,}"
        + (f", of which {refused:,} are longer than the longest sequence and left out" if refused else ""),
    }
    console.print(report["model"], style="bold")
    for name, value in rows.items():
        console.print(f"  {name:<18}{value}", soft_wrap=True)
    _print_schemes(console, report)
    _print_page_sizes(console, report)


def _print_schemes(console: "Console", report: dict[str, Any]) -> None:
    from jpaged.plots import CAUSES

    schemes = [report["paged"], *report["contiguous"]]
    heads = ["sequences", "paged holds", "all at the end", *CAUSES.values()]
    rows = [
        [
            scheme["name"],
            f"{scheme['sequences']:,.1f}",
            f"{schemes[0]['sequences'] / scheme['sequences']:.2f}x",
            f"{scheme['sequences_at_end']:,.1f}",
            *(f"{100 * scheme['shares'][cause]:.2f}" for cause in CAUSES),
        ]
        for scheme in schemes
    ]
    _print_table(console, "Sequences at once, and what is in the memory (%, steady state)", ["", *heads], rows)


def _print_page_sizes(console: "Console", report: dict[str, Any]) -> None:
    short = list(report["page_sizes"][0]["short_sequences"])
    heads = ["page size", "pages", "pages a sequence", "sequences", "all at the end", "waste %", "at the end %"]
    rows = [
        [
            f"{row['page_size']}",
            f"{row['num_pages']:,}",
            f"{row['pages_per_sequence']:,.1f}",
            f"{row['sequences']:,.1f}",
            f"{row['sequences_at_end']:,.1f}",
            f"{100 * row['wasted_fraction']:.2f}",
            f"{100 * row['final_wasted_fraction']:.2f}",
            *(f"{row['short_sequences'][tokens]:,}" for tokens in short),
        ]
        for row in report["page_sizes"]
    ]
    title = "The same memory in pages of other sizes; last, how many sequences of so few tokens each it holds"
    _print_table(console, title, [*heads, *(f"of {tokens} tokens" for tokens in short)], rows)


def _print_table(console: "Console", title: str, heads: list[str], rows: list[list[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)
