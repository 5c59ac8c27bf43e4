"""`building`, `value_of`: address arithmetic that the kernels write down, computed for a thread."""

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax.interpreters.mlir import make_ir_context
from jaxlib.mlir import ir

_OPERATIONS = {
    "arith.addi": operator.add,
    "arith.subi": operator.sub,
    "arith.muli": operator.mul,
    "arith.divui": operator.floordiv,
    "arith.remui": operator.mod,
    "arith.xori": operator.xor,
}


@contextmanager
def building() -> Iterator[None]:
    """Where operations may be written down."""
    with make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            yield


def value_of(x: ir.Value) -> int:
    """What operations on constants, none of them negative, come to."""
    operation: Any = x.owner
    if operation.name == "arith.constant":
        return operation.attributes["value"].value
    return _OPERATIONS[operation.name](*map(value_of, operation.operands))
