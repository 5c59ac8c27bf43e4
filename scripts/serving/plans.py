"""The launcher's plans for chips that are not here, as a record: `python -m scripts.serving.plans`.

Each is what `scripts/serve_tpu.py MODEL --dry-run --topology TOPOLOGY --json` prints. What does not fit must be refused
with exit status 2, what fits must not be. The last line is JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from scripts.report import print_json, print_table

LAUNCHER: Final = Path(__file__).resolve().parents[1] / "serve_tpu.py"
TOPOLOGIES: Final = ("v5e-1", "v5e-8", "v6e-1", "v6e-8", "v5p-8", "tpu7x-4")
MODELS: Final = ("Llama-3.2-1B", "Llama-3.1-8B", "Llama-3.1-70B")
_GB: Final = 1e9


def plan(model: str, topology: str) -> dict[str, Any]:
    """One plan, in short; sizes are of a device.

    Raises:
      RuntimeError: the exit status and the plan contradict each other.
    """
    command = [sys.executable, f"{LAUNCHER}", model, "--dry-run", "--topology", topology, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 2) or not done.stdout:
        raise RuntimeError(f"{' '.join(command[1:])} ended with status {done.returncode}: {done.stderr[-500:]}")
    report = json.loads(done.stdout)
    if (done.returncode == 0) != report["fits"]:
        raise RuntimeError(f"{model} on {topology}: status {done.returncode}, and the plan says fits={report['fits']}")
    chosen = report["chosen"]
    rest, least = sum(chosen["parts"].values()), 2 * chosen["bytes_per_page"]
    return {
        "topology": topology,
        "model": model,
        "fits": report["fits"],
        "num_models": chosen["num_replicas"],
        "devices_each": chosen["degree"],
        "weights_gb": chosen["parts"]["weights"] / _GB,
        "all_but_pages_gb": rest / _GB,
        "pages_gb": chosen["pool_bytes"] / _GB,
        "memory_gb": chosen["device_bytes"] / _GB,
        "lacking_gb": max(rest + least - chosen["device_bytes"], 0) / _GB,
        "page_size": chosen["page_size"],
        "tokens_in_pages": chosen["token_capacity"],
        "max_num_seqs": chosen["max_num_seqs"],
        "max_model_len": chosen["max_model_len"],
        "refused": report["refused"],
    }


def main() -> int:
    plans = [plan(model, topology) for topology in TOPOLOGIES for model in MODELS]
    rows: list[list[object]] = [
        [one["topology"], one["model"], one["fits"], f"{one['weights_gb']:.2f}", one["tokens_in_pages"]]
        for one in plans
    ]
    print_table("plans", ["topology", "model", "fits", "weights, GB a device", "tokens in pages"], rows)
    os.environ["JAX_PLATFORMS"] = "cpu"
    print_json("serving/plans", {"plans": plans})
    return 0


if __name__ == "__main__":
    sys.exit(main())
