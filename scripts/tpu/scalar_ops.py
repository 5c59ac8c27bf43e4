"""What libtpu's text of a scalar instruction means: `decode` makes a bundle's into steps on a `Machine`.

Values are known by the compiler's own names (`%s41_s7`: value 41 in register 7), each written once an iteration; a phi,
which renames, takes what its register holds. So nothing depends on how many cycles a result takes to arrive.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

LANES: Final = 128
# Made-up addresses, far enough apart: an operand's is its base, or where the compiler counts in finer units, that << 4.
_OPERANDS: Final = 1 << 26
_OPERAND: Final = 20
_FINER: Final = 4
_ALLOCATION: Final = 20

_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_REGISTER = re.compile(r"%([sp]\d+)_([sp]\d+)")
_ASSIGN = re.compile(r"%([sp]\d+)_([sp]\d+) = ([\w.]+)(.*)", re.DOTALL)
_INPUT = re.compile(r"%(s\d+)_(s\d+) = inlined_call_operand\.(.*?) \[shape: [^,]*?.*?index: (\d+)")
_ADDRESS = re.compile(r"\[#allocation(\d+)(\w*)(?: \+ (.*))?\]")
_DMA = re.compile(r"= dma\.([a-z]+)_to_([a-z]+)(.*)", re.DOTALL)
_STRIDED_DMA = re.compile(r"= dma\.general(?P<rest>[^;]*?)/\* (?P<source>[a-z]+)-to-(?P<target>[a-z]+) \*/", re.DOTALL)
_STORE = re.compile(r"= sst (\(.*?\),? ?)?\[smem:(\[.*?\])\] (.*)", re.DOTALL)
_DIVISION = re.compile(r"%(\d+) = sdivrem\.u32 (?:\(.*?\), )?(.*?), (.*?) /\* (kDiv|kRem|kDivAndRem) \*/")
_GUARD = re.compile(r"\s*\((!?)(%\w+)(?:, (%\w+))?\),?(.*)", re.DOTALL)


class Machine:
    """Scalar registers and SMEM. A value that is not known (from a vector, or never written) is None.

    Args:
      operands: values of the kernel's int32 operands, by position.
      granule: bytes that a DMA counts in.
    """

    def __init__(self, operands: Mapping[int, np.ndarray], granule: int):
        self.operands = {index: _words(array) for index, array in operands.items()}
        self.granule = granule
        self.names: dict[str, int | None] = {}
        self.registers: dict[str, int | None] = {}
        self.divisions: dict[str, list[int | None]] = {}  # results that wait to be popped
        self.memory: dict[int, int | None] = {_allocation("0", ""): 0}  # where v4 and v5p keep the core's number
        self.bytes_read = self.bytes_written = 0

    def write(self, name: str, register: str, value: int | None) -> None:
        self.names[name] = self.registers[register] = None if value is None else (value + 2**31) % 2**32 - 2**31

    def copy(self, source: str, start: int | None, target: str, to: int | None, granules: int) -> None:
        """A DMA: counts its bytes, and moves an operand's values if it goes to SMEM.

        Raises:
          ValueError: the values are not known.
        """
        self.bytes_read += granules * self.granule * (source == "hbm")
        self.bytes_written += granules * self.granule * (target == "hbm")
        if target != "smem":
            return
        if start is None or to is None:
            raise ValueError("a DMA into SMEM whose address is not known")
        shift = _FINER if start >= _OPERANDS << 1 else 0
        index, offset = divmod(start - (_OPERANDS << shift), 1 << (_OPERAND + shift))
        if index not in self.operands:
            raise ValueError(f"the kernel reads operand {index} into SMEM, whose values were not given")
        words, per_granule = self.operands[index], self.granule // 4
        for i in range(granules * per_granule):
            at = offset * per_granule + i
            self.memory[to + i] = words[at] if at < len(words) else None


Step = Callable[[Machine], None]
Value = Callable[[Machine], int | None]


def _words(array: np.ndarray) -> list[int]:
    """An int32 array as it lies in memory: rows padded to the lanes."""
    array = np.asarray(array, np.int32)
    if array.ndim > 1:
        array = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % LANES)])
    return array.reshape(-1).tolist()


def _unsigned(value: int) -> int:
    return value % 2**32


_BINARY: Final[dict[str, Callable[[int, int], int]]] = {
    "sadd.s32": lambda a, b: a + b,
    "ssub.s32": lambda a, b: a - b,
    "smul.u32": lambda a, b: a * b,
    "smulhi.u32": lambda a, b: _unsigned(a) * _unsigned(b) >> 32,
    "sand.u32": lambda a, b: a & b,
    "sor.u32": lambda a, b: a | b,
    "sxor.u32": lambda a, b: a ^ b,
    "sshll.u32": lambda a, b: a << (b & 31),
    "sshra.s32": lambda a, b: a >> (b & 31),
    "sshrl.u32": lambda a, b: _unsigned(a) >> (b & 31),
    "smin.s32": min,
    "smax.s32": max,
    "smin.u32": lambda a, b: min(_unsigned(a), _unsigned(b)),
    "smax.u32": lambda a, b: max(_unsigned(a), _unsigned(b)),
    "por": lambda a, b: a | b,
    "pand": lambda a, b: a & b,
    "pnand": lambda a, b: 1 - (a & b),
    "pnor": lambda a, b: 1 - (a | b),
    "pxor": lambda a, b: a ^ b,
}
# Results that one operand decides, whatever the other is.
_DECIDED: Final[dict[tuple[str, int | None], int]] = {("pand", 0): 0, ("pnand", 0): 1, ("por", 1): 1, ("pnor", 1): 0}
_COMPARE: Final[dict[str, Callable[[int, int], bool]]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def decode(text: str) -> list[Step]:
    """The scalar instructions of a bundle: phis first, then each after those of the bundle that it reads from."""
    waiting: list[tuple[str | None, set[str], Step]] = []
    steps: list[Step] = []
    for match in _STRIDED_DMA.finditer(text):  # the comment alone says which memories
        rest = _COMMENT.sub("", match["rest"])
        waiting.append((None, _reads(rest), _dma(match["source"], match["target"], rest)))
    for match in _DIVISION.finditer(text):
        waiting.append((match[1], _reads(match[2] + match[3]), _division(match)))
    body = _COMMENT.sub("", text).strip().removeprefix("{").rpartition("}")[0]
    for part in map(str.strip, body.split(";;")):
        if match := _INPUT.match(part):
            steps.append(_input(match))
        elif match := _ASSIGN.match(part):
            step = _assignment(match[1], match[2], match[3], match[4])
            if match[3] == "sphi":
                steps.append(step)
            else:
                waiting.append((match[1], _reads(match[4]), step))
        elif match := _DMA.search(part):
            waiting.append((None, _reads(match[3]), _dma(match[1], match[2], match[3])))
        elif match := _STORE.search(part):
            waiting.append((None, _reads(part), _store(match)))
    while waiting:
        defined = {name for name, _, _ in waiting}
        ready = [entry for entry in waiting if not entry[1] & (defined - {entry[0]})] or waiting
        steps += [step for _, _, step in ready]
        waiting = [entry for entry in waiting if entry not in ready]
    return steps


def branch_guard(text: str) -> Value | None:
    """The condition of a bundle's branch; `None` if it always jumps."""
    match = re.search(r"sbr\.\w+ (\(.*?\))", text)
    return None if match is None else _guarded(match[1])[0]


