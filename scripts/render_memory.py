"""Tables and pictures of docs/benchmarks/memory.md, from the records of bench_memory.py and bench_swap.py.

    python scripts/render_memory.py    draws the pictures; tables are written by scripts/render_benchmarks.py

The tables need the standard library alone, the pictures matplotlib (the extra `plots`). Figures of the paper are those
that it prints.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jpaged import plots
from scripts.markdown import table

ROOT: Final = Path(__file__).resolve().parent.parent
TITLES: Final = {
    "memory-sharegpt": "ShareGPT, first turns",
    "memory-alpaca-0.5": "Alpaca-like, sigma 0.5",
    "memory-alpaca-1.0": "Alpaca-like, sigma 1.0",
    "memory-azure-conv": "Azure, conversation",
    "memory-azure-code": "Azure, code",
    "memory-mooncake": "Mooncake, conversation",
}
SCHEMES: Final = {"paged": "pages", "oracle": "Oracle", "pow2": "Pow2", "max": "Max"}
CAUSES: Final = {**plots.CAUSES, "free": "not given out"}
# Kwon et al., SOSP 2023: figure 2 (OPT-13B, %; "rounding" holds external fragmentation and others, free slots too),
# figure 13 (mean batched requests at 2 and 30 requests a second), figure 15 (ShareGPT gives ranges alone).
PAPER_CAUSES: Final = {
    "paged": {"tokens": 96.3, "partly_filled": 3.7},
    "oracle": {"tokens": 38.2, "not_yet_used": 25.2, "rounding": 36.6},
    "pow2": {"tokens": 26.8, "not_yet_used": 17.9, "internal": 13.6, "rounding": 41.6},
    "max": {"tokens": 20.4, "not_yet_used": 13.3, "internal": 57.3, "rounding": 8.9},
}
PAPER_BATCHES: Final = {
    "ShareGPT": {"paged": 30.42, "oracle": 13.62, "pow2": 9.81, "max": 7.00},
    "Alpaca": {"paged": 132.44, "oracle": 72.75, "pow2": 43.24, "max": 7.00},
}
PAPER_SHARING: Final = {
    "sampling": {"Alpaca": ("6.1", "8.5", "9.8"), "ShareGPT": ("16.2 to 30.5",) * 3},
    "beam_search": {"Alpaca": ("37.6", "53.1", "55.2"), "ShareGPT": ("44.3 to 66.3",) * 3},
}
AT_ONCE: Final = "all at once"


class Record(Protocol):
    """What is read of a record of `scripts/render_benchmarks.py`."""

    @property
    def name(self) -> str: ...
    @property
    def script(self) -> str: ...
    @property
    def commit(self) -> str: ...
    @property
    def date(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def results(self) -> Mapping[str, Any]: ...


def source(record: Record) -> str:
    """When a record was measured and of which commit, for a cell of a table."""
    return f"{record.date}, `{record.commit}`"


def _percent(fraction: float, digits: int = 1) -> str:
    return f"{100 * fraction:.{digits}f}"


def having(records: Iterable[Record], part: str) -> Iterator[tuple[str, Mapping[str, Any], Record]]:
    """Title, the part's results, and the record, of workloads that have the part, in the order of `TITLES`."""
    places = {name: place for place, name in enumerate(TITLES)}
    found = [record for record in records if record.script == "bench_memory" and part in record.results]
    for record in sorted(found, key=lambda record: (places.get(record.name, len(places)), record.name)):
        yield TITLES.get(record.name, record.name), record.results[part], record


def workload_table(records: Sequence[Record]) -> str:
    """What was served, in which memory."""
    columns = ["Workload", "Source", "Requests", "Prompt", "Output", "Max reserves", "Hardware", "Slots", "Measured"]
    return table(
        columns,
        (
            [
                title,
                w["source"],
                f"{w['num_requests']:,}",
                f"{w['mean_prompt_tokens']:,.1f}",
                f"{w['mean_output_tokens']:,.1f}",
                f"{w['max_model_len']:,}",
                w["hardware"],
                f"{w['settings']['slots']:,}",
                source(record),
            ]
            for title, w, record in having(records, "workload")
        ),
        num_text=2,
    )


