"""A process that compiles: `python -m scripts.tpu.worker TOPOLOGY PART`, cases as lines of JSON on its input.

A process of its own, since libtpu reads its flags once, and a fault in the compiler ends the process. Prints one JSON
object a case: its figures, or what refused it.
"""

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or libtpu looks for the machine's metadata server
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # compiling needs no chip, so several may

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from .cases import KERNELS, LOADS, SHAPES
from .chips import Chip, chip_of
from .kernel_cost import kernel_cost
from .kernels import KERNEL_CASES, compile_case
from .llo_dump import start_dumps
from .steps import StepCase, compile_step


def topology_mesh(topology: str, chip: Chip) -> Mesh:
    """A mesh of one device of a TPU that is not there, in the mode in which it is usually run."""
    mode = {} if chip.config is None else {"chip_config_name": chip.config}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **mode).devices
    return Mesh(np.array(devices[:1]), ("x",))


def run_case(part: str, case: dict[str, Any], chip: Chip, mesh: Mesh, folder: Path) -> dict[str, Any]:
    """Compiles one case of a part."""
    if part == "kernels":
        return compile_case(KERNEL_CASES[case["name"]], chip, mesh, folder)
    if part == "steps":
        implementation = case.pop("implementation", None)
        return compile_step(StepCase(**case), chip, mesh, implementation)
    kernel, shape, load = KERNELS[case["kernel"]], SHAPES[case["shape"]], LOADS[case["load"]]
    return kernel_cost(kernel, shape, load, case["pages"], chip, mesh, folder)


def main(topology: str, part: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if part != "steps":  # a whole step's dumps are gigabytes
            start_dumps(folder)
        jax.config.update("jax_numpy_dtype_promotion", "strict")
        chip = chip_of(topology)
        mesh = topology_mesh(topology, chip)
        for line in sys.stdin:
            try:
                row = run_case(part, json.loads(line), chip, mesh, folder)
            except Exception as error:  # one refused case must not hide the others
                where = traceback.extract_tb(error.__traceback__)[-1]
                row = {"refused": f"{type(error).__name__}: {str(error) or where.line}"[:800]}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