def _reads(text: str) -> set[str]:
    popped = re.search(r"\A %(\d+)\Z", text)
    return {match[1] for match in _REGISTER.finditer(text)} | ({popped[1]} if popped else set())


def _allocation(number: str, suffix: str) -> int:
    return (2 * int(number) + 1 + bool(suffix)) << _ALLOCATION


def _sum(parts: list[Value]) -> Value:
    def total(m: Machine) -> int | None:
        values = [part(m) for part in parts]
        return None if None in values else sum(v for v in values if v is not None)

    return total


def _value(text: str) -> Value:
    """An operand of an instruction: a register, a number, or an address made of them."""
    text = text.strip().removeprefix("$")
    if register := _REGISTER.match(text):
        name = register[1]
        return lambda m: m.names.get(name)
    if match := _ADDRESS.match(text):
        base = _allocation(match[1], match[2])
        return _sum([lambda m: base, *([_value(match[3])] if match[3] else [])])
    if text.startswith("["):
        return _sum([_value(part) for part in text.strip("[]").split(" + ")])
    constant = int(text, 0)
    return lambda m: constant


def _guarded(rest: str) -> tuple[Value | None, str | None, str]:
    """Reads "(!%p1, %s2), more": the predicate, the value that stays where it is false, and what follows."""
    match = _GUARD.match(rest)
    if not match:
        return None, None, rest
    predicate, negated = _value(match[2]), match[1] == "!"
    return (lambda m: None if (value := predicate(m)) is None else value ^ negated), match[3], match[4]


