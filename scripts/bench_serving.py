"""A load test of any OpenAI-compatible server: latencies, throughput, goodput, and what it costs on the host.

    bench="python scripts/bench_serving.py"
    $bench --url http://127.0.0.1:8000 --rate 1,2,4,8 --lengths trace:azure-conv.csv --objective ttft=0.5,tpot=0.05
    $bench --url http://127.0.0.1:8000 --trace-times --scale 2 --lengths trace:azure-conv.csv --plot azure.png
    $bench --spawn "python -m jpaged.cli serve --port {port}" --concurrency 64 --lengths fixed:128+256
    $bench --host-cost
    $bench --flood --spawn "python -m jpaged.cli serve --port {port}"

Requests arrive at random (--rate, a Poisson process; --burstiness changes it, 0 is a constant rate), as a trace has it
(--trace-times), or as soon as one of --concurrency places is free. Several rates or concurrencies are as many runs, and
curves in the picture. Prompts are random tokens, of exactly the wanted length where the server takes token ids.

Latencies count from when a request was due, not from when the client got around to sending it. What the client itself
takes is in the results: where its busiest process has more than 70 % of a core, use more --processes. --host-cost needs
no server: it measures jpaged's with an engine that computes nothing. --flood measures /health while the server is sent
bodies of 27 MB and 1,280 requests at once. The last line is JSON.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from jpaged.errors import ConfigError, JpagedError
from jpaged.lengths import Lengths
from jpaged.tokenizer import Tokenizer
from scripts.report import print_json, print_table
from scripts.serving.arrivals import random_arrivals, traced_arrivals
from scripts.serving.cpu_time import CpuMeter
from scripts.serving.figures import draw_runs
from scripts.serving.flood import measure_flood
from scripts.serving.host_cost import measure_host_cost
from scripts.serving.load import Target, run_load
from scripts.serving.measures import LATENCIES, read_objective, summarise
from scripts.serving.record import Record
from scripts.serving.server_process import spawned
from scripts.serving.work import PATHS, Prompts, Work, make_work, pick_rows, read_lengths

_COMMON_IDS = 1000  # ids that every real vocabulary has


def main() -> int:
    args = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server of --spawn is ended too
    load = os.getloadavg()[0]
    try:
        results = _host_cost(args) if args.host_cost else _load_test(args)
    except JpagedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # The figures are the server's; jax must not take a share of the accelerator that it may run on.
    os.environ["JAX_PLATFORMS"] = "cpu"
    print_json("bench_serving", {**results, "load_average": [load, os.getloadavg()[0]]})
    failed = not args.host_cost and any(run["errors"] for run in results["runs"])
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--spawn", metavar="COMMAND", help="start this server; {port} is the port of --url")
    parser.add_argument("--server-log", type=Path, help="keep the output of --spawn in this file")
    parser.add_argument("--server-pid", type=int, help="measure the CPU time of this process and its children")
    parser.add_argument("--model", help="its name (default: the first that the server lists)")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    parser.add_argument("--endpoint", choices=tuple(PATHS), default="completions")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rate", type=_numbers(float), metavar="R[,R...]", help="requests a second")
    load.add_argument("--concurrency", type=_numbers(int), metavar="C[,C...]", help="requests at once; the default: 8")
    load.add_argument("--trace-times", action="store_true", help="as the trace of --lengths has it")
    parser.add_argument("--burstiness", type=float, default=1.0, help="of --rate: CV of gaps; 0 is a constant rate")
    parser.add_argument("--scale", type=float, default=1.0, help="of --trace-times: 2 is twice as fast")
    parser.add_argument("--requests", type=int, default=200, help="of each run (default: %(default)s)")
    parser.add_argument("--lengths", default="fixed:128+64", help="as `jpaged plan` takes them, or uniform:8-64+1-32")
    parser.add_argument("--shared-prefix", type=int, default=0, metavar="TOKENS", help="the same in all prompts")
    parser.add_argument("--vocab-size", type=int, help="ids are below it (default: the server's, or 1000)")
    parser.add_argument("--tokenizer", type=Path, help="prompts are text, made by it (default: token ids)")
    parser.add_argument("--no-stream", action="store_true", help="answers come in one piece")
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON: parameters to add; null takes one out")
    parser.add_argument("--objective", type=read_objective, help="such as ttft=0.5,tpot=0.05, in seconds")
    parser.add_argument("--warmup", type=int, default=4, help="requests before that are not counted")
    parser.add_argument("--processes", type=int, default=1, help="of the client (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for one answer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw pictures")
    parser.add_argument("--records", type=Path, metavar="FILE.jsonl", help="keep every request's times")
    parser.add_argument("--device", help="of the server, for the record (default: what it says)")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--flood", action="store_true", help="measure /health in a flood of what takes long to read")
    host = parser.add_argument_group("host cost")
    host.add_argument("--host-cost", action="store_true", help="CPU time a token of everything but the engine")
    host.add_argument("--streams", type=int, default=64, help="default: %(default)s")
    host.add_argument("--tokens", type=int, default=400, help="of each stream (default: %(default)s)")
    host.add_argument("--step-ms", type=float, default=10.0, help="default: %(default)s")
    return parser


def _numbers(kind: type) -> Any:
    def numbers(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    return numbers


def _host_cost(args: argparse.Namespace) -> dict[str, Any]:
    port = urlsplit(args.url).port or 8000
    sizes = {"streams": args.streams, "tokens": args.tokens, "step_ms": args.step_ms}
    by_kind = measure_host_cost(port=port, processes=args.processes, **sizes)
    if not args.json:
        rows: list[list[object]] = [
            [name, ", ".join(f"{part} {us:.1f}" for part, us in row["us_per_token"].items()), row["step_ms"]]
            for name, row in by_kind.items()
        ]
        print_table(f"CPU a token at {args.streams} streams", ["server", "us a token", "a step took, ms"], rows)
    return {"host_cost": {**sizes, "by_kind": by_kind}, "runs": []}


def _load_test(args: argparse.Namespace) -> dict[str, Any]:
    if args.requests < 1 or args.processes < 1 or args.warmup < 0:
        raise ConfigError("--requests and --processes are at least 1, --warmup is at least 0")
    lengths = read_lengths(args.lengths, np.random.default_rng([args.seed, 2]))
    tokenizer = None if args.tokenizer is None else Tokenizer.load(args.tokenizer)
    with ExitStack() as stack:
        process_id = args.server_pid
        if args.spawn:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            command = args.spawn.replace("{port}", f"{urlsplit(args.url).port or 80}")
            server = stack.enter_context(spawned(command, args.url, args.server_log or folder / "log"))
            process_id = server.process.pid
        about = _about(args)
        vocab_size = args.vocab_size or about["vocab_size"] or (tokenizer.vocab_size if tokenizer else _COMMON_IDS)
        prompts = Prompts(
            vocab_size=vocab_size,
            first_id=min(3, vocab_size - 1),
            shared_tokens=args.shared_prefix,
            tokenizer=tokenizer,
        )
        headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
        if args.flood:
            return _flood(args, about, headers, vocab_size)
        target = Target(url=args.url, path=PATHS[args.endpoint], headers=headers, timeout_s=args.timeout_s)
        if args.warmup:
            works = _works(args, lengths, prompts, about["model"], args.warmup, seed=args.seed + 1)
            run_load(target, works, concurrency=args.warmup)
        runs, records = [], {}
        for name, works, concurrency in _plans(args, lengths, prompts, about["model"]):
            meter = None if process_id is None else CpuMeter(process_id)
            shares = run_load(target, works, concurrency=concurrency, processes=args.processes)
            figures = {"load": name, **summarise(shares, args.objective)}
            if meter is not None:
                tokens = max(figures["output_tokens"], 1)
                figures["server_cpu_us_per_token"] = {p: round(1e6 * s / tokens, 2) for p, s in meter.spent_s().items()}
            runs.append(figures)
            records[name] = [record for share in shares for record in share.records]
            if not args.json:
                _show(name, figures)
    if args.plot:
        draw_runs(args.plot, records, runs)
    if args.records:
        _keep(args.records, records)
    return {
        "model": about["model"],
        "server": about["server"],
        "server_device": args.device or about["device"],
        "endpoint": args.endpoint,
        "stream": not args.no_stream,
        "prompts": "text" if tokenizer else "token ids",
        "lengths": lengths.source,
        "shared_prefix_tokens": args.shared_prefix,
        "requests": args.requests,
        "seed": args.seed,
        "runs": runs,
    }


def _flood(args: argparse.Namespace, about: dict[str, Any], headers: dict[str, str], vocab_size: int) -> dict[str, Any]:
    figures = measure_flood(args.url, about["model"], headers=headers, vocab_size=vocab_size)
    if not args.json:
        rows: list[list[object]] = [
            [
                name,
                one["health"]["asked"],
                *((one["health"]["ms"] or {}).get(p) for p in ("p50", "p99", "max")),
                one["statuses"],
            ]
            for name, one in figures.items()
        ]
        print_table("/health meanwhile: milliseconds", ["sent", "asked", "p50", "p99", "max", "statuses"], rows)
    return {"model": about["model"], "server": about["server"], "flood": figures, "runs": []}


def _plans(
    args: argparse.Namespace, lengths: Lengths, prompts: Prompts, model: str
) -> list[tuple[str, list[Work], int | None]]:
    """The runs: name, requests, and how many at once."""

    def works(due_s: np.ndarray | None) -> list[Work]:
        return _works(args, lengths, prompts, model, args.requests, seed=args.seed, due_s=due_s)

    if args.trace_times:
        times = traced_arrivals(lengths.arrival_s, scale=args.scale)[: args.requests]
        return [(f"trace, {args.scale:g} times as fast", works(times), None)]
    if args.rate is not None:
        plans = []
        for rate in args.rate:
            rng = np.random.default_rng([args.seed, 3])
            due_s = random_arrivals(args.requests, rate, rng, burstiness=args.burstiness)
            plans.append((f"{rate:g} requests/s", works(due_s), None))
        return plans
    for concurrency in args.concurrency or [8]:
        if concurrency < 1:
            raise ConfigError(f"--concurrency is {concurrency}, expected at least 1")
    return [(f"{concurrency} at once", works(None), concurrency) for concurrency in args.concurrency or [8]]


def _works(
    args: argparse.Namespace,
    lengths: Lengths,
    prompts: Prompts,
    model: str,
    count: int,
    *,
    seed: int,
    due_s: np.ndarray | None = None,
) -> list[Work]:
    rows = pick_rows(lengths, count, np.random.default_rng([seed, 4]), in_order=args.trace_times)
    return make_work(
        lengths,
        rows,
        prompts,
        endpoint=args.endpoint,
        model=model,
        stream=not args.no_stream,
        seed=seed,
        due_s=due_s,
        extra=args.extra,
    )


def _about(args: argparse.Namespace) -> dict[str, Any]:
    """What the server says of itself; jpaged's tells more than others."""

    def get(path: str) -> Any:
        headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
        try:
            with build_opener(ProxyHandler({})).open(Request(args.url.rstrip("/") + path, headers=headers)) as answer:
                return json.loads(answer.read())
        except (OSError, ValueError):
            return {}

    models = get("/v1/models").get("data") or [{}]
    model = args.model or models[0].get("id")
    if not model:
        raise ConfigError(
            f"{args.url} does not answer, or lists no models; start a server (--spawn), or name a --model"
        )
    info = get("/internal/state").get("info", {})
    owner = models[0].get("owned_by", "a server")
    return {
        "model": model,
        "server": f"{owner} {get('/version').get('version', '')}".strip(),
        "device": info.get("device"),
        "vocab_size": info.get("vocab_size"),
    }


