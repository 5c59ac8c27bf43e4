"""`kernel_counts`: the kernels that a compiled program launches, by what they do. Imports no jax.

Read from the text of the optimised program. An instruction of the computation that runs is a kernel, or nothing at all,
or runs another computation once or in a loop. Computations of fusions are not run: each is compiled into one kernel.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from scripts.engine.kernel_classes import CLASSES as ENGINE_CLASSES
from scripts.engine.kernel_classes import kernel_class

# "layer" is all that follows a layer's attention in one kernel; "plan" computes with whole numbers alone: unpacks the
# step's arguments, and makes the lists of the attention's work.
CLASSES: Final = ("layer", "plan", *ENGINE_CLASSES)

_COMPUTATION: Final = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION: Final = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_SCOPE: Final = re.compile(r'op_name="([^"]*)"')
_CALLED: Final = re.compile(r"%([\w.-]+)")
_BODY: Final = re.compile(r"\bbody=%?([\w.-]+)")
_TRIPS: Final = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_DTYPE: Final = re.compile(r"\b([a-z]+\d*)\[")
_WHOLE: Final = re.compile(r"^(?:pred|[su]\d+)$")
# These make no kernel.
_FREE: Final = frozenset(
    {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "optimization-barrier", "after-all"}
    | {"add-dependency", "copy-done", "async-done", "partition-id", "replica-id"}
)


@dataclass(frozen=True)
class Instruction:
    """One instruction of a program: its name, the shapes it gives, the operation, and the rest of its line."""

    name: str
    shapes: str
    operation: str
    rest: str

    @property
    def scope(self) -> str:
        match = _SCOPE.search(self.rest)
        return match[1] if match else ""

    @property
    def kernel_name(self) -> str:
        """As a profile gives it; a kernel of ours is called like the scope that its operation lies in."""
        *_, scope, operation = ("", "", *self.scope.split("/"))
        return scope if operation == "mpmd_map" and self.operation == "custom-call" else self.name

    @property
    def only_whole_numbers(self) -> bool:
        """Whether all that it gives is integers and truth values."""
        return all(_WHOLE.match(dtype) for dtype in _DTYPE.findall(self.shapes))


def read_program(text: str) -> tuple[str, dict[str, list[Instruction]]]:
    """The name of the computation where the program begins, and the instructions of all.

    Raises:
      ValueError: the text is not of a compiled program.
    """
    entry, computations, lines = "", {}, None
    for line in text.splitlines():
        if begin := _COMPUTATION.match(line):
            lines = computations[begin[2]] = []
            entry = begin[2] if begin[1] else entry
        elif line.startswith("}"):
            lines = None
        elif lines is not None and (found := _INSTRUCTION.match(line)):
            lines.append(Instruction(*found.groups()))
    if not entry:
        raise ValueError(f"no ENTRY in the text, which begins {text[:60]!r}; expected `compiled.as_text()`")
    return entry, computations


def launches(text: str) -> Iterator[tuple[Instruction, int]]:
    """Each instruction that is a kernel, and how often it is launched: all branches, an unknown loop once.

    Raises:
      ValueError: as `read_program`.
    """
    entry, computations = read_program(text)

    def walk(name: str, times: int) -> Iterator[tuple[Instruction, int]]:
        for one in computations.get(name, ()):
            if one.operation in _FREE:
                continue
            if one.operation == "while":
                trips, body = _TRIPS.search(one.rest), _BODY.search(one.rest)
                yield from walk(body[1] if body else "", times * int(trips[1] if trips else 1))
            elif one.operation in ("call", "async-start", "conditional"):
                _, _, attributes = one.rest.partition("), ")
                for called in filter(computations.__contains__, _CALLED.findall(attributes)):
                    yield from walk(called, times)
            else:
                yield one, times

    return walk(entry, 1)


def class_of(one: Instruction) -> str:
    """One of `CLASSES`."""
    name = one.kernel_name
    if name == "layer_matmuls":
        return "layer"
    if "plan_attention" in one.scope:
        return "plan"
    if one.operation.startswith("copy"):
        return "copy"
    found = kernel_class(name, {re.sub(r"[.-]", "_", name): one.scope})
    return "plan" if found == "other" and one.only_whole_numbers else found


def kernel_counts(text: str) -> dict[str, int]:
    """Launches by class, those that there are.

    Raises:
      ValueError: as `read_program`.

    Example:
      >>> kernel_counts('''ENTRY %main (a: s32[2], b: bf16[2]) -> bf16[2] {
      ...   %a = s32[2]{0} parameter(0)
      ...   %b = bf16[2]{0} parameter(1)
      ...   %fusion.1 = s32[2]{0} fusion(%a), kind=kLoop, calls=%f
      ...   ROOT %fusion.2 = bf16[2]{0} fusion(%b, %fusion.1), calls=%g, metadata={op_name="jit(f)/layer_0/norm/mul"}
      ... }''')
      {'plan': 1, 'norm': 1}
    """
    counts: Counter[str] = Counter()
    for one, times in launches(text):
        counts[class_of(one)] += times
    return {name: counts[name] for name in CLASSES if counts[name]}
