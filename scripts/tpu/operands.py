"""`kernel_operands`: the integers that a program hands to its Pallas kernels, worked out on the CPU.

A kernel's loops depend on its metadata alone. So the program is evaluated as far as known values reach; queries and
pages are only shapes, and whatever is computed from them stays unknown.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core


@dataclass(frozen=True)
class KernelCall:
    """A call of a Pallas kernel: its name, and its known operands by position."""

    name: str
    operands: dict[int, np.ndarray]


def kernel_operands(function: Callable, *args: Any) -> list[KernelCall]:
    """The Pallas calls of `function(*args)` in order, each with the operands that are known.

    Args:
      function: traced under the mesh in use.
      args: trees of numpy arrays (known) and `jax.ShapeDtypeStruct`s (unknown).
    """
    leaves = jax.tree.leaves(args)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    closed = jax.make_jaxpr(function)(*shapes)
    calls: list[KernelCall] = []
    known = [None if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves]
    with jax.default_device(jax.devices("cpu")[0]):
        _evaluate(closed.jaxpr, closed.consts, known, calls)
    return calls


def _evaluate(jaxpr: Any, consts: Any, args: list[Any], calls: list[KernelCall]) -> list[Any]:
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= zip(jaxpr.invars, args, strict=True)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values.get(atom)

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name == "pallas_call":
            name = eqn.params.get("name") or eqn.params["jaxpr"].debug_info.func_name
            calls.append(KernelCall(name, {i: np.asarray(v) for i, v in enumerate(inputs) if v is not None}))
            outputs = [None] * len(eqn.outvars)
        elif inner is not None and all(value is not None for value in inputs):
            outputs = _bind(eqn, inputs)
        elif inner is not None and len(_open(inner)[0].invars) == len(inputs):
            outputs = _evaluate(*_open(inner), inputs, calls)
        elif any(value is None for value in inputs):
            outputs = [None] * len(eqn.outvars)
        else:
            outputs = _bind(eqn, inputs)
        values |= zip(eqn.outvars, outputs, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _open(jaxpr: Any) -> tuple[Any, Any]:
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


def _bind(eqn: Any, inputs: list[Any]) -> list[Any]:
    outputs = eqn.primitive.bind(*inputs, **eqn.params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]
