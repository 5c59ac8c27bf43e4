"""`StepBuffers`: where the programs of a step put what they make, the same places in every step.

A CUDA graph holds addresses. If an array that it reads or writes lies elsewhere than in the step before, the graph is
brought up to date before it is launched, kernel by kernel, which takes the host longer than all else that it does for a
step. So what one step made is donated to the next, to be written over. While steps of one shape follow each other,
nothing else is allocated and freed but their inputs, in the same order each time, so the programs' temporaries stay
where they are too. What all of it takes, `jpaged.step_bytes.lent_bytes` knows.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from jpaged.batch import MAX_IN_FLIGHT
from jpaged.config import StepShape
from jpaged.sampling_rows import NUM_SAMPLING_FIELDS

# Token ids are read by the host, late. The others are read by programs of their own step alone, and written over by the
# next step's, which run after those.
_DEPTHS: Final = {"token ids": MAX_IN_FLIGHT}


class Buffer(NamedTuple):
    """An array of a step.

    Attributes:
      role: what it holds.
      shape, dtype: of the array.
    """

    role: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def depth(self) -> int:
        """Steps that may have one of their own at the same time."""
        return _DEPTHS.get(self.role, 1)


class StepBuffers:
    """Lends arrays to steps, each the one that was given back longest ago.

    Example:
      >>> buffers, place = StepBuffers(), jax.sharding.SingleDeviceSharding(jax.devices()[0])
      >>> logits = Buffer("logits", (1, 8), np.dtype(np.float32))
      >>> (array,) = buffers.take([logits], place)
      >>> buffers.keep([logits], [array])
      >>> buffers.take([logits], place)[0] is array
      True
    """

    def __init__(self) -> None:
        self._kept: defaultdict[Buffer, deque[jax.Array]] = defaultdict(deque)

    def prepare(self, wanted: Iterable[Buffer], sharding: Any) -> None:
        """Makes what is not there yet: once steps run there may be no memory left, and it would lie in the way."""
        for one in wanted:
            kept = self._kept[one]
            kept.extend(_make(one, sharding) for _ in range(one.depth - len(kept)))

    def take(self, wanted: Iterable[Buffer], sharding: Any) -> tuple[jax.Array, ...]:
        """Arrays to be donated to a program; what they hold is of no account."""
        return tuple(
            kept.popleft() if len(kept := self._kept[one]) == one.depth else _make(one, sharding) for one in wanted
        )

    def keep(self, wanted: Iterable[Buffer], arrays: Iterable[jax.Array]) -> None:
        """Gives back what a program made of those that it took, which others may go on to read meanwhile."""
        for one, array in zip(wanted, arrays, strict=True):
            self._kept[one].append(array)


def _make(one: Buffer, sharding: Any) -> jax.Array:
    return jax.device_put(np.zeros(one.shape, one.dtype), sharding)


def forward_buffers(shape: StepShape, vocab_size: int, hidden_size: int, hidden_dtype: Any) -> tuple[Buffer, ...]:
    """Logits, hidden states and sampling fields, as the forward pass gives them."""
    return (
        Buffer("logits", (shape.num_rows, vocab_size), np.dtype(np.float32)),
        Buffer("hidden", (shape.num_tokens, hidden_size), np.dtype(hidden_dtype)),
        Buffer("fields", (NUM_SAMPLING_FIELDS, shape.num_rows), np.dtype(np.int32)),
    )


def token_buffer(num_rows: int, num_steps: int = 1) -> Buffer:
    """What a step samples, or several do."""
    return Buffer("token ids", (num_steps, num_rows) if num_steps > 1 else (num_rows,), np.dtype(np.int32))
