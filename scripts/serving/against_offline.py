"""jpaged's server against its own engine, on one machine in one run: how much of the engine's speed reaches clients.

    python -m scripts.serving.against_offline llama-3.1-8b --load-format dummy --token-buckets 128,2048
    python -m scripts.serving.against_offline smollm2-135m-instruct --streams 16 --output-tokens 64

First an engine serves all requests offline, as `LLM.generate` does, in a process that ends. Then scripts/serve_tpu.py
serves the same requests over HTTP, from an engine that is made in the same way, to so many clients at once; /health is
asked all the while by another process. Each does a smaller round before, which is not counted. Tokens a second count
from the first request to the last token. The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.errors import ConfigError, JpagedError
from jpaged.lengths import fixed_lengths
from scripts.report import print_json, print_table
from scripts.serving.cpu_time import CpuMeter
from scripts.serving.health import HealthWatch
from scripts.serving.load import Target, run_load
from scripts.serving.measures import summarise
from scripts.serving.server_process import free_port, spawned
from scripts.serving.work import PATHS, Prompts, Work, make_work

_NAME = "measured"
_WARM_TOKENS = 16
_PHASES = ("plan_s", "move_s", "pack_s", "dispatch_s", "wait_s", "update_s")
_SAME = ("page_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "implementation", "dtype", "device")


def main() -> int:
    options = _parser().parse_args()
    try:
        results = offline(options) if options.offline else compare(options)
    except JpagedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.offline:
        print(json.dumps(results))
        return 0
    rows: list[list[object]] = [
        [name, f"{results[name]['output_tokens_per_s']:,.0f}", results[name]["wall_s"], results[name]["ms_per_step"]]
        for name in ("offline", "server")
    ]
    print_table("the server against its engine", ["", "tokens/s", "s", "ms a step"], rows)
    print(f"the server reaches {results['server_of_offline']:.1%}; /health {results['server']['health']['ms']}")
    os.environ["JAX_PLATFORMS"] = "cpu"  # the figures are the server's device's, which is in them
    print_json("serving/against_offline", results)
    return 1 if results["server"]["errors"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as scripts/serve_tpu.py takes it")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    parser.add_argument("--weights", help="as of scripts/serve_tpu.py")
    parser.add_argument("--streams", type=int, default=128, help="at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="requests a stream, one after the other")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--output-tokens", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="default: %(default)s")
    parser.add_argument("--token-buckets", metavar="N,...", help="steps that are compiled, to begin sooner")
    parser.add_argument("--processes", type=int, default=2, help="of the client (default: %(default)s)")
    parser.add_argument("--server-log", type=Path, help="keep the server's output in this file")
    parser.add_argument("--offline", action="store_true", help="the engine alone; what the script calls itself with")
    return parser


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Both, one after the other."""
    child = subprocess.run(
        [sys.executable, "-m", "scripts.serving.against_offline", *sys.argv[1:], "--offline"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if child.returncode:
        raise ConfigError(f"the engine ended with status {child.returncode}; its words are above")
    alone = json.loads(child.stdout.splitlines()[-1])
    print(f"offline: {alone['output_tokens_per_s']:,.0f} tokens/s", file=sys.stderr, flush=True)
    served = online(options)
    differing = [name for name in _SAME if alone["info"][name] != served["info"][name]]
    if differing:
        raise ConfigError(f"the server's engine has another {', '.join(differing)} than the one alone")
    return {
        "model": options.model,
        "load_format": options.load_format,
        "weights": options.weights,
        "streams": options.streams,
        "requests": options.streams * options.rounds,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "engine_device": served["info"]["device"],
        "server_of_offline": round(served["output_tokens_per_s"] / alone["output_tokens_per_s"], 4),
        "offline": alone,
        "server": served,
    }


def _works(options: argparse.Namespace, vocab_size: int, count: int, output_tokens: int, *, seed: int) -> list[Work]:
    lengths = fixed_lengths(options.prompt_tokens, output_tokens)
    prompts = Prompts(vocab_size=vocab_size)
    rows = np.zeros(count, int)
    return make_work(lengths, rows, prompts, endpoint="completions", model=_NAME, stream=True, seed=seed)


def _phases(before: dict[str, Any], after: dict[str, Any], wall_s: float) -> dict[str, Any]:
    """What the engine's steps took, from its counters."""
    steps = after["num_steps"] - before["num_steps"]
    phases = {name: round(1e3 * (after[name] - before[name]) / steps, 3) for name in _PHASES}
    return {"steps": steps, "ms_per_step": round(1e3 * wall_s / steps, 3), "phases_ms": phases}


def offline(options: argparse.Namespace) -> dict[str, Any]:
    """The engine alone."""
    from jpaged.engine_host import call, freeze_objects
    from jpaged.request import SamplingParams
    from scripts import serve_tpu

    sizes = serve_tpu.SizeOptions(
        max_num_seqs=options.streams,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=_max_model_len(options),
        weights=options.weights,
        token_buckets=options.token_buckets,
    )
    others = serve_tpu.EngineChoices(load_format=options.load_format)
    begin_s = time.monotonic()
    recipe = serve_tpu.make_recipe(options.model, serve_tpu.PlanOptions(), sizes, others, progress=False)
    engine = call(serve_tpu.serve_command.MAKERS[options.load_format], recipe)
    started_s = time.monotonic() - begin_s
    freeze_objects()

    def run(count: int, output_tokens: int, seed: int) -> tuple[float, int]:
        works = _works(options, engine.vocab_size, count, output_tokens, seed=seed)
        prompts = [json.loads(work.body)["prompt"] for work in works]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_tokens)
        begin_s, tokens = time.monotonic(), 0
        for prompt in prompts:
            engine.add(prompt, params)
        while engine.has_work:
            tokens += sum(len(output.token_ids) for output in engine.step())
        return time.monotonic() - begin_s, tokens

    run(options.streams, _WARM_TOKENS, seed=1)
    before = asdict(engine.stats())
    wall_s, tokens = run(options.streams * options.rounds, options.output_tokens, seed=2)
    return {
        "output_tokens_per_s": round(tokens / wall_s, 1),
        "wall_s": round(wall_s, 3),
        "started_s": round(started_s, 1),
        "info": asdict(engine.info),
        **_phases(before, asdict(engine.stats()), wall_s),
    }


def online(options: argparse.Namespace) -> dict[str, Any]:
    """The same over HTTP."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    given = {
        "port": port,
        "served-model-name": _NAME,
        "load-format": options.load_format,
        "max-num-seqs": options.streams,
        "max-num-batched-tokens": options.max_num_batched_tokens,
        "max-model-len": _max_model_len(options),
        "token-buckets": options.token_buckets,
        "weights": options.weights,
    }
    words = " ".join(f"--{name} {value}" for name, value in given.items() if value is not None)
    script = Path(__file__).parents[1] / "serve_tpu.py"
    target = Target(url=url, path=PATHS["completions"])
    with tempfile.TemporaryDirectory() as folder:
        log = options.server_log or Path(folder) / "log"
        begin_s = time.monotonic()
        with spawned(f"python {script} {options.model} {words} --no-progress", url, log) as server:
            started_s = time.monotonic() - begin_s
            state = _state(url)
            vocab_size = state["info"]["vocab_size"]
            warm = _works(options, vocab_size, options.streams, _WARM_TOKENS, seed=1)
            run_load(target, warm, concurrency=options.streams, processes=options.processes)
            works = _works(options, vocab_size, options.streams * options.rounds, options.output_tokens, seed=2)
            before, meter = _state(url)["stats"], CpuMeter(server.process.pid)
            with HealthWatch(url) as health:
                shares = run_load(target, works, concurrency=options.streams, processes=options.processes)
            spent, after = meter.spent_s(), _state(url)["stats"]
            faults = server.faults()
    figures = summarise(shares)
    tokens = max(figures["output_tokens"], 1)
    return {
        **figures,
        "started_s": round(started_s, 1),
        "info": state["info"],
        **_phases(before, after, figures["wall_s"]),
        "server_cpu_us_per_token": {part: round(1e6 * s / tokens, 2) for part, s in spent.items()},
        "health": health.figures(),
        "log_faults": faults[:3],
    }


def _max_model_len(options: argparse.Namespace) -> int:
    return options.prompt_tokens + max(options.output_tokens, _WARM_TOKENS)


def _state(url: str) -> dict[str, Any]:
    from urllib.request import ProxyHandler, build_opener

    with build_opener(ProxyHandler({})).open(f"{url}/internal/state") as answer:
        return json.loads(answer.read())


if __name__ == "__main__":
    sys.exit(main())