def _input(match: re.Match) -> Step:
    name, register, space, index = match[1], match[2], match[3], int(match[4])

    def step(m: Machine) -> None:
        by_value = (m.operands.get(index) or [None])[0]
        m.write(name, register, by_value if space.startswith("<no") else _OPERANDS + (index << _OPERAND))

    return step


def _assignment(name: str, register: str, op: str, rest: str) -> Step:
    guard, kept, rest = _guarded(rest)
    compute = _computation(op, rest)
    if guard is None or compute is None:
        return lambda m: m.write(name, register, None if compute is None else compute(m))
    keep = _value(kept) if kept else (lambda m: m.registers.get(register))

    def step(m: Machine) -> None:
        holds = guard(m)
        m.write(name, register, None if holds is None else compute(m) if holds else keep(m))

    return step


def _computation(op: str, rest: str) -> Value | None:
    """What an instruction computes; `None` where it is not a scalar one, so that its result is not known."""
    if op == "sphi":
        register = rest[rest.index("_") + 1 :].partition(",")[0].strip()
        return lambda m: m.registers.get(register)
    if op.startswith("int_to_ptr"):
        return _value(rest[rest.index("%") :])
    arguments = [part.strip() for part in re.sub(r"(?<=\w) \[#\w+\]", "", rest).split(",")]
    if op == "spop.drf":
        division = arguments[0].removeprefix("%")
        return lambda m: m.divisions[division].pop(0) if m.divisions.get(division) else None
    if op == "smov":
        return _value(arguments[0])
    if op == "pneg":
        value = _value(arguments[0])
        return lambda m: None if (v := value(m)) is None else 1 - v
    if op == "sld":
        address = _value(arguments[0].removeprefix("[smem:").removesuffix("]"))
        return lambda m: None if (at := address(m)) is None else m.memory.get(at)
    if op == "scalar_select":
        predicate, yes, no = map(_value, arguments)
        return lambda m: None if (p := predicate(m)) is None else (yes if p else no)(m)
    return _two_operands(op, arguments)


def _two_operands(op: str, arguments: list[str]) -> Value | None:
    function: Callable[[int, int], Any] | None = _BINARY.get(op)
    if op.startswith("scalar_lea"):
        function = _BINARY["sadd.s32"]
    elif op.startswith("scmp."):
        _, relation, kind, *_ = op.split(".")
        compare = _COMPARE[relation]
        function = compare if kind == "s32" else lambda a, b: compare(_unsigned(a), _unsigned(b))
    if function is None:
        return None
    apply, (left, right) = function, map(_value, arguments)

    def result(m: Machine) -> int | None:
        a, b = left(m), right(m)
        if a is None or b is None:
            return _DECIDED.get((op, b if a is None else a))
        if op.startswith("scmp."):  # constants are printed unsigned
            a, b = (a + 2**31) % 2**32 - 2**31, (b + 2**31) % 2**32 - 2**31
        return int(apply(a, b))

    return result


def _dma(source: str, target: str, rest: str) -> Step:
    guard, _, rest = _guarded(re.sub(r"\[thread:\$\w+\]", "", rest).strip())
    start, granules, to = map(_value, rest.split(",")[:3])

    def step(m: Machine) -> None:
        holds, size = 1 if guard is None else guard(m), granules(m)
        if holds is None or size is None:
            raise ValueError(f"a DMA from {source} to {target} depends on a value that is not known")
        if holds:
            m.copy(source, start(m), target, to(m), size)

    return step


def _division(match: re.Match) -> Step:
    """A division, whose results are popped by its name: the quotient first where both are asked for."""
    name, left, right, kind = match[1], _value(match[2]), _value(match[3]), match[4]

    def step(m: Machine) -> None:
        a, b = left(m), right(m)
        quotient, remainder = (None, None) if a is None or not b else divmod(_unsigned(a), _unsigned(b))
        m.divisions[name] = {"kDiv": [quotient], "kRem": [remainder], "kDivAndRem": [quotient, remainder]}[kind]

    return step


def _store(match: re.Match) -> Step:
    guard = _guarded(match[1] or "")[0]
    address, value = _value(match[2]), _value(match[3])

    def step(m: Machine) -> None:
        holds, at = 1 if guard is None else guard(m), address(m)
        if holds is None or at is None:
            raise ValueError("a store to SMEM depends on a value that is not known")
        if holds:
            m.memory[at] = value(m)

    return step
