"""What is measured of a workload: each function gives one part of the results."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from jpaged.lengths import Lengths
from jpaged.residency import RESERVATIONS, final_wasted_fraction
from scripts.memory.beam_scores import BeamScores
from scripts.memory.contiguous import serve_contiguous
from scripts.memory.feed import ChatFeed, TimedFeed, all_at_once, poisson
from scripts.memory.hardware import HARDWARE, Hardware
from scripts.memory.hits import same_prompt_again, serve_blocks
from scripts.memory.replay import Settings, replay, rounded

FINAL_PAGE_SIZES: Final = (8, 16, 32, 64, 128, 256)
SWEPT_PAGE_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_SEQUENCES: Final = (2, 4, 6)
BLOCK_PAGES: Final = (1_000, 4_000, 16_000, 64_000, None)
BEAM_SCORES: Final = {"alike": 0.0, "nearly alike": 0.05, "apart": 1.0}  # how much of its own a beam has: `BeamScores`
_LARGEST: Final = "llama-3-8b-h200"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A workload and the memory that it gets.

    Attributes:
      all: every request of the source.
      lengths: those that are served.
      hardware_name, hardware: memory and speed.
      settings: sizes and policies.
      max_model_len: what a system reserves that does not know how long an answer will be.
      rate: requests a second of Poisson arrivals, for one more run; `None`: none.
      swept_requests, sampled_requests, beam_requests: so many, evenly spread, are enough for page sizes, for parallel
        sampling and for beam search.
      chats, users: conversations, and how many go on at once.
    """

    all: Lengths
    lengths: Lengths
    hardware_name: str
    hardware: Hardware
    settings: Settings
    max_model_len: int
    rate: float | None = None
    swept_requests: int = 2000
    sampled_requests: int = 1500
    beam_requests: int = 100
    chats: int = 1200
    users: int = 128


