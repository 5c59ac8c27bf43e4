"""`draw`: the pictures of docs/benchmarks/memory.md."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jpaged.plots import GroupedBars, Lines, Panel, StackedBars, save_figure
from scripts.render_memory import AT_ONCE, CAUSES, PAPER_CAUSES, SCHEMES, Record, having


def draw(records: Sequence[Record], folder: Path) -> Iterator[Path]:
    """Draws what there are records of, and names each file."""
    makers = {
        "memory-causes": _causes,
        "memory-batches": _batches,
        "memory-page-sizes": _page_sizes,
        "memory-sharing": _sharing,
        "memory-hits": _hits,
        "memory-swap": _swap,
    }
    for name, make in makers.items():
        if panels := make(records):
            path = folder / f"{name}.png"
            save_figure(path, *panels)
            yield path


def _causes(records: Sequence[Record]) -> list[Panel]:
    for title, feeds, _ in having(records, "batches"):
        bars = {
            name: {cause: 100 * share for cause, share in feeds[AT_ONCE][scheme]["saturated_shares"].items()}
            for scheme, name in SCHEMES.items()
        }
        paper = {SCHEMES[scheme]: parts for scheme, parts in PAPER_CAUSES.items()}
        labels = CAUSES | {"rounding": "rounded to a power of two (paper: external, other, free)"}
        return [
            StackedBars(bars=bars, ylabel="part of the pool, %", title=f"{title}, all at once", labels=CAUSES),
            StackedBars(bars=paper, ylabel="part of the pool, %", title="The paper, figure 2", labels=labels),
        ]
    return []


def _batches(records: Sequence[Record]) -> list[Panel]:
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for title, feeds, record in having(records, "batches"):
        hardware = record.results["workload"]["hardware"]
        schemes = feeds[AT_ONCE]
        means = {name: schemes[scheme][schemes["ratios_of"]] for scheme, name in SCHEMES.items()}
        groups.setdefault(hardware, {})[title.replace(", ", "\n")] = means
    return [
        GroupedBars(groups=bars, ylabel="requests at once, more waiting", title=f"Memory of {hardware}")
        for hardware, bars in groups.items()
    ]


def _page_sizes(records: Sequence[Record]) -> list[Panel]:
    waste, at_once, found = {}, {}, {}
    for title, part, _ in having(records, "page_sizes"):
        rows = part["by_page_size"]
        sizes = [int(size) for size in rows]
        waste[title] = (sizes, [100 * row["wasted_fraction"] for row in rows.values()])
        means = [row["saturated_mean_requests"] for row in rows.values()]
        at_once[title] = (sizes, [100 * mean / means[0] if means[0] else 0.0 for mean in means])
        found[title] = (sizes, [100 * row["same_prompt_again"]["hit_fraction"] for row in rows.values()])
    if not waste:
        return []
    x: dict[str, Any] = {"xlabel": "tokens a page", "log2_x": True}
    return [
        Lines(series=waste, ylabel="empty slots of used pages, %", title="Waste", **x),
        Lines(series=at_once, ylabel="requests at once, % of the first", title="In the same memory", **x),
        Lines(series=found, ylabel="found in full pages, %", title="The same prompt again", **x),
    ]


def _sharing(records: Sequence[Record]) -> list[Panel]:
    sampling: dict[str, dict[str, float]] = {}
    beams: dict[str, dict[str, float]] = {}
    for title, part, _ in having(records, "sharing"):
        for count, row in part["sampling"].items():
            sampling.setdefault(count, {})[title] = 100 * row["shared_fraction"]
        for count, row in part["beam_search"]["nearly alike"].items():
            beams.setdefault(count, {})[title] = 100 * row["shared_fraction"]
    if not sampling:
        return []
    return [
        GroupedBars(groups=sampling, xlabel="samples", ylabel="pages saved, %", title="Parallel sampling"),
        GroupedBars(groups=beams, xlabel="beams", ylabel="pages saved, %", title="Beam search, scores nearly alike"),
    ]


def _hits(records: Sequence[Record]) -> list[Panel]:
    panels: list[Panel] = []
    for title, part, _ in having(records, "blocks"):
        rows = {key: row for key, row in part["by_pages"].items() if key != "no limit"}
        pages = [int(key.replace(",", "")) for key in rows]
        series = {
            "full pages kept": (pages, [100 * row["hit_fraction"] for row in rows.values()]),
            "tails kept too": (pages, [100 * row["tails_kept"]["hit_fraction"] for row in rows.values()]),
            "no limit": (pages, [100 * part["by_pages"]["no limit"]["hit_fraction"]] * len(pages)),
        }
        label = f"pages of {part['tokens_per_page']} tokens"
        panels.append(Lines(series=series, xlabel=label, ylabel="prompt tokens found, %", title=title, log2_x=True))
    for title, part, _ in having(records, "chat"):
        slots = [int(key) for key in part["by_slots"]]
        series = {
            "found": (slots, [100 * row["hit_fraction"] for row in part["by_slots"].values()]),
            "said before": (slots, [100 * part["said_before_fraction"]] * len(slots)),
        }
        title = f"{title.split(',')[0]}, {part['users']} conversations at once"
        panels.append(
            Lines(series=series, xlabel="tokens in the pool", ylabel="prompt tokens found, %", title=title, log2_x=True)
        )
    return panels


def _swap(records: Sequence[Record]) -> list[Panel]:
    return [
        _swap_panel(record.results, tokens, record.device)
        for record in records
        if record.script == "bench_swap"
        for tokens in record.results["tokens"]
    ]


def _swap_panel(results: Mapping[str, Any], tokens: int, device: str) -> Panel:
    moved = {
        int(size): row["pages"][key]
        for size, row in results["by_page_size"].items()
        if (key := str(-(-tokens // int(size)))) in row["pages"]
    }
    sizes, rows = list(moved), list(moved.values())
    again = 1e3 * results["prefill_s_per_token"] * tokens
    series = {
        "swap out": (sizes, [1e3 * row["out_s"] for row in rows]),
        "swap in": (sizes, [1e3 * row["in_s"] for row in rows]),
        "out and in": (sizes, [1e3 * (row["out_s"] + row["in_s"]) for row in rows]),
        "compute again": (sizes, [again] * len(sizes)),
    }
    title = f"{tokens:,} tokens, {results['model']}, {device}"
    return Lines(series=series, xlabel="tokens a page", ylabel="ms", title=title, log2_x=True, log_y=True)
