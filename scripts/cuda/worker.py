"""`run_case`: one case, in a process of its own kind: its figures, or what refused it."""

import functools
import traceback
from dataclasses import asdict
from typing import Any

import jax

from tests.kernels.hlo import pool_copies

from . import target
from .cases import kernel_cases, lowered_calls
from .ptxas import parse_kernels, printed
from .steps import STEP_CASES, compile_step, cpu_seconds

_gpu = functools.cache(target.described_gpu)


def case_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the kernels' configurations, and of the engine's programs."""
    return tuple(kernel_cases()), tuple(STEP_CASES)


def run_case(name: str, compiles: bool) -> dict[str, Any]:
    """Compiles a case of `case_names`; one of the kernels may be lowered only."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    row: dict[str, Any] = {"case": name}
    start = cpu_seconds()
    try:
        with printed() as read:
            figures = compile_step(STEP_CASES[name], _gpu()) if name in STEP_CASES else _kernel(name, compiles)
            row |= figures | {"kernels": [asdict(kernel) for kernel in parse_kernels(read())]}
    except Exception as error:  # one refused case must not hide the others
        where = traceback.extract_tb(error.__traceback__)[-1]
        row["refused"] = f"{type(error).__name__}: {str(error) or where.line}"[:800]
    return row | {"cpu_s": round(cpu_seconds() - start, 1)}


def _kernel(name: str, compiles: bool) -> dict[str, Any]:
    gpu = _gpu() if compiles else None
    copies = 0
    for call, lowered in lowered_calls(kernel_cases()[name], gpu):
        if compiles:
            compiled = lowered.compile()
            copies += 0 if call.pool is None else len(pool_copies(compiled, call.pool))
    return {"compiled": compiles, "pool_copies": copies}
