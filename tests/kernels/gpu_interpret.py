"""GPU kernels on a CPU: jax's Mosaic GPU interpreter with its race detector, and a context that reads what it found."""

# What is imported by name needs jax 0.11.
# pyright: reportAttributeAccessIssue=false

import contextlib
import io
from collections.abc import Iterator

import jax


def interpret_params():
    """For `interpret=`: fresh memory is NaN, and reads out of bounds raise."""
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs jax 0.11

    return plgpu.InterpretGPUParams(detect_races=True)


@contextlib.contextmanager
def no_races() -> Iterator[None]:
    """Fails if a kernel interpreted within has a race, or if none ran with `interpret_params()`.

    Inputs must be made and results used (or `jax.block_until_ready`) within.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as interpreter

    # A kernel that raised leaves its state behind, in which the next would run.
    interpreter.reset_gpu_interpret_mode_state()
    # The detector prints, and sets a flag that the next kernel replaces: so the printed lines count, too.
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield
        jax.effects_barrier()
    report = printed.getvalue()
    assert "RACE DETECTED" not in report, report
    found = interpreter.get_races().races_found  # raises if nothing was looked for
    assert not found, "RACE DETECTED, though none was printed here"
