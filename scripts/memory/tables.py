"""`tables`: the results of a part as tables for people."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from jpaged.plots import CAUSES

Table = tuple[str, list[str], Sequence[Sequence[object]]]
SCHEMES: Final = {"paged": "pages", "oracle": "Oracle", "pow2": "Pow2", "max": "Max"}
SHARES: Final = CAUSES | {"free": "not given out"}


def percent(fraction: float, digits: int = 1) -> str:
    """Example:
    >>> percent(0.1234), percent(0.1234, 2)
    ('12.3', '12.34')
    """
    return f"{100 * fraction:.{digits}f}"


def _fragmentation(part: Mapping[str, Any]) -> list[Table]:
    sizes = list(part["all"])
    names = {"all": "all requests", "served": "those that are served"}
    rows = [[names[key], *(percent(part[key][size], 2) for size in sizes)] for key in names]
    return [("Empty slots when every request holds all its tokens, %, by page size", ["", *sizes], rows)]


def _batches(part: Mapping[str, Any]) -> list[Table]:
    found: list[Table] = []
    for feed, schemes in part.items():
        rows = [
            [
                title,
                f"{schemes[name]['mean_requests']:.2f}",
                f"{schemes[name]['saturated_mean_requests']:.2f}",
                percent(schemes[name]["saturated_fraction"]),
                f"{schemes['ratios'].get(name, 1.0):.2f}",
            ]
            for name, title in SCHEMES.items()
        ]
        columns = ["", "requests at once", "while more wait", "which is of the time, %", "pages have x times as many"]
        found.append((f"Requests {feed}", columns, rows))
        rows = [
            [title, *(percent(schemes[name]["saturated_shares"].get(cause, 0.0)) for cause in SHARES)]
            for name, title in SCHEMES.items()
        ]
        found.append((f"Requests {feed}: the memory by cause while more wait, %", ["", *SHARES.values()], rows))
        found += [_paged(f"Pages, requests {feed}", schemes["paged"])]
        if (unknown := schemes.get("lengths not known")) is not None:
            found += [_paged(f"Pages, requests {feed}, whose lengths the scheduler does not know", unknown)]
    return found


def _paged(title: str, paged: Mapping[str, Any]) -> Table:
    rows = [
        ["requests at once", f"{paged['mean_requests']:.2f}"],
        ["while more wait", f"{paged['saturated_mean_requests']:.2f}"],
        ["empty slots of used pages, %", percent(paged["wasted_fraction"], 2)],
        ["preemptions", f"{paged['num_preemptions']:,}"],
        ["of them swapped to the host", f"{paged['num_swaps']:,}"],
        ["requests preempted", f"{paged['num_preempted_requests']:,} of {paged['num_requests']:,}"],
        ["most times that a token was computed", paged["max_times_computed"]],
        ["computed again, %", percent(paged["recomputed_fraction"], 2)],
        ["prompt tokens found in the prefix cache, %", percent(paged["hit_fraction"], 2)],
    ]
    return title, ["", ""], rows


def _page_sizes(part: Mapping[str, Any]) -> list[Table]:
    rows = [
        [
            size,
            percent(row["wasted_fraction"], 2),
            f"{row['saturated_mean_requests']:.2f}",
            row["num_preemptions"],
            percent(row["same_prompt_again"]["hit_fraction"]),
            percent(row["same_prompt_again"]["with_partial_fraction"]),
        ]
        for size, row in part["by_page_size"].items()
    ]
    columns = ["page size", "empty slots, %", "requests at once", "preemptions", "same prompt: full pages, %", "all, %"]
    return [(f"The same memory in pages of other sizes, {part['num_requests']:,} requests at once", columns, rows)]


def _sharing(part: Mapping[str, Any]) -> list[Table]:
    counts = list(part["sampling"])
    ways = {"parallel sampling": part["sampling"]}
    ways |= {f"beam search, scores {name}": row for name, row in part["beam_search"].items()}
    rows = [[way, *(percent(row[count]["shared_fraction"]) for count in counts)] for way, row in ways.items()]
    return [("Pages saved by sharing, %, by sequences a request", ["", *counts], rows)]


def _chat(part: Mapping[str, Any]) -> list[Table]:
    rows = [
        [f"{int(slots):,}", percent(row["hit_fraction"]), percent(row["recomputed_fraction"]), row["num_preemptions"]]
        for slots, row in part["by_slots"].items()
    ]
    title = (
        f"{part['num_chats']:,} conversations, {part['users']} at once; said before: "
        f"{percent(part['said_before_fraction'])} % of the prompts' tokens"
    )
    return [(title, ["slots of the pool", "found, %", "computed again, %", "preemptions"], rows)]


def _blocks(part: Mapping[str, Any]) -> list[Table]:
    rows = [
        [
            pages,
            percent(row["hit_fraction"], 2),
            percent(row["tails_kept"]["hit_fraction"], 2),
            percent(row["tails_kept"]["with_partial_fraction"], 2),
        ]
        for pages, row in part["by_pages"].items()
    ]
    columns = ["pages", "full pages kept: found, %", "tails kept too: in full pages, %", "in all, %"]
    return [(f"Prompt tokens found, one by one, pages of {part['tokens_per_page']} tokens", columns, rows)]


_TABLES: Final[dict[str, Callable[[Mapping[str, Any]], list[Table]]]] = {
    "fragmentation": _fragmentation,
    "batches": _batches,
    "page_sizes": _page_sizes,
    "sharing": _sharing,
    "chat": _chat,
    "blocks": _blocks,
}


def tables(name: str, part: Mapping[str, Any]) -> list[Table]:
    """Title, columns and rows of each table of a part."""
    return _TABLES[name](part)
