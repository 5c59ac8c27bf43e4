"""`measure_breakdown`: where the time of a decode step goes, on the device by kernel class and on the host by phase.

A profile of some steps in the middle of a run gives the device's kernels. The profiler slows the host down, so the
step's time is that of the steps before it, and what the device does not need of it is idle:

    step  =  kernels  +  gaps of at most 5 us between kernels  +  idle
             `busy_ms`   `between_kernels_ms`                     `idle_fraction`, the host's or a transfer's fault

Copies are no kernels here: most run beside them. Kernels count as inside a CUDA graph where the profile gives them a
graph's id.
"""

import glob
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax

from jpaged.engine import Engine
from scripts.engine.kernel_classes import CLASSES, kernel_class
from scripts.engine.measures import Bench
from scripts.engine.serve import Run, request, serve

STEPS: Final = 16
_SHORT_GAP_NS: Final = 5000
_LISTED: Final = 40
_CALLS: Final = ("cuGraphLaunch", "cuLaunchKernel", "cuLaunchKernelEx", "command_buffer::update")


@dataclass(frozen=True)
class Kernel:
    """One execution of a kernel on the device.

    Attributes:
      name: as compiled.
      start_ns, end_ns: of the profile's clock.
      in_graph: it ran as part of a CUDA graph; `None`: the profile does not say.
    """

    name: str
    start_ns: float
    end_ns: float
    in_graph: bool | None = None


def gaps_ns(kernels: Sequence[Kernel]) -> list[float]:
    """Times in which none of the kernels ran, which are in the order of their starts.

    Example:
      >>> gaps_ns([Kernel("a", 0, 4), Kernel("b", 2, 3), Kernel("c", 9, 10)])
      [5]
    """
    gaps, end = [], kernels[0].end_ns
    for kernel in kernels[1:]:
        if kernel.start_ns > end:
            gaps.append(kernel.start_ns - end)
        end = max(end, kernel.end_ns)
    return gaps


@dataclass(frozen=True)
class Profile:
    """What a profile says.

    Attributes:
      kernels: the device's, in the order of their starts; none where the profiler sees no device, as on a CPU.
      calls: how often the host launched a graph, a kernel, or had to update a graph before it could launch it.
    """

    kernels: Sequence[Kernel]
    calls: Mapping[str, int]


def read_profile(path: str) -> Profile:
    """Reads the file that jax's profiler wrote."""
    kernels: list[Kernel] = []
    calls: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        for line in plane.lines:
            if plane.name.startswith("/host:"):
                calls.update(name for event in line.events if (name := event.name.partition(" ")[0]) in _CALLS)
            # Other lines of a device show the same time again: modules, operations, steps.
            elif line.name.startswith("Stream") or line.name == "XLA Ops":
                for event in line.events:
                    # On a GPU each event says whether it is a graph's.
                    names = {str(name) for name, _ in event.stats} if line.name.startswith("Stream") else None
                    in_graph = None if names is None else any("cuda_graph" in name for name in names)
                    kernels.append(Kernel(event.name, event.start_ns, event.start_ns + event.duration_ns, in_graph))
    return Profile(sorted(kernels, key=lambda kernel: kernel.start_ns), calls)


