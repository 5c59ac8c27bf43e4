"""Takes all records of the server on a CPU anew, one after the other: a quarter of an hour on two cores.

    python -m scripts.serving.retake --trace AzureLLMInferenceTrace_conv.csv.gz --lm-eval PATH/bin/lm_eval
    python -m scripts.serving.retake --only soak,flood      some of them
    python -m scripts.serving.retake --short ...            every part for a moment, to see that it runs; keeps nothing

Keep the machine to itself meanwhile: others' load is in the times. Leave the checkout alone too: all records are of the
commit that it has at the beginning, and a tree that differs from it is refused without --dirty. What each part has made
is checked when it ends; records and pictures replace those in docs/ at the end, all together, so that none is of a tree
that the one before has changed. Of a part that fails the old record stays, and the exit status is 1. The last line is
JSON, with what went wrong.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jpaged.errors import ConfigError
from scripts.render_benchmarks import ROOT, Record, add_record, stale_documents
from scripts.report import environment, print_json, print_table
from scripts.serving.server_process import free_port

_RECORDS: Final = ROOT
_LIMIT_S: Final = 900.0  # for one part
_STOP_S: Final = 90.0  # for a part to end what it has started, as after Ctrl-C: a server may drain for a minute
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


class PartError(Exception):
    """A part made no record."""


def take(part: Part, words: Sequence[str], folder: Path) -> str:
    """What a part printed.

    Raises:
      PartError: it failed; the message has the end of what it said.
    """
    paths = [f"{ROOT}", *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    printed, said = folder / "printed", folder / "said"
    with open(printed, "wb") as out, open(said, "wb") as err, _interruptible():
        process = subprocess.Popen(words, cwd=ROOT, env=variables, stdout=out, stderr=err, start_new_session=True)
    try:
        status = process.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise PartError(f"not done within {_LIMIT_S:g} s") from None
    finally:
        _end_group(process)
    output = printed.read_text("utf-8", "replace")
    if status:
        end = (output + said.read_text("utf-8", "replace"))[-_TAIL:]
        raise PartError(f"exit status {status}\n{end}")
    return output


@contextmanager
def _interruptible() -> Iterator[None]:
    """Processes started meanwhile know SIGINT, even if this one was started to ignore it, as shells do behind `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a part that runs still, by SIGINT, so that it stops its server, which is in no group of its; then all."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def check(part: Part, output: str, folder: Path, commit: str) -> None:
    """That everything which a part should make is there.

    Raises:
      PartError: something is missing, or is of another commit.
    """
    lines = output.strip().splitlines()
    try:
        record = Record.from_line(part.record or part.name, lines[-1] if lines else "")
    except ValueError as error:
        raise PartError(f"{error}") from None
    if record.commit != commit:
        raise PartError(f"it is of commit {record.commit}, expected {commit}; leave the checkout alone meanwhile")
    for made, _ in part.pictures:
        if not (folder / made).is_file():
            raise PartError(f"it made no {made}")


def keep(part: Part, output: str, folder: Path, root: Path) -> None:
    """Puts a part's record and pictures, which are checked, where they belong."""
    if part.record is not None:
        add_record(root, part.record, output)
    for made, place in part.pictures:
        shutil.copy(folder / made, root / place)


def _has_lm_eval(root: Path) -> bool:
    """Whether the record of clients, which would be replaced, has figures of lm-eval."""
    path = root / "docs" / "benchmarks" / "serving-clients-cpu.json"
    return path.is_file() and json.loads(path.read_text("utf-8"))["results"].get("lm_eval") is not None


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


@contextmanager
def _on_cpu() -> Iterator[None]:
    """jax, if it is not in use yet, takes the CPU, whatever accelerators there are."""
    before = os.environ.get("JAX_PLATFORMS")
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        yield
    finally:
        del os.environ["JAX_PLATFORMS"]
        if before is not None:
            os.environ["JAX_PLATFORMS"] = before


def _refuse(parts: Sequence[Part], options: argparse.Namespace, commit: str) -> None:
    """Raises ConfigError for what must not, or cannot, be run."""
    names = {part.name for part in parts}
    if options.trace is None and "trace" in names:
        raise ConfigError("trace needs --trace FILE; name it, or choose other parts with --only")
    if options.short:
        return
    if options.lm_eval is None and "clients" in names and _has_lm_eval(_RECORDS):
        raise ConfigError(
            "clients needs --lm-eval PROGRAM, since its record has figures of lm-eval; "
            "name it, or choose other parts with --only"
        )
    if commit.endswith("-dirty") and not options.dirty:
        raise ConfigError(f"the checkout is {commit}, expected a clean one; commit what is new, or say --dirty")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--trace", type=Path, metavar="FILE", help="arrivals and lengths; needed by trace")
    parser.add_argument("--lm-eval", type=Path, metavar="PROGRAM", help="for clients, if its record has lm-eval's part")
    parser.add_argument("--short", action="store_true", help="each part for a moment; nothing is kept")
    parser.add_argument("--dirty", action="store_true", help="take records of a tree that differs from its commit")
    options = parser.parse_args()
    with _on_cpu():
        try:
            parts, commit = chosen(options.only), environment()["commit"]
            _refuse(parts, options, commit)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return _retake(parts, options, commit)


def _retake(parts: Sequence[Part], options: argparse.Namespace, commit: str) -> int:
    from tests.server.tiny_model import write_model

    values = {
        "trace": shlex.quote(f"{options.trace.resolve()}") if options.trace else "",
        "lm_eval": f"--lm-eval {shlex.quote(f'{options.lm_eval.absolute()}')}" if options.lm_eval else "",
    }
    load = os.getloadavg()
    taken: dict[str, str] = {}
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", max_position_embeddings=4096)
        for part in parts:
            begin_s = time.monotonic()
            words = part.words(short=options.short, folder=folder, port=free_port(), **values)
            try:
                output = take(part, words, folder)
                check(part, output, folder, commit)
                taken[part.name] = output
            except PartError as error:
                failed[part.name] = f"{error}"
            seconds[part.name] = round(time.monotonic() - begin_s, 1)
            said = f", failed: {failed[part.name]}" if part.name in failed else ""
            print(f"{part.name}: {seconds[part.name]:g} s{said}", file=sys.stderr, flush=True)
        if not options.short:
            failed |= _keep_all({part: taken[part.name] for part in parts if part.name in taken}, folder)
    print_table("records", ["part", "seconds"], [[part, one] for part, one in seconds.items()])
    # The commit of the records: that of this line's own is of the tree that they have changed.
    results = {"commit": commit, "seconds": seconds, "failed": failed, "load_average": load[0]}
    print_json("serving/retake", results)
    return 1 if failed else 0


def _keep_all(outputs: Mapping[Part, str], folder: Path) -> dict[str, str]:
    """Replaces records, pictures, and what is rendered of them; what could not be, and why."""
    failed = {}
    for part, output in outputs.items():
        try:
            keep(part, output, folder, _RECORDS)
        except OSError as error:
            failed[part.name] = f"not kept: {error}"
    try:
        stale_documents(_RECORDS, write=True)
    except (OSError, ValueError) as error:
        failed["rendering"] = f"{error}"
    for name, why in failed.items():
        print(f"{name} failed: {why}", file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(main())