def waste_table(records: Sequence[Record]) -> str:
    """Waste and preemptions of the runs in pages."""
    columns = ["Workload", "Requests come", "Empty slots of used pages, %", "Preempted", "Of requests", "Swapped"]
    rows = (
        [
            title,
            feed if p is schemes["paged"] else f"{feed}, lengths not known",
            _percent(p["wasted_fraction"], 2),
            f"{p['num_preemptions']:,}",
            f"{p['num_requests']:,}",
            f"{p['num_swaps']:,}",
            f"{p['max_times_computed']}",
            _percent(p["recomputed_fraction"]),
            _percent(p["hit_fraction"]),
        ]
        for title, feeds, _ in having(records, "batches")
        for feed, schemes in feeds.items()
        for p in (schemes["paged"], schemes.get("lengths not known"))
        if p is not None
    )
    columns += ["A token computed, times at most", "Computed again, %", "Prompt tokens found, %"]
    return table(columns, rows, num_text=2)


def fragmentation_table(records: Sequence[Record]) -> str:
    """Empty slots when each request holds all its tokens."""
    sizes = ("8", "16", "32", "64", "128", "256")
    rows = []
    for title, part, _ in having(records, "fragmentation"):
        chosen = {"all": f"{title.split(',')[0]}, every turn" if part["all"] != part["served"] else "", "served": title}
        rows += [[chosen[key], *(_percent(part[key][n], 2) for n in sizes)] for key in ("served", "all") if chosen[key]]
    return table(["Workload", *(f"{n}, %" for n in sizes)], rows)


def cause_table(records: Sequence[Record]) -> str:
    """Figure 2."""
    rows = [
        [f"the paper, {SCHEMES[scheme]}", *(f"{part[cause]:.1f}" if cause in part else "–" for cause in CAUSES)]
        for scheme, part in PAPER_CAUSES.items()
    ]
    for title, feeds, _ in having(records, "batches"):
        shares = {scheme: feeds[AT_ONCE][scheme]["saturated_shares"] for scheme in SCHEMES}
        rows += [
            [f"{title}, {SCHEMES[scheme]}", *(_percent(share[cause]) if cause in share else "–" for cause in CAUSES)]
            for scheme, share in shares.items()
        ]
    return table(["", *(f"{cause}, %" for cause in CAUSES.values())], rows)


def batch_table(records: Sequence[Record]) -> str:
    """Figures 12 and 13."""
    ratios = [f"pages over {SCHEMES[scheme]}" for scheme in ("oracle", "pow2", "max")]

    def row(title: str, feed: str, mean: Mapping[str, float]) -> list[str]:
        times = [f"{mean['paged'] / mean[scheme]:.2f}" for scheme in ("oracle", "pow2", "max")]
        return [title, feed, *(f"{mean[scheme]:.2f}" for scheme in SCHEMES), *times]

    rates = {"ShareGPT": "2 requests/s", "Alpaca": "30 requests/s"}
    rows = [row(f"the paper, {name}", rates[name], mean) for name, mean in PAPER_BATCHES.items()]
    for title, feeds, _ in having(records, "batches"):
        for feed, schemes in feeds.items():
            mean = {scheme: schemes[scheme][schemes["ratios_of"]] for scheme in SCHEMES}
            rows.append(row(title, feed, mean))
            if (unknown := schemes.get("lengths not known")) is not None:
                mean = mean | {"paged": unknown[schemes["ratios_of"]]}
                rows.append(row(title, f"{feed}, lengths not known", mean))
    return table(["Workload", "Requests come", *SCHEMES.values(), *ratios], rows, num_text=2)


