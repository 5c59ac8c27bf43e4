"""`compile_side_by_side`: several programs are lowered one after the other, and compiled at once."""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Generic, NamedTuple, TypeVar

import jax

Key = TypeVar("Key")


class Compiled(NamedTuple, Generic[Key]):
    """A program that is ready.

    Attributes:
      key: its name.
      executable: to be called.
      seconds: lowering and compiling (or loading from the persistent cache) together.
    """

    key: Key
    executable: Callable
    seconds: float


def num_compile_threads() -> int:
    """As many as this process may use processors: XLA compiles one program by one thread, for the most part."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_side_by_side(
    keys: Iterable[Key], lower: Callable[[Key], jax.stages.Lowered], *, num_threads: int | None = None
) -> Iterator[Compiled[Key]]:
    """Compiles programs by threads, and gives each when it is ready.

    Tracing is Python's work and stays in the caller's thread, whose contexts (mesh, default device) it sees; compiling
    is XLA's, and runs beside it. Whoever stops reading, or is interrupted, leaves at once: what was not begun is
    dropped.

    Args:
      keys: of the programs, in the order in which they are begun.
      lower: traces and lowers one.
      num_threads: `None`: `num_compile_threads()`.

    Raises:
      Exception: what `lower` or the compiler raised for a program, as it was raised.

    Example:
      >>> programs = {n: jax.jit(lambda x, n=n: x + n) for n in (1.0, 2.0)}
      >>> done = compile_side_by_side(programs, lambda n: programs[n].lower(0.0))
      >>> {one.key: float(one.executable(0.0)) for one in done} == {1.0: 1.0, 2.0: 2.0}
      True
    """
    pool = ThreadPoolExecutor(num_threads or num_compile_threads(), thread_name_prefix="compile")
    pending: dict[Future, tuple[Key, float]] = {}
    try:
        for key in keys:
            start = time.perf_counter()
            with _no_collections():
                lowered = lower(key)
            pending[pool.submit(_compile, lowered)] = (key, time.perf_counter() - start)
            yield from _finished(pending, block=False)
        while pending:
            yield from _finished(pending, block=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Tracing makes a great many objects that live on; to look for dead ones among them takes a sixth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _compile(lowered: jax.stages.Lowered) -> tuple[Callable, float]:
    start = time.perf_counter()
    executable = lowered.compile()
    return executable, time.perf_counter() - start


def _finished(pending: dict[Future, tuple[Key, float]], *, block: bool) -> Iterator[Compiled[Key]]:
    done, _ = wait(pending, timeout=None if block else 0, return_when=FIRST_COMPLETED)
    for future in done:
        key, lowering_s = pending.pop(future)
        executable, compile_s = future.result()
        yield Compiled(key, executable, lowering_s + compile_s)