def summarise(profile: Profile, *, num_layers: int, steps: float, scopes: Mapping[str, str]) -> dict[str, Any]:
    """Milliseconds of a step, by class and by kernel.

    Args:
      profile: of several steps, the first and the last perhaps cut off; copies may run beside all others.
      num_layers: each step attends once a layer, which tells how many steps there are.
      steps: that were run, where no kernel attends.
      scopes: see `kernel_class`.
    """
    kernels = profile.kernels
    times: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    outside: Counter[str] = Counter()
    for kernel in kernels:
        times[kernel.name] += kernel.end_ns - kernel.start_ns
        counts[kernel.name] += 1
        outside[kernel.name] += kernel.in_graph is False
    class_of = {name: kernel_class(name, scopes) for name in times}
    attends = max((n for name, n in counts.items() if class_of[name] == "attention"), default=0)
    steps = attends / num_layers or steps
    classes: dict[str, float] = defaultdict(float)
    numbers: Counter[str] = Counter()
    for name, ns in times.items():
        classes[class_of[name]] += ns
        numbers[class_of[name]] += counts[name]
    computing = [kernel for kernel in kernels if class_of[kernel.name] != "copy"]
    gaps = gaps_ns(computing)
    span = max(kernel.end_ns for kernel in computing) - computing[0].start_ns
    known = any(kernel.in_graph is not None for kernel in kernels)
    return {
        "profiled_steps": round(steps, 2),
        "busy_ms": round((span - sum(gaps)) / 1e6 / steps, 4),
        "between_kernels_ms": round(sum(gap for gap in gaps if gap <= _SHORT_GAP_NS) / 1e6 / steps, 4),
        "longer_gaps_ms": round(sum(gap for gap in gaps if gap > _SHORT_GAP_NS) / 1e6 / steps, 4),
        "kernels_per_step": round(len(computing) / steps, 1),
        "kernels_outside_graphs_per_step": (
            round(sum(kernel.in_graph is False for kernel in computing) / steps, 1) if known else None
        ),
        "calls_per_step": {name: round(count / steps, 2) for name, count in sorted(profile.calls.items())},
        "classes_ms": {name: round(classes[name] / 1e6 / steps, 4) for name in CLASSES if classes[name]},
        "classes_kernels": {name: round(numbers[name] / steps, 1) for name in CLASSES if numbers[name]},
        "kernels": [
            {
                "name": name[:120],
                "class": class_of[name],
                "us": round(ns / 1e3 / counts[name], 2),
                "per_step": round(counts[name] / steps, 2),
                "outside_graphs_per_step": round(outside[name] / steps, 2),
            }
            for name, ns in sorted(times.items(), key=lambda item: -item[1])[:_LISTED]
        ],
    }


def measure_breakdown(
    bench: Bench, rows: int, context: int, prompts: Sequence[list[int]], scopes: Mapping[str, str]
) -> dict[str, Any]:
    """One cell: steps timed without the profiler, then as many with it.

    Args:
      bench: what all measurements need.
      rows, context: the cell.
      prompts: of at least so many rows.
      scopes: of the cell's program, see `kernel_class`.
    """
    engine, steps = bench.engine, max(min(STEPS, bench.steps), 2)
    total = 5 * steps
    requests = [request(ids, total, bench.temperature) for ids in prompts[:rows]]
    serve(engine, requests)  # the prompts are in the cache, and the programs recorded
    for each in requests:
        engine.add(*each)
    produced = engine.stats().num_generated_tokens
    _advance(engine, produced + rows * steps)
    timed = _timed(engine, rows, 2 * steps)
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level, options.host_tracer_level, options.enable_hlo_proto = 0, 2, False
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            profiled = _timed(engine, rows, steps)
        finally:
            jax.profiler.stop_trace()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        profile = read_profile(path)
    while engine.has_work:
        engine.step()
    step_ms = 1e3 * timed.wall_s * rows / timed.output_tokens
    cell = {"rows": rows, "context": context, "step_ms": round(step_ms, 4), "host_ms": timed.ms_per_step}
    if not profile.kernels:
        return cell  # a platform whose profiler sees no device
    device = summarise(profile, num_layers=bench.num_layers, steps=profiled.output_tokens / rows, scopes=scopes)
    needed = device["busy_ms"] + device["between_kernels_ms"]
    profiled_ms = 1e3 * profiled.wall_s * rows / profiled.output_tokens
    return {
        **cell,
        "profiled_step_ms": round(profiled_ms, 4),
        "idle_fraction": round(max(1 - needed / step_ms, 0.0), 4),
        "idle_fraction_profiled": round(device["longer_gaps_ms"] / (needed + device["longer_gaps_ms"]), 4),
        **device,
    }


def _advance(engine: Engine, generated: int) -> None:
    while engine.stats().num_generated_tokens < generated and engine.has_work:
        engine.step()


def _timed(engine: Engine, rows: int, steps: int) -> Run:
    """About so many decode steps of `rows` rows; how many, the output tokens tell."""
    before, start = engine.stats(), time.perf_counter()
    _advance(engine, before.num_generated_tokens + rows * steps)
    wall_s, after = time.perf_counter() - start, engine.stats()
    return Run(wall_s, after.num_generated_tokens - before.num_generated_tokens, before, after)