def page_size_table(records: Sequence[Record]) -> str:
    """Figure 18b."""
    columns = ["Workload", "Page size", "Empty slots of used pages, %", "Requests at once", "Time of the run, s"]
    rows = (
        [
            title,
            size,
            _percent(row["wasted_fraction"], 2),
            f"{row['saturated_mean_requests']:.1f}",
            f"{row['seconds']:,.0f}",
            _percent(row["same_prompt_again"]["hit_fraction"]),
            _percent(row["same_prompt_again"]["with_partial_fraction"]),
        ]
        for title, part, _ in having(records, "page_sizes")
        for size, row in part["by_page_size"].items()
    )
    return table([*columns, "Same prompt again: in full pages, %", "In all, %"], rows)


def sharing_table(records: Sequence[Record]) -> str:
    """Figure 15."""
    ways = {"sampling": "parallel sampling", "beam_search": "beam search"}
    rows = [
        [f"the paper, {name}", ways[way], *figures]
        for way, by_name in PAPER_SHARING.items()
        for name, figures in by_name.items()
    ]
    for title, part, _ in having(records, "sharing"):
        found = {"parallel sampling": part["sampling"]}
        found |= {f"beam search, scores {name}": row for name, row in part["beam_search"].items()}
        rows += [
            [title, way, *(_percent(row[n]["shared_fraction"]) for n in ("2", "4", "6"))] for way, row in found.items()
        ]
    return table(["Workload", "", "2 sequences, %", "4, %", "6, %"], rows, num_text=2)


def chat_table(records: Sequence[Record]) -> str:
    """Prefix hits of conversations."""
    columns = ["Workload", "Conversations", "At once", "Said before, %", "Slots of the pool", "Found, %"]
    return table(
        columns,
        (
            [
                title.split(",")[0],
                f"{part['num_chats']:,}",
                f"{part['users']}",
                _percent(part["said_before_fraction"]),
                f"{int(slots):,}",
                _percent(row["hit_fraction"]),
            ]
            for title, part, _ in having(records, "chat")
            for slots, row in part["by_slots"].items()
        ),
    )


def block_table(records: Sequence[Record]) -> str:
    """Prefix hits by pages."""
    columns = ["Workload", "Pages", "Full pages kept: found, %", "Tails kept too: in full pages, %", "In all, %"]
    return table(
        columns,
        (
            [
                title,
                pages,
                _percent(row["hit_fraction"], 2),
                _percent(row["tails_kept"]["hit_fraction"], 2),
                _percent(row["tails_kept"]["with_partial_fraction"], 2),
            ]
            for title, part, _ in having(records, "blocks")
            for pages, row in part["by_pages"].items()
        ),
    )


def swap_table(records: Sequence[Record]) -> str:
    """Figure 19."""
    columns = ["Hardware", "Model", "Tokens", "Page size", "Out, ms", "In, ms", "Both, ms", "Computing again, ms"]
    rows = []
    for record in records:
        if record.script != "bench_swap":
            continue
        r = record.results
        for tokens in r["tokens"]:
            for size, row in r["by_page_size"].items():
                if (moved := row["pages"].get(str(-(-tokens // int(size))))) is None:
                    continue
                both, again = moved["out_s"] + moved["in_s"], r["prefill_s_per_token"] * tokens
                ms = [f"{1e3 * seconds:.2f}" for seconds in (moved["out_s"], moved["in_s"], both, again)]
                model = f"{r['model']}, {r['layers']} layers, {r['dtype']}"
                rows.append([record.device, model, f"{tokens:,}", size, *ms])
    return table(columns, rows, num_text=2)


PARTS: Final[Mapping[str, Callable[[Sequence[Record]], str]]] = {
    "memory-workloads": workload_table,
    "memory-waste": waste_table,
    "memory-fragmentation": fragmentation_table,
    "memory-causes": cause_table,
    "memory-batches": batch_table,
    "memory-page-sizes": page_size_table,
    "memory-sharing": sharing_table,
    "memory-chat": chat_table,
    "memory-blocks": block_table,
    "memory-swap": swap_table,
}


def main() -> int:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    from jpaged.errors import ConfigError
    from scripts.memory.figures import draw
    from scripts.render_benchmarks import load_records

    folder = ROOT / "docs" / "benchmarks"
    try:
        for path in draw(load_records(folder), folder):
            print(f"drawn: {path.relative_to(ROOT)}")
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