def _show(name: str, figures: dict[str, Any]) -> None:
    rows: list[list[object]] = [
        [kind, *(f"{ms[column]:,.1f}" for column in ("mean", "p50", "p90", "p99", "max"))]
        for kind in LATENCIES
        if (ms := figures[f"{kind}_ms"])
    ]
    print_table(f"{name}: milliseconds", ["", "mean", "p50", "p90", "p99", "max"], rows)
    good = f", {figures['goodput_requests_per_s']} of them good" if "goodput_requests_per_s" in figures else ""
    print(
        f"{figures['answered']} of {figures['requests']} answered, {figures['requests_per_s']} a second{good}; "
        f"{figures['output_tokens_per_s']} output tokens/s; errors: {figures['errors'] or 'none'}"
    )
    client = figures["client"]
    print(
        f"the client took {client['cpu_us_per_token']} us a token, its busiest process {client['busiest_fraction']:.0%}"
    )
    if "server_cpu_us_per_token" in figures:
        print(f"the server took, us a token: {figures['server_cpu_us_per_token']}")


def _keep(path: Path, runs: dict[str, list[Record]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for name, records in runs.items():
            for record in sorted(records, key=lambda record: record.index):
                fields = {slot: getattr(record, slot) for slot in Record.__slots__}
                file.write(json.dumps({"load": name, **fields}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
