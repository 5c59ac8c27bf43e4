"""Looks for copies of the page pool in compiled programs."""

import math
import re

import jax

from jpaged.pallas_kernels import PageSpec

_COPY = re.compile(r"= \w+\[([\d,]*)\]\S* (?:copy|copy-start|transpose)\(")


def pool_copies(compiled: jax.stages.Compiled, spec: PageSpec) -> list[str]:
    """The lines of the compiled HLO that copy an array as large as the pool's data or scales, whatever its shape."""
    sizes = {math.prod(shape) for shape in (spec.data_shape, spec.scales_shape) if shape is not None}
    found = []
    for line in compiled.as_text().splitlines():
        match = _COPY.search(line)
        if match and math.prod(int(n) for n in match[1].split(",") if n) in sizes:
            found.append(line.strip())
    return found
