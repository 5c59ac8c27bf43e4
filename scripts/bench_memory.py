"""What pages do for a workload: waste, batch size, sharing, prefix hits; beside contiguous reservations.

    python scripts/bench_memory.py --trace FILE                       a trace: Azure, Mooncake or ShareGPT lengths
    python scripts/bench_memory.py --lengths lognormal:19.31+58.45    any workload that `jpaged plan` takes
    python scripts/bench_memory.py --trace FILE --part blocks --json  one part; only the JSON line

The real allocator, prefix cache, memory manager and scheduler serve the requests; only the model is fake: its tokens
end nothing, so an output is as long as the trace says. The time of a step follows a roofline of the chosen hardware
(`--hardware`), whose constants can be given too. Requests come all at once, so that there is always a next one, and if
the trace has times, at its times as well. All schemes get the same slots and the same budget of tokens a
step, serve in strict order of arrival (`max_passes` 0), and change their batch with every step. Parts:

    fragmentation  empty slots when every request holds all its tokens, by page size
    batches        waste, requests at once, preemptions; contiguous runs of a buddy allocator: Max reserves the longest
                   sequence, Pow2 the output's next power of two, Oracle what will be needed
    page_sizes     the same memory in pages of 1 to 256 tokens
    sharing        pages that parallel samples and beams share
    chat           conversations: what a turn finds of those before it
    blocks         hit rate by pages, for traces with hash ids

Of a file of conversations, first turns are served of fewer than 1,024 prompt tokens, fewer than 2,048 in all, and at
least 4 output tokens (`--all-turns`: everything). docs/benchmarks/memory.md says where to get the traces.

Reference: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023,
figures 2, 12, 13, 15, 18b.
"""

import argparse
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from jpaged.errors import ConfigError, JpagedError
from jpaged.lengths import Lengths
from jpaged.workload import parse_lengths
from scripts.memory.hardware import HARDWARE
from scripts.memory.parts import PARTS, Workload
from scripts.memory.replay import Settings
from scripts.memory.tables import tables
from scripts.report import print_json, print_table

_PAPER_MODEL_LEN = 2048
# The first one that holds a few sequences of `max_model_len` tokens.
_HARDWARE_BY_LENGTH = {
    "opt-13b-a100-40gb": _PAPER_MODEL_LEN,
    "opt-13b-h200": 16_384,
    "llama-3-8b-h200": float("inf"),
}


def paper_selection(lengths: Lengths) -> Lengths:
    """First turns within the bounds that the paper's systems serve."""
    return lengths.select(first_turns=True, max_prompt=1023, max_total=_PAPER_MODEL_LEN - 1, min_output=4)


def make_workload(args: argparse.Namespace) -> Workload:
    """The workload that the arguments describe.

    Raises:
      JpagedError: they describe none.
    """
    everything = parse_lengths(args.lengths or f"trace:{args.trace}")
    lengths = everything
    if everything.conversation_ids is not None and not args.all_turns:
        lengths = paper_selection(everything)
    if lengths.weights is not None:
        raise ConfigError(f"{lengths.source} has weights, expected requests one by one; see `jpaged plan` for it")
    if args.requests is not None:
        lengths, everything = (part.where(np.arange(len(part)) < args.requests) for part in (lengths, everything))
    longest = int(lengths.total_tokens.max())
    max_model_len = args.max_model_len or max(_PAPER_MODEL_LEN, 1 << (longest - 1).bit_length())
    name = args.hardware or next(name for name, most in _HARDWARE_BY_LENGTH.items() if max_model_len <= most)
    constants = {key: getattr(args, key) for key in ("slots", "weights_s", "token_s", "kv_token_s")}
    hardware = replace(HARDWARE[name], **{key: value for key, value in constants.items() if value is not None})
    settings = Settings(
        slots=hardware.slots,
        page_size=args.page_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        headroom_pages=args.headroom_pages,
        preemption=args.preemption,
        host_slots=hardware.slots if args.host_slots is None else args.host_slots,
    )
    return Workload(
        all=everything,
        lengths=lengths,
        hardware_name=name,
        hardware=hardware,
        settings=settings,
        max_model_len=max_model_len,
        rate=args.rate,
    )


def describe(workload: Workload) -> dict[str, Any]:
    """What the figures are of."""
    lengths = workload.lengths
    return {
        "source": Path(lengths.source).name,
        "num_requests": len(lengths),
        "mean_prompt_tokens": round(lengths.mean_prompt_tokens, 2),
        "mean_output_tokens": round(lengths.mean_output_tokens, 2),
        "max_model_len": workload.max_model_len,
        "hardware": workload.hardware_name,
        "step_time": asdict(workload.hardware),
        "settings": asdict(workload.settings),
    }


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    source = result.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="FILE", help="a trace file, plain or gzip")
    source.add_argument("--lengths", metavar="WORDS", help="such as lognormal:19.31+58.45,sigma=1.0,count=5000")
    result.add_argument("--part", action="append", choices=list(PARTS), help="only this part; may be repeated")
    result.add_argument("--requests", type=int, metavar="N", help="the first N requests alone")
    result.add_argument("--all-turns", action="store_true", help="serve every turn, not the paper's selection")
    result.add_argument("--rate", type=float, metavar="R", help="one more run: Poisson arrivals, R requests a second")
    result.add_argument("--hardware", choices=list(HARDWARE), help="default: by the longest request")
    result.add_argument("--slots", type=int, help="tokens that the pool holds")
    result.add_argument("--weights-s", type=float, help="seconds to read the weights, the least that a step takes")
    result.add_argument("--token-s", type=float, help="seconds to compute one token")
    result.add_argument("--kv-token-s", type=float, help="seconds to read K and V of one token")
    result.add_argument("--max-model-len", type=int, help="what Max reserves (default: 2048, or the next power of two)")
    result.add_argument("--page-size", type=int, default=16)
    result.add_argument("--max-num-seqs", type=int, default=Settings.max_num_seqs)
    result.add_argument("--max-num-batched-tokens", type=int, default=Settings.max_num_batched_tokens)
    result.add_argument("--headroom-pages", type=int, default=Settings.headroom_pages)
    result.add_argument("--preemption", choices=["auto", "recompute", "swap"], default=Settings.preemption)
    result.add_argument("--host-slots", type=int, help="of the host's pool (default: as many as the device's)")
    result.add_argument("--json", action="store_true", help="print only the JSON line")
    return result


def main() -> int:
    args = parser().parse_args()
    results: dict[str, Any] = {}
    try:
        workload = make_workload(args)
        for name, (has, measure) in PARTS.items():
            if args.part and name not in args.part:
                continue
            if not has(workload):
                if args.part:
                    print(f"error: {workload.lengths.source} has no part {name!r}", file=sys.stderr)
                    return 2
                continue
            begin = time.perf_counter()
            results[name] = measure(workload)
            print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)
            for title, columns, rows in () if args.json else tables(name, results[name]):
                print_table(title, columns, [list(row) for row in rows])
    except (JpagedError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_json("bench_memory", {"workload": describe(workload), **results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
