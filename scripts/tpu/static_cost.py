"""`StaticCost`: what a kernel's issue cycles and bytes say of its speed. A model, not a measurement. Imports no jax.

Time is modelled as max(bytes / HBM rate, issue cycles / clock): memory and the core never wait for each other, every
bundle issues in one cycle. Stalls, latency of memory and bank conflicts are not in it, so it is a bound from below.
"""

from dataclasses import dataclass

from .chips import Chip
from .llo import Loop, Program
from .scalar_run import Execution


@dataclass(frozen=True)
class StaticCost:
    """A call of a kernel on one core.

    Attributes:
      chip: the generation.
      cycles: issue cycles of the whole call.
      kv_bytes: bytes of K and V that attention has to read.
      other_bytes: bytes of queries and outputs.
      fetched_bytes: bytes that the kernel's DMAs read from HBM.
      flops: flops that attention has to do.
      loop_iterations: times that the body of the busiest loop with matrix products ran.
      loop_cycles: issue cycles an iteration of it, loops inside included, by the path taken.
      loop_code: bundles of its body, every branch included.
      loop_spills: vector registers spilled or filled in an iteration.
      loop_matrix: share of the matrix units' cycles that an iteration fills.
    """

    chip: Chip
    cycles: int
    kv_bytes: int
    other_bytes: int
    fetched_bytes: int
    flops: int
    loop_iterations: int
    loop_cycles: float
    loop_code: int
    loop_spills: float
    loop_matrix: float

    @property
    def memory_s(self) -> float:
        """Bytes over the HBM rate; what is fetched, but at least what has to be."""
        return max(self.fetched_bytes, self.kv_bytes + self.other_bytes) / self.chip.hbm_rate

    @property
    def issue_s(self) -> float:
        return self.cycles / self.chip.clock

    @property
    def modelled_s(self) -> float:
        return max(self.memory_s, self.issue_s)

    @property
    def bound(self) -> str:
        """What the model says it waits for."""
        return "memory" if self.memory_s >= self.issue_s else "issue"

    @property
    def bandwidth_share(self) -> float:
        """Modelled share of the HBM rate, by the bytes that have to be moved."""
        return (self.kv_bytes + self.other_bytes) / self.chip.hbm_rate / self.modelled_s

    @property
    def matrix_share(self) -> float:
        """Modelled share of the matrix units' peak, by the flops that have to be done."""
        return self.flops / self.chip.matrix_flops / self.modelled_s

    @property
    def cycles_per_kv_kib(self) -> float:
        return self.cycles / (self.kv_bytes / 1024)

    @property
    def kv_bytes_per_iteration(self) -> float:
        """Bytes fetched for an iteration of the busiest loop, those of queries left out."""
        return max(self.fetched_bytes - self.other_bytes // 2, 0) / max(self.loop_iterations, 1)


def product_loops(program: Program) -> list[Loop]:
    """The loops with matrix products that have no such loop inside."""

    def multiplies(loop: Loop) -> bool:
        return program.slots(program.within(loop))["MXU"] > 0

    loops = [loop for top in program.loops for _, loop in top.walk()]
    return [loop for loop in loops if multiplies(loop) and not any(map(multiplies, loop.loops))]


def busiest_loop(run: Execution) -> Loop | None:
    """Of the innermost loops with matrix products the one with the most cycles run."""
    return max(product_loops(run.program), key=lambda loop: run.cycles(run.program.within(loop)), default=None)


def static_cost(run: Execution, chip: Chip, *, flops: int, kv_bytes: int, other_bytes: int) -> StaticCost:
    """Puts the cycles of a run beside what attention has to do (see `attention_cost`).

    Raises:
      ValueError: no loop of the kernel has matrix products.
    """
    loop = busiest_loop(run)
    if loop is None:
        raise ValueError("the kernel has no loop with matrix products: is it attention?")
    body, times = run.program.within(loop), max(run.iterations(loop), 1)
    cycles = run.cycles(body)
    matrix = run.slots("MXU", body) / (chip.units * cycles) if cycles else 0.0
    return StaticCost(
        chip=chip,
        cycles=run.cycles(),
        kv_bytes=kv_bytes,
        other_bytes=other_bytes,
        fetched_bytes=run.bytes_read,
        flops=flops,
        loop_iterations=run.iterations(loop),
        loop_cycles=cycles / times,
        loop_code=loop.cycles,
        loop_spills=(run.slots("VLOAD:FILL", body) + run.slots("VSTORE:SPILL", body)) / times,
        loop_matrix=matrix,
    )
