"""`describe`: a text of a value, equal in every process for equal values, and for no others."""

import dataclasses
import enum
import functools
import hashlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

import jax
import numpy as np

# Packages whose code is known by their version, or whose sources are looked at (`jpaged.program_key`).
KNOWN_PACKAGES: Final = {"jpaged", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "jaxtyping", "beartype"}


class UnseenError(Exception):
    """A value holds code, or is of a class, whose source nobody has looked at; the message names it."""


def describe(value: Any) -> str:
    """A text that says all of a value.

    Args:
      value: constants, arrays (of a `jax.Array` the type and place, of one of numpy the contents), containers and
        dataclasses of such, classes and functions of `KNOWN_PACKAGES` and of Python's library.

    Raises:
      UnseenError: it holds something else.

    Example:
      >>> describe({"size": 8, "names": ("a", None)})
      "builtins.dict{'size':8,'names':builtins.tuple('a',None,),}"
      >>> describe(lambda x: x)
      Traceback (most recent call last):
      ...
      jpaged.fingerprint.UnseenError: jpaged.fingerprint.<lambda>
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return repr(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return dotted_name(value)
    if isinstance(value, jax.Array):
        return _describe_array(value)
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        return f"numpy {array.dtype!r}{value.shape}{hashlib.sha256(array.tobytes()).hexdigest()}"
    if isinstance(value, np.dtype):
        return repr(value)
    if isinstance(value, jax.tree_util.PyTreeDef):
        return _describe_tree(value)
    name = dotted_name(kind)
    if isinstance(value, enum.Enum):
        return f"{name}.{value.name}"
    if isinstance(value, Mapping):
        return f"{name}{{{''.join(f'{describe(key)}:{describe(one)},' for key, one in value.items())}}}"
    if isinstance(value, set | frozenset):
        return f"{name}{{{''.join(sorted(f'{describe(one)},' for one in value))}}}"
    if isinstance(value, tuple | list):
        return f"{name}({_all(value)})"
    if dataclasses.is_dataclass(value):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return f"{name}({_all(fields)})"
    if isinstance(value, functools.partial):
        return f"{name}({_all((value.func, value.args, value.keywords))})"
    raise UnseenError(name)


def dotted_name(value: Any) -> str:
    """Module and name of a class or a function.

    Raises:
      UnseenError: it is not there by that name, or of no package that is known.
    """
    name = f"{value.__module__}.{value.__qualname__}"
    if value is type(None):  # which the module that it names does not have
        return name
    found = sys.modules.get(value.__module__ or "")
    for word in value.__qualname__.split("."):
        found = getattr(found, word, None)
    if found is not value or not is_known(value.__module__):
        raise UnseenError(name)
    return name


def is_known(module: str) -> bool:
    """Whether a module is of a package whose code is known by its version or its sources, or of Python's library."""
    package = module.partition(".")[0]
    return package in KNOWN_PACKAGES or (package in sys.stdlib_module_names and package != "__main__")


def without_address(text: str) -> str:
    """The text, if it says the same in every process.

    Raises:
      UnseenError: it tells where something lies in memory.
    """
    if " at 0x" in text:
        raise UnseenError(text[max(text.index(" at 0x") - 60, 0) :][:100])
    return text


def _all(values: Iterable[Any]) -> str:
    return "".join(f"{describe(one)}," for one in values)


def _describe_tree(tree: Any) -> str:
    node = tree.node_data()
    if node is None:
        return "*" if tree.num_leaves else "none"
    return f"{describe(node)}({''.join(f'{_describe_tree(child)},' for child in tree.children())})"


def _describe_array(array: Any) -> str:
    # Two arrays of equal types that lie differently are served by different programs.
    return without_address(f"{jax.typeof(array)}{array.format}{array.committed}")