def thinned(lengths: Lengths, count: int) -> Lengths:
    """`count` requests, evenly spread; all, if there are no more."""
    if count >= len(lengths):
        return lengths
    mask = np.zeros(len(lengths), bool)
    mask[np.arange(count) * len(lengths) // count] = True
    return lengths.where(mask)


def fragmentation(workload: Workload) -> dict[str, Any]:
    """Empty part of the pages when every request, counted once, holds all its tokens, by page size."""
    chosen = {"all": workload.all, "served": workload.lengths}
    return {
        name: {str(size): round(final_wasted_fraction(lengths, size), 6) for size in FINAL_PAGE_SIZES}
        for name, lengths in chosen.items()
    }


def batches(workload: Workload) -> dict[str, Any]:
    """The workload in pages and in contiguous runs, in the same memory, by how requests arrive."""
    lengths = workload.lengths
    feeds: dict[str, Callable[[], TimedFeed]] = {"all at once": lambda: all_at_once(lengths)}
    if (times := lengths.arrival_s) is not None:
        feeds["at the trace's times"] = lambda: TimedFeed(times)
    if (rate := workload.rate) is not None:
        feeds[f"{rate:g} requests/s"] = lambda: poisson(lengths, rate)
    results = {}
    for name, feed in feeds.items():
        schemes = {"paged": replay(lengths, feed(), workload.hardware, workload.settings).as_dict()}
        for reservation in RESERVATIONS:
            schemes[reservation] = serve_contiguous(
                lengths,
                feed(),
                workload.hardware,
                reservation,
                slots=workload.settings.slots,
                max_model_len=workload.max_model_len,
                max_num_seqs=workload.settings.max_num_seqs,
                max_num_batched_tokens=workload.settings.max_num_batched_tokens,
            )
        # All at once, the memory decides as long as requests wait; else how fast they come has a say all the time.
        waits = name == "all at once" and all(result["saturated_mean_requests"] for result in schemes.values())
        what = "saturated_mean_requests" if waits else "mean_requests"
        ratios = {scheme: round(schemes["paged"][what] / schemes[scheme][what], 3) for scheme in RESERVATIONS}
        results[name] = schemes | {"ratios": ratios, "ratios_of": what}
    if times is None:
        unknown = replace(workload.settings, known_lengths=False, max_model_len=workload.max_model_len)
        result = replay(lengths, all_at_once(lengths), workload.hardware, unknown)
        results["all at once"]["lengths not known"] = result.as_dict()
    return results


def page_sizes(workload: Workload) -> dict[str, Any]:
    """The same memory in pages of other sizes, all requests at once; and what is found of a prompt that comes again."""
    lengths, results = thinned(workload.lengths, workload.swept_requests), {}
    for size in SWEPT_PAGE_SIZES:
        result = replay(
            lengths, all_at_once(lengths), workload.hardware, replace(workload.settings, page_size=size)
        ).as_dict()
        kept = ("wasted_fraction", "saturated_mean_requests", "num_preemptions", "recomputed_fraction", "seconds")
        results[str(size)] = {name: result[name] for name in kept} | {
            "same_prompt_again": same_prompt_again(thinned(lengths, 300), size)
        }
    return {"num_requests": len(lengths), "by_page_size": results}


def sharing(workload: Workload) -> dict[str, Any]:
    """Pages that parallel samples and beams need not have since they share them.

    In a pool where nobody is preempted: what is preempted begins its life more than once, when more of it is shared.
    """
    slots = HARDWARE[_LARGEST].slots
    lengths = thinned(workload.lengths, workload.sampled_requests)
    fewer = thinned(workload.lengths, workload.beam_requests)

    def saved(requests: Lengths, count: int, scores: BeamScores | None = None) -> dict[str, Any]:
        settings = replace(workload.settings, slots=slots, num_sequences=count, prefix_cache=False, host_slots=0)
        settings = replace(settings, beams=scores is not None)
        result = replay(requests, all_at_once(requests), workload.hardware, settings, scores=scores)
        names = ("shared_fraction", "mean_requests", "mean_sequences", "num_copied_pages", "num_preemptions")
        return {name: value for name, value in result.as_dict().items() if name in names}

    return {
        "slots": slots,
        "num_requests": len(lengths),
        "sampling": {str(count): saved(lengths, count) for count in NUM_SEQUENCES},
        "num_beam_requests": len(fewer),
        "beam_search": {
            name: {str(count): saved(fewer, count, BeamScores(2 * count, own=own)) for count in NUM_SEQUENCES}
            for name, own in BEAM_SCORES.items()
        },
    }


def chat(workload: Workload) -> dict[str, Any]:
    """Whole conversations: what later turns find of earlier ones, with little and with much memory for it."""
    lengths, hardware = workload.all, HARDWARE[_LARGEST]
    assert lengths.conversation_ids is not None
    lengths = lengths.where(lengths.conversation_ids < workload.chats)
    ids, prompts, totals = lengths.conversation_ids, lengths.prompt_tokens, lengths.total_tokens
    assert ids is not None
    again = np.flatnonzero(np.diff(ids) == 0)
    most = np.minimum(totals[again], prompts[again + 1] - 1).sum() / prompts.sum()
    results = {}
    for slots in (hardware.slots // 16, hardware.slots // 4, hardware.slots):
        settings = replace(workload.settings, slots=slots, host_slots=slots)
        feed = ChatFeed(ids, workload.users)
        results[str(slots)] = replay(lengths, feed, hardware, settings).as_dict()
    return {
        "num_chats": int(ids[-1]) + 1,
        "num_requests": len(lengths),
        "users": workload.users,
        "hardware": _LARGEST,
        "said_before_fraction": rounded(float(most)),
        "by_slots": results,
    }


def blocks(workload: Workload) -> dict[str, Any]:
    """Prompt tokens that are found by the number of pages, for a trace with hash ids.

    Full pages alone are kept, which is what simulations of this trace count; and partly filled last pages too, which is
    what the engine does.
    """
    results = {}
    for pages in BLOCK_PAGES:
        full = serve_blocks(workload.all, pages, keep_tails=False)
        results["no limit" if pages is None else f"{pages:,}"] = full | {
            "tails_kept": serve_blocks(workload.all, pages, keep_tails=True)
        }
    return {"tokens_per_page": workload.all.tokens_per_hash_id, "by_pages": results}


def _always(_: Workload) -> bool:
    return True


def _is_untimed(workload: Workload) -> bool:
    return workload.lengths.arrival_s is None


# Part -> (whether the workload has it, function).
PARTS: Final[dict[str, tuple[Callable[[Workload], bool], Callable[[Workload], dict[str, Any]]]]] = {
    "fragmentation": (_always, fragmentation),
    "batches": (_always, batches),
    "page_sizes": (_is_untimed, page_sizes),
    "sharing": (_is_untimed, sharing),
    "chat": (lambda workload: workload.all.conversation_ids is not None, chat),
    "blocks": (lambda workload: workload.all.hash_ids is not None, blocks),
}
