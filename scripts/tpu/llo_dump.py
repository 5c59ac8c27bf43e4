"""Compiles for a TPU with libtpu's dumps on, and reads what it wrote about each Pallas kernel.

libtpu reads its flags once, when it is loaded: call `start_dumps` before anything asks for a topology.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .llo import Program, parse_program

_PASSES: Final = "post-ra|pre-delay|final_bundles"
_FILE = re.compile(r"\d+-(?P<kernel>.+)-\d+-(?P<what>post-ra|packed-bundles-post-ra|pre-delay_.*|final_bundles)\.txt")


@dataclass(frozen=True)
class KernelDump:
    """A kernel as compiled.

    Attributes:
      name: as in the HLO.
      program: its bundles, one a cycle.
      code_bundles: bundles of the final code, where a delay of several cycles is one.
      vmem_bytes, smem_bytes: of the buffers that it asks for.
    """

    name: str
    program: Program
    code_bundles: int
    vmem_bytes: int
    smem_bytes: int


def start_dumps(folder: Path) -> None:
    """Makes libtpu, once it is loaded, write its dumps into `folder`."""
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={_PASSES}"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()


def compile_kernels(lowered: Any, folder: Path, *, delay_slots: int) -> tuple[Any, list[KernelDump]]:
    """Compiles, and reads the dumps of the Pallas kernels in the program; the folder is emptied.

    Raises:
      ValueError: no kernel was dumped, or in another format.
    """
    for old in folder.iterdir():
        old.unlink()
    compiled = lowered.compile()
    custom_calls = set(re.findall(r"%([\w.-]+) = [^\n]* custom-call\([^\n]*tpu_custom_call", compiled.as_text() or ""))
    files: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if match and match["kernel"] in custom_calls:
            files.setdefault(match["kernel"], {})[match["what"].partition("_hlo")[0]] = path
    dumps = []
    for name, parts in files.items():
        missing = {"post-ra", "packed-bundles-post-ra", "pre-delay", "final_bundles"} - set(parts)
        if missing:
            raise ValueError(f"libtpu wrote no {', '.join(sorted(missing))} of {name}; expected that of 0.0.42")
        program = parse_program(
            parts["packed-bundles-post-ra"].read_text(), parts["pre-delay"].read_text(), delay_slots
        )
        code = re.findall(r"^ *(?:0x[0-9a-f]+|0)\s*[A-Z, ]*:", parts["final_bundles"].read_text(), re.MULTILINE)
        vmem, smem = (_allocated(parts["post-ra"].read_text(), space) for space in ("vmem", "smem"))
        dumps.append(KernelDump(name, program, len(code), vmem, smem))
    if not dumps:
        raise ValueError(
            f"no dump of a Pallas kernel among {len(list(folder.iterdir()))} files; is one in the program?"
        )
    return compiled, dumps


def _allocated(text: str, space: str) -> int:
    """Bytes of the buffers that a kernel asks for; slots of spilled registers, which share memory, are left out."""
    sizes = re.findall(
        rf"^ *#allocation\S+ \[.*space={space}, size = (0x[0-9a-f]+)(?!.*spill)", text, re.MULTILINE | re.IGNORECASE
    )
    return sum(int(size, 16) for size in sizes)
