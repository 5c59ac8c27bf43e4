"""TPU kernels on a CPU: jax's TPU interpreter with its race detector, and a context that reads what it found."""

import contextlib
import io
from collections.abc import Iterator

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu


def interpret_params() -> pltpu.InterpretParams:
    """For `interpret=`: fresh memory is NaN, reads out of bounds raise, a DMA moves when it is waited for."""
    # The clock has an entry for each core and shares the others out to DMAs: with few, DMAs that race look ordered.
    return pltpu.InterpretParams(detect_races=True, vector_clock_size=64)


@contextlib.contextmanager
def no_races() -> Iterator[None]:
    """Fails if a kernel interpreted within has a race, or if none ran with `interpret_params()`.

    Inputs must be made and results used (or `jax.block_until_ready`) within.
    """
    # The detector only prints, and sets a flag that the next kernel replaces: so the printed lines count, too.
    pltpu.reset_tpu_interpret_mode_state()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield
        jax.effects_barrier()
    assert interpreter.races is not None, "no kernel was interpreted: nothing was looked for"
    report = printed.getvalue()
    assert "RACE DETECTED" not in report, report
    assert not interpreter.races.races_found, "RACE DETECTED, though none was printed here"
