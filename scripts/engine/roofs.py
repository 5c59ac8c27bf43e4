"""`measure_roofs`: how fast this device reads and multiplies, by the simplest programs that do only that."""

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from scripts.engine.roofline import Roofs

# On a CPU a tenth of a second must do.
_READ_BYTES: Final = {"cpu": 1 << 28}
_SIZE: Final = {"cpu": 1024}
_CALLS: Final = 8


def measure_roofs(dtype: str, *, scale: float = 1.0) -> Roofs:
    """Both roofs of the first device.

    Reading is a sum in f32 over 2 GiB of bfloat16; multiplying, products of 8192 x 8192 matrices, chained in one
    program. The median of five batches counts.

    Args:
      dtype: of the matrices.
      scale: below 1, less is read and multiplied, for tests.
    """
    platform = jax.devices()[0].platform
    values = int(_READ_BYTES.get(platform, 1 << 31) * scale) // 2
    size = max(int(_SIZE.get(platform, 8192) * scale), 16)
    data = jnp.ones((max(values // 1024, 1), 1024), jnp.bfloat16)

    @jax.jit
    def read(data, before):
        # Each call waits for the one before, and none is found to be the same.
        return jnp.sum(data, dtype=jnp.float32) + 0 * before

    read_s = _seconds(lambda state: read(data, state), jnp.float32(0))
    roof = data.nbytes / read_s
    del data
    right = jax.random.normal(jax.random.key(0), (size, size), dtype) / size**0.5

    def multiply(left, right):
        for _ in range(_CALLS):
            left = left @ right
        return left

    program = jax.jit(multiply, donate_argnums=0)
    matmul_s = _seconds(lambda state: program(state, right), right + 0) / _CALLS
    return Roofs(read=roof, matmul=2 * size**3 / matmul_s)


def _seconds(call: Callable[[Any], Any], state: Any, *, batches: int = 5, calls: int = 4) -> float:
    """Of one call, each on the output of the last."""
    for _ in range(3):
        state = call(state)
    jax.block_until_ready(state)
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(calls):
            state = call(state)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)
