"""Takes all records of the server on a CPU anew, one after the other: a quarter of an hour on two cores.

    python -m scripts.serving.retake --trace AzureLLMInferenceTrace_conv.csv.gz --lm-eval PATH/bin/lm_eval
    python -m scripts.serving.retake --only soak,flood      some of them
    python -m scripts.serving.retake --short ...            every part for a moment, to see that it runs; keeps nothing

Keep the machine to itself meanwhile: others' load is in the times. Records and pictures replace those in docs/ at the
end, all together, so that each of them is of the commit and not of a tree that the one before has changed. Of a part
that fails the old record stays, and the exit status is 1. The last line is JSON.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jpaged.errors import ConfigError
from scripts.render_benchmarks import ROOT, add_record, stale_documents
from scripts.report import print_json, print_table
from scripts.serving.server_process import free_port

_RECORDS: Final = ROOT
_LIMIT_S: Final = 900.0  # for one part
_TAIL: Final = 2000  # characters of what a part that failed has said
_MODEL: Final = "{folder}/model --served-model-name tiny --no-progress --port {port}"
_SERVE: Final = "python -m jpaged.cli serve"


@dataclass(frozen=True)
class Part:
    """One record.

    Attributes:
      name: in --only.
      record: docs/benchmarks/RECORD.json; `None`: it makes pictures alone.
      command: of the script; {folder} is a folder for what it makes, with a tiny model in it, {port} a free port,
        {trace} and {lm_eval} come from the options.
      short: options that make it short.
      pictures: files that it makes in the folder, and where they belong.
    """

    name: str
    record: str | None
    command: str
    short: str = ""
    pictures: tuple[tuple[str, str], ...] = ()

    def words(self, *, short: bool, **values: object) -> list[str]:
        """The command as a list."""
        command = f"{self.command} {self.short}" if short else self.command
        return [sys.executable, *shlex.split(command.format(**values))]


def _bench(options: str, serve: str = "") -> str:
    spawn = f' --spawn "{_SERVE} {serve}"' if serve else ""
    return f"scripts/bench_serving.py --url http://127.0.0.1:{{port}} --device cpu {options}{spawn}"


PARTS: Final = (
    Part("soak", "serving-soak-cpu", "scripts/soak_serving.py --requests 10000", "--requests 60"),
    Part("equality", "serving-equality-cpu", "scripts/soak_serving.py --equality --requests 1000", "--requests 20"),
    Part("host", "serving-host-cpu", _bench("--host-cost --streams 64"), "--streams 4 --tokens 20"),
    Part(
        "load",
        "serving-load-cpu",
        _bench(
            "--concurrency 1,16,64 --requests 256 --lengths fixed:64+128 --objective ttft=1,tpot=0.05 "
            "--plot {folder}/load.png",
            f"{_MODEL} --max-model-len 256 --num-pages 1025 --max-num-seqs 64 --max-num-batched-tokens 256",
        ),
        "--concurrency 2,4 --requests 8",
        (("load.png", "docs/benchmarks/serving-cpu.png"),),
    ),
    Part(
        "trace",
        "serving-trace-cpu",
        _bench(
            "--trace-times --lengths trace:{trace},max_total=1800 --requests 300 --objective ttft=1,tpot=0.1 "
            "--plot {folder}/trace.png",
            f"{_MODEL} --max-model-len 2048 --num-pages 4097 --max-num-seqs 32 --max-num-batched-tokens 512",
        ),
        "--requests 8",
        (("trace.png", "docs/benchmarks/serving-trace-cpu.png"),),
    ),
    Part("flood", "serving-flood-cpu", _bench("--flood", "--no-progress --port {port}")),
    Part("clients", "serving-clients-cpu", "-m scripts.serving.clients {lm_eval}"),
    Part("plans", "serving-plans", "-m scripts.serving.plans"),
    Part(
        "screenshots",
        None,
        "scripts/screenshot_page.py --out {folder}",
        "--seconds 1",
        tuple((name, f"docs/images/{name}") for name in ("server-chat.png", "server-pool.png")),
    ),
)


def take(part: Part, words: Sequence[str], log: Path) -> str | None:
    """What a part printed; `None`, and the end of what it said, if it failed."""
    paths = [f"{ROOT}", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    with open(log, "w", encoding="utf-8") as said:
        try:
            done = subprocess.run(
                words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=said, text=True, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            print(f"{part.name}: not done within {_LIMIT_S:g} s", file=sys.stderr)
            return None
    if done.returncode == 0:
        return done.stdout
    end = (done.stdout + log.read_text("utf-8", "replace"))[-_TAIL:]
    print(f"{part.name}: exit status {done.returncode}\n{end}", file=sys.stderr)
    return None


def keep(part: Part, output: str, folder: Path, root: Path) -> None:
    """Puts a part's record and pictures where they belong."""
    if part.record is not None:
        add_record(root, part.record, output)
    for made, place in part.pictures:
        shutil.copy(folder / made, root / place)


def chosen(names: str | None) -> list[Part]:
    """The parts of --only, in their own order.

    Raises:
      ConfigError: there is no such part.

    Example:
      >>> [part.name for part in chosen("plans,soak")]
      ['soak', 'plans']
    """
    known = [part.name for part in PARTS]
    wanted = known if names is None else names.split(",")
    for name in wanted:
        if name not in known:
            raise ConfigError(f"there is no part {name!r}, expected some of {', '.join(known)}")
    return [part for part in PARTS if part.name in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--trace", type=Path, metavar="FILE", help="arrivals and lengths; needed by trace")
    parser.add_argument("--lm-eval", type=Path, metavar="PROGRAM", help="for clients; only OpenAI's without it")
    parser.add_argument("--short", action="store_true", help="each part for a moment; nothing is kept")
    options = parser.parse_args()
    try:
        parts = chosen(options.only)
        if options.trace is None and any(part.name == "trace" for part in parts):
            raise ConfigError("trace needs --trace FILE; name it, or choose other parts with --only")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    os.environ["JAX_PLATFORMS"] = "cpu"
    from tests.server.tiny_model import write_model

    values = {
        "trace": shlex.quote(f"{options.trace.resolve()}") if options.trace else "",
        "lm_eval": f"--lm-eval {shlex.quote(f'{options.lm_eval.absolute()}')}" if options.lm_eval else "",
    }
    load = os.getloadavg()
    taken: dict[str, str] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", max_position_embeddings=4096)
        for part in parts:
            begin_s = time.monotonic()
            words = part.words(short=options.short, folder=folder, port=free_port(), **values)
            output = take(part, words, folder / "log")
            seconds[part.name] = round(time.monotonic() - begin_s, 1)
            print(f"{part.name}: {seconds[part.name]:g} s{'' if output else ', failed'}", file=sys.stderr, flush=True)
            if output is not None:
                taken[part.name] = output
        print_table("records", ["part", "seconds"], [[part, one] for part, one in seconds.items()])
        failed = [part.name for part in parts if part.name not in taken]
        print_json("serving/retake", {"seconds": seconds, "failed": failed, "load_average": load[0]})
        if not options.short:
            for part in parts:
                if part.name in taken:
                    keep(part, taken[part.name], folder, _RECORDS)
            stale_documents(_RECORDS, write=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
