"""Block sizes that were measured to be better than those of the rules: a table for each kind of GPU.

`tuned/<kind>.json` is the record that `scripts/tune.py` prints on a GPU of that kind: its figures, and `chosen`, for
each kernel the shapes where other sizes than those of the rules were clearly faster. A kind without a table runs by the
rules (`tuning`, `prefill_tuning_gpu`).
"""

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any, TypeVar

from .compat import current_gpu

FOLDER = Path(__file__).parent / "tuned"
# What a table may set, by kernel, and to what.
FIELDS = {
    "decode": {"consumers": range(1, 5), "stages": range(2, 9), "full_share": range(1, 1025)},
    "prefill": {
        "block_kv": range(64, 129, 64),
        "stages": range(1, 5),
        "consumers": range(2, 4),
        "query_buffers": range(1, 3),
        "section_tokens": range(1, 1 << 30),
        "raw_stages": range(1, 5),
    },
}
_SHAPE = ("head_dim", "itemsize", "min_units", "end_units")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Choice:
    """Sizes for the steps of one shape.

    Attributes:
      head_dim, itemsize: of the pages; bytes of a value.
      min_units, end_units: KV heads times rows of the step, a half-open range.
      sizes: fields of the kernel's blocks.
    """

    head_dim: int
    itemsize: int
    min_units: int
    end_units: int
    sizes: dict[str, int]


def table_name(kind: str) -> str:
    """The file of a kind of GPU.

    Example:
      >>> table_name("NVIDIA H200"), table_name("NVIDIA H100 80GB HBM3")
      ('h200.json', 'h100-80gb-hbm3.json')
    """
    return re.sub("[^a-z0-9]+", "-", kind.lower()).strip("-").removeprefix("nvidia-") + ".json"


def parse_table(record: Any, kind: str) -> dict[str, tuple[Choice, ...]]:
    """The choices of a record, by kernel.

    Raises:
      ValueError: it is none of this kind of GPU, or a choice is none that a kernel can run.

    Example:
      >>> record = {"device": "NVIDIA H200", "results": {"chosen": {"decode": [], "prefill": []}}}
      >>> parse_table(record, "NVIDIA H200")
      {'decode': (), 'prefill': ()}
    """
    if not isinstance(record, dict) or record.get("device") != kind:
        found = record.get("device") if isinstance(record, dict) else record
        raise ValueError(f"it is a table of the device {found!r}; expected {kind!r}")
    chosen = record.get("results", {}).get("chosen")
    if not isinstance(chosen, dict) or set(chosen) != set(FIELDS):
        raise ValueError(f"results.chosen is {chosen!r}; expected lists by the names {', '.join(FIELDS)}")
    return {kernel: tuple(_parse_choice(kernel, x) for x in chosen[kernel]) for kernel in FIELDS}


def _parse_choice(kernel: str, x: Any) -> Choice:
    if not isinstance(x, dict) or not all(_is_in(x.get(name), range(1 << 31)) for name in _SHAPE):
        raise ValueError(f"{kernel}: {x!r}; expected an object with the counts {', '.join(_SHAPE)}")
    sizes = x.get("sizes")
    if not isinstance(sizes, dict) or not sizes:
        raise ValueError(f"{kernel}: sizes are {sizes!r}; expected some of {', '.join(FIELDS[kernel])}")
    for name, value in sizes.items():
        allowed = FIELDS[kernel].get(name)
        if allowed is None:
            raise ValueError(f"{kernel}: {name} is no size; expected some of {', '.join(FIELDS[kernel])}")
        if not _is_in(value, allowed):
            raise ValueError(
                f"{kernel}: {name} is {value!r}; expected an integer from {allowed.start} to {allowed[-1]}, a multiple "
                f"of {allowed.step}"
            )
    return Choice(**{name: x[name] for name in _SHAPE}, sizes=dict(sizes))


def _is_in(x: Any, allowed: range) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x in allowed


@functools.cache
def read_table(kind: str, folder: Path = FOLDER) -> dict[str, tuple[Choice, ...]]:
    """The table of a kind of GPU, read once; no choices if there is none.

    Raises:
      ValueError: the file is broken; says which one, and how.

    Example:
      >>> read_table("NVIDIA A100")
      {'decode': (), 'prefill': ()}
    """
    path = folder / table_name(kind)
    if not path.is_file():
        return dict.fromkeys(FIELDS, ())
    try:
        return parse_table(json.loads(path.read_text(encoding="utf-8")), kind)
    except (ValueError, AttributeError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ValueError(
            f"{path}: {error}. Delete the file, so that the rules choose, or make it anew with scripts/tune.py"
        ) from error


def tuned(kernel: str, blocks: T, *, head_dim: int, itemsize: int, units: int = 0, folder: Path = FOLDER) -> T:
    """`blocks`, which the rules chose, with what the table of the GPU in use has instead.

    Args:
      kernel: "decode" or "prefill".
      units: KV heads times rows of the step; 0 for a kernel that does not go by it.
    """
    gpu = current_gpu()
    for choice in () if gpu is None else read_table(gpu.kind, folder)[kernel]:
        same = (choice.head_dim, choice.itemsize) == (head_dim, itemsize)
        if same and choice.min_units <= units < choice.end_units:
            return dataclasses.replace(blocks, **choice.sizes)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return blocks
