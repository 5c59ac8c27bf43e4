"""`compile_side_by_side`: programs are read from disk at once, or lowered one after the other and compiled at once."""

import contextlib
import gc
import math
import os
import time
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.extend.mlir import ir

from jpaged.program_store import ProgramStore

Key = TypeVar("Key", bound=Hashable)


class Compiled(NamedTuple, Generic[Key]):
    """A program that is ready.

    Attributes:
      key: its name.
      executable: to be called.
      seconds: lowering and compiling, or reading, together.
      kept: it was read from the store, and not lowered.
    """

    key: Key
    executable: Callable
    seconds: float
    kept: bool = False


def num_compile_threads() -> int:
    """As many as this process may use processors: XLA compiles one program by one thread, for the most part."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_side_by_side(
    keys: Iterable[Key],
    lower: Callable[[Key], jax.stages.Lowered],
    *,
    store: ProgramStore | None = None,
    num_threads: int | None = None,
) -> Iterator[Compiled[Key]]:
    """Compiles programs by threads, and gives each when it is ready.

    Tracing is Python's work and stays in the caller's thread, whose contexts (mesh, default device) it sees; compiling
    is XLA's, and runs beside it. Whoever stops reading, or is interrupted, leaves at once: what was not begun is
    dropped.

    Args:
      keys: of the programs, in the order in which they are begun.
      lower: traces and lowers one.
      store: asked for each program before it is lowered, and given those that were compiled here.
      num_threads: `None`: `num_compile_threads()`.

    Raises:
      Exception: what `lower` or the compiler raised for a program, as it was raised.

    Example:
      >>> programs = {n: jax.jit(lambda x, n=n: x + n) for n in (1.0, 2.0)}
      >>> done = compile_side_by_side(programs, lambda n: programs[n].lower(0.0))
      >>> {one.key: float(one.executable(0.0)) for one in done} == {1.0: 1.0, 2.0: 2.0}
      True
    """
    keys = list(keys)
    pool = ThreadPoolExecutor(num_threads or num_compile_threads(), thread_name_prefix="compile")
    pending: dict[Future, tuple[Key, float]] = {}
    try:
        reading = {} if store is None else {key: pool.submit(_timed, store.load, key) for key in keys}
        for key in keys:
            if key in reading:
                executable, seconds = reading.pop(key).result()
                if executable is not None:
                    yield Compiled(key, executable, seconds, kept=True)
                    continue
            start = time.perf_counter()
            with _no_collections():
                lowered = lower(key)
                if store is not None:
                    _hide_from_jax(lowered)
            lowering_s = time.perf_counter() - start
            pending[pool.submit(_timed, _compile, lowered, key, store)] = (key, lowering_s)
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


def _hide_from_jax(lowered: jax.stages.Lowered) -> None:
    """Sees to it that jax's own cache has not got the program, by a mark that compilers do not look at.

    On a CPU, what was read from that cache runs, but if it is kept and read once more, it does not.
    """
    module: Any = lowered.compiler_ir()
    with module.context:
        module.operation.attributes["jpaged.compiled"] = ir.StringAttr.get(uuid.uuid4().hex)


def _jax_keeps_nothing() -> contextlib.AbstractContextManager:
    """For this thread: nobody would read in jax's own cache what the store has."""
    try:  # the public name of the setting is for all threads
        from jax._src.config import persistent_cache_min_compile_time_secs as jax_keeps_from_s
    except ImportError:  # another jax: it keeps a second copy
        return contextlib.nullcontext()
    return jax_keeps_from_s(math.inf)


def _compile(lowered: jax.stages.Lowered, key: Hashable, store: ProgramStore | None) -> Callable:
    if store is None:
        return lowered.compile()
    with _jax_keeps_nothing():
        executable = lowered.compile()
    store.save(key, executable)
    return executable


def _timed(function: Callable, *args: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    return function(*args), time.perf_counter() - start


def _finished(pending: dict[Future, tuple[Key, float]], *, block: bool) -> Iterator[Compiled[Key]]:
    done, _ = wait(pending, timeout=None if block else 0, return_when=FIRST_COMPLETED)
    for future in done:
        key, lowering_s = pending.pop(future)
        executable, compile_s = future.result()
        yield Compiled(key, executable, lowering_s + compile_s)
