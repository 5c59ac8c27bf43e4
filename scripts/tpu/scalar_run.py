"""`run_program`: follows a kernel's scalar program on given operands, so that what is counted is what would run.

A kernel's loops and branches are decided by its scalar registers and SMEM alone. Those are interpreted; vectors are
not. The outcome is how often each basic block runs, and the bytes of every DMA that is started.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .llo import Block, Loop, Program
from .scalar_ops import Machine, Step, Value, branch_guard, decode


@dataclass
class Execution:
    """What a run of a kernel did.

    Attributes:
      program: the kernel.
      counts: how often each block ran, by its first bundle.
      bytes_read, bytes_written: of the DMAs from HBM and to it.
    """

    program: Program
    counts: dict[int, int] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0

    def cycles(self, blocks: list[Block] | None = None) -> int:
        """Issue cycles of the whole call, or of some of its blocks."""
        chosen = self.program.blocks if blocks is None else blocks
        return sum(block.cycles * self.counts.get(block.start, 0) for block in chosen)

    def iterations(self, loop: Loop) -> int:
        """How often a loop's body ran."""
        return self.counts.get(loop.start, 0)

    def slots(self, unit: str, blocks: list[Block] | None = None) -> int:
        """Slots of a unit that were filled in the whole call, or in some of its blocks."""
        chosen = self.program.blocks if blocks is None else blocks
        return sum(self.program.slots([b])[unit] * n for b in chosen if (n := self.counts.get(b.start, 0)))


@dataclass(frozen=True)
class _Code:
    """A block made ready to run: its scalar steps, and the condition and target of the branch that ends it."""

    steps: list[Step]
    target: int | None
    guard: Value | None


def _code(program: Program, block: Block) -> _Code:
    steps: list[Step] = []
    target, guard = None, None
    for bundle in program.bundles[block.start : block.end]:
        steps += decode(bundle.text)
        if bundle.branch is not None:
            target, guard = bundle.branch.target, branch_guard(bundle.text)
    return _Code(steps, target, guard)


def _next(machine: Machine, block: Block, code: _Code) -> int | None:
    """Runs a block; returns the first bundle of the one that follows, `None` at the end."""
    for step in code.steps:
        step(machine)
    taken: int | None = 0
    if code.target is not None:
        taken = 1 if code.guard is None else code.guard(machine)
    if taken is None:
        raise ValueError(f"the branch that ends bundles [{block.start:#x}, {block.end:#x}) depends on an unknown value")
    if taken:
        return code.target
    return block.end if block.end in block.successors else None


def run_program(
    program: Program, operands: Mapping[int, np.ndarray], *, granule: int = 32, max_blocks: int = 5_000_000
) -> Execution:
    """Runs the scalar side of a kernel.

    Args:
      program: the kernel.
      operands: values of its int32 operands, by position among the operands of the call.
      granule: bytes that the generation's DMAs count in.
      max_blocks: blocks after which it is held to be stuck.

    Raises:
      ValueError: a branch or a DMA depends on a value that is not known, or the kernel does not end.
    """
    machine, execution = Machine(operands, granule), Execution(program)
    blocks = {block.start: block for block in program.blocks}
    codes: dict[int, _Code] = {}
    at: int | None = 0
    for _ in range(max_blocks):
        if at is None or at not in blocks:
            execution.bytes_read, execution.bytes_written = machine.bytes_read, machine.bytes_written
            return execution
        block = blocks[at]
        if at not in codes:
            codes[at] = _code(program, block)
        execution.counts[at] = execution.counts.get(at, 0) + 1
        at = _next(machine, block, codes[at])
    raise ValueError(f"the kernel still ran after {max_blocks} blocks")
