"""`Program`: a kernel's VLIW program as libtpu prints it, cut into basic blocks and loops. Imports no jax.

The compiler fills bundles; the machine issues one a cycle. Two of its dumps are read, taken after register allocation
and before runs of empty bundles are folded into one delay bundle, so that a line is a cycle:

    *-packed-bundles-post-ra.txt                         the bundles; a branch names the bundle that it jumps to
    *-pre-delay_hlo-static-per-bundle-utilization.txt    how many slots of each unit a bundle fills

A branch takes effect a few bundles later (its delay slots), which belong to the block that it ends.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

# As the utilization dump calls them: matrix unit, cross-lane unit, vector ALUs, results popped, transcendental unit,
# vector loads and stores (of them, what was spilled), scalar ALUs.
UNITS: Final = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL", "SALU")

_BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s*([A-Z, ]*):\s*([> ]*)(\{.*)")
_BRANCH = re.compile(r"sbr\.\w+ (?:\((!?)%(?:p\d+_)?(p\d+)\) )?target bundleno = (\d+)")


@dataclass(frozen=True)
class Branch:
    """A jump to bundle `target`, taken if predicate register `predicate` is true (or, with `negated`, false)."""

    target: int
    predicate: str | None
    negated: bool


@dataclass(frozen=True)
class Bundle:
    """What is issued in one cycle: the text of its instructions and the slots it fills, in the order of `UNITS`."""

    text: str
    slots: tuple[int, ...]

    @cached_property
    def branch(self) -> Branch | None:
        match = _BRANCH.search(self.text)
        return Branch(int(match[3]), match[2], match[1] == "!") if match else None


@dataclass(frozen=True)
class Block:
    """Bundles [start, end) that always run together; `successors` are the bundles that can follow."""

    start: int
    end: int
    successors: tuple[int, ...]

    @property
    def cycles(self) -> int:
        return self.end - self.start


@dataclass
class Loop:
    """Bundles [start, end) that a jump at their end repeats; `loops` are those inside."""

    start: int
    end: int
    loops: list["Loop"] = field(default_factory=list)

    @property
    def cycles(self) -> int:
        return self.end - self.start

    def walk(self, depth: int = 1) -> Iterator[tuple[int, "Loop"]]:
        """This loop and those inside, each with its depth."""
        yield depth, self
        for loop in self.loops:
            yield from loop.walk(depth + 1)


class Program:
    """The bundles of a kernel, its basic blocks in order, and its outermost loops."""

    def __init__(self, bundles: list[Bundle], capacity: tuple[int, ...], delay_slots: int):
        self.bundles = bundles
        self.capacity = capacity
        self.blocks = _blocks(bundles, delay_slots)
        self.loops = _loops(self.blocks)

    @property
    def cycles(self) -> int:
        """Issue cycles of the whole text, each bundle once."""
        return len(self.bundles)

    def slots(self, blocks: Iterable[Block]) -> dict[str, int]:
        """Slots of each unit that the blocks fill."""
        total = [0] * len(UNITS)
        for block in blocks:
            for bundle in self.bundles[block.start : block.end]:
                total = [a + b for a, b in zip(total, bundle.slots, strict=True)]
        return dict(zip(UNITS, total, strict=True))

    def within(self, loop: Loop) -> list[Block]:
        """Blocks of a loop, those of the loops inside it included."""
        return [block for block in self.blocks if loop.start <= block.start < loop.end]

    def own(self, loop: Loop) -> list[Block]:
        """Blocks of a loop without those of the loops inside it."""
        inner = [(i.start, i.end) for i in loop.loops]
        return [b for b in self.within(loop) if not any(start <= b.start < end for start, end in inner)]


def parse_program(bundles: str, utilization: str, delay_slots: int) -> Program:
    """Reads the two dumps of a kernel.

    Raises:
      ValueError: they are not what libtpu 0.0.42 writes, or not of one kernel.
    """
    texts: list[str] = []
    for line in bundles.splitlines():
        match = _BUNDLE.match(line)
        if match:
            if int(match[1], 16) != len(texts):
                raise ValueError(f"bundle {match[1]} where {len(texts):#x} was expected: not a dump of packed bundles")
            texts.append(match[4])
        elif texts:
            texts[-1] += "\n" + line  # a comment or an error message that holds line breaks
    units, rows = _utilization(utilization)
    if not texts or len(rows) != len(texts):
        raise ValueError(f"{len(texts)} bundles and the slots of {len(rows)}; expected as many of both, and some")
    order = [units.index(name) for name in UNITS]
    parsed = [Bundle(text, tuple(row[i] for i in order)) for text, row in zip(texts, rows[0:], strict=True)]
    head = utilization.splitlines()
    capacity = [int(n) for n in head[2].split()]
    return Program(parsed, tuple(capacity[i] for i in order), delay_slots)


def _utilization(text: str) -> tuple[list[str], list[list[int]]]:
    head, *rows = text.splitlines()[1:]
    units = [name.strip() for name in head.split(",")]
    if set(UNITS) - set(units) or len(rows) < 2:
        raise ValueError(f"the utilization dump has the units {units}; expected {', '.join(UNITS)}")
    return units, [[int(n) for n in row.split()] for row in rows[2:] if row.strip()]


def _blocks(bundles: list[Bundle], delay_slots: int) -> list[Block]:
    starts, ends = {0}, {}
    for i, bundle in enumerate(bundles):
        if bundle.branch is not None:
            ends[min(i + 1 + delay_slots, len(bundles))] = bundle.branch
    starts |= set(ends) | {branch.target for branch in ends.values()}
    order = sorted(start for start in starts if start < len(bundles))
    blocks = []
    for start, end in zip(order, [*order[1:], len(bundles)], strict=True):
        branch = ends.get(end)
        following = [] if branch is None else [branch.target]
        if end < len(bundles) and (branch is None or branch.predicate is not None):
            following.append(end)
        blocks.append(Block(start, end, tuple(following)))
    return blocks


def _loops(blocks: list[Block]) -> list[Loop]:
    """Every jump backwards closes a loop; a loop whose bundles lie within another's is inside it."""
    spans: dict[int, int] = {}
    for block in blocks:
        for target in block.successors:
            if target <= block.start:
                spans[target] = max(block.end, spans.get(target, 0))
    outermost: list[Loop] = []
    for start, end in sorted(spans.items(), key=lambda span: (span[0], -span[1])):
        level = outermost
        while level and level[-1].end >= end:
            level = level[-1].loops
        level.append(Loop(start, end))
    return outermost
