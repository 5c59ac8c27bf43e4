"""`printed`, `parse_kernels`: what the compiler says of Mosaic GPU kernels, caught and read. Imports no jax.

With `DUMPS` set, it prints two things of each kernel: what ptxas said, and then how the host launches it, in LLVM.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

DUMPS: Final = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_HOST_LLVM": "1"}

_ENTRY: Final = re.compile(r"Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?'")
_SPILLS: Final = re.compile(r"^ *\d+ bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED: Final = re.compile(r"Used (\d+) registers")
_SAID: Final = re.compile(r"ptxas \w+ *: \((C\d+)\) (.*)")
# What makes a kernel slow: wgmma one after the other, registers that are not given out as the kernel asks.
_LOSS: Final = re.compile(r"C7510|C7514|C7520|C7602|performance loss|serializ|setmaxnreg", re.IGNORECASE)
_LAUNCHER: Final = re.compile(r"^define i32 @(\w+?)_mosaic_gpu\(")
# Blocks, cluster, threads, each x, y, z; bytes of shared memory.
_LAUNCH: Final = re.compile(r"call i32 @mosaic_gpu_launch_kernel\(ptr %\d+, " + r"i32 (\d+), " * 10)


@dataclass
class Kernel:
    """One kernel, as it was compiled.

    Attributes:
      name: as it was named in Python.
      registers: of a thread; where warpgroups give and take some, what each has at first.
      spill_bytes: stores and loads of registers that did not fit, by the places in the code.
      shared_bytes: of a block of threads.
      blocks, threads: that are launched, and of a block.
      said: how often ptxas said what, by the number of its message.
      losses: its messages by which the kernel is slower than it is written.
    """

    name: str
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    blocks: int = 0
    threads: int = 0
    said: dict[str, int] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)


@contextmanager
def printed() -> Iterator[Callable[[], str]]:
    """Catches what the process prints, the compiler's own output too; what it yields reads that so far."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "printed"
        kept = [os.dup(descriptor) for descriptor in (1, 2)]
        with path.open("wb") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
        try:
            yield lambda: path.read_text(encoding="utf-8", errors="replace")
        finally:
            for descriptor, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)


def parse_kernels(text: str) -> list[Kernel]:
    """The kernels that were compiled, in order.

    Example:
      >>> said = '''ptxas info    : (C7519) warpgroup.arrive is injected in around line 9 in function 'f'
      ... ptxas info    : Compiling entry function 'f_mosaic_gpu_kernel' for 'sm_90a'
      ...     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
      ... ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem'''
      >>> (kernel,) = parse_kernels(said)
      >>> kernel.name, kernel.registers, kernel.spill_bytes, kernel.said
      ('f', 168, 16, {'C7519': 1})
    """
    kernels: list[Kernel] = []
    launched, last = "", Kernel("")  # ptxas speaks of a kernel before and after it names it
    waiting = Kernel("")
    for line in text.splitlines():
        if match := _SAID.search(line):
            waiting.said[match[1]] = waiting.said.get(match[1], 0) + 1
            if _LOSS.search(match[0]):
                waiting.losses.append(f"{match[1]}: {match[2]}")
        elif match := _ENTRY.search(line):
            waiting.name = match[1]
            kernels.append(waiting)
            last, waiting = waiting, Kernel("")
        elif match := _SPILLS.search(line):
            last.spill_bytes += int(match[1]) + int(match[2])
        elif match := _USED.search(line):
            last.registers = int(match[1])
        elif match := _LAUNCHER.search(line):
            launched = match[1]
        elif (match := _LAUNCH.search(line)) and last.name == launched:
            x, y, z, *_, threads_x, threads_y, threads_z, last.shared_bytes = map(int, match.groups())
            last.blocks, last.threads = x * y * z, threads_x * threads_y * threads_z
    return kernels
