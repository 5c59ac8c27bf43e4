"""CPU time and memory of a process and of its children, out of /proc. Linux only."""

import os
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def process_tree(process_id: int) -> list[int]:
    """A process and all its descendants that live, parents first."""
    tree = [process_id]
    for one in tree:
        try:
            tasks = list(Path(f"/proc/{one}/task").iterdir())
            tree += [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:  # it ended while we looked
            continue
    return tree


def cpu_s(process_id: int) -> float:
    """CPU seconds that all threads of a process took so far, in steps of 10 ms.

    Raises:
      OSError: there is no such process.
    """
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def name_of(process_id: int) -> str:
    """What a process runs: its module or script, or else its program."""
    words = Path(f"/proc/{process_id}/cmdline").read_bytes().rstrip(b"\0").decode("utf-8", "replace").split("\0")
    if "-m" in words[1:-1]:
        return words[words.index("-m") + 1]
    scripts = [Path(word).name for word in words[1:] if not word.startswith("-")]
    if "-c" in words[1:]:  # multiprocessing's children say it in the program text
        return "multiprocessing"
    return (scripts[:1] or [Path(words[0]).name])[0]


class CpuMeter:
    """What each process of a tree takes between two moments.

    Args:
      process_id: of the tree's root.
    """

    def __init__(self, process_id: int) -> None:
        self._before = {one: cpu_s(one) for one in process_tree(process_id)}
        self._root = process_id

    def spent_s(self) -> dict[str, float]:
        """CPU seconds since it was made, by process; the root is "server"."""
        spent: dict[str, float] = {}
        for one in process_tree(self._root):
            try:
                name = "server" if one == self._root else name_of(one)
                seconds = cpu_s(one) - self._before.get(one, 0.0)
            except OSError:
                continue
            spent[name] = spent.get(name, 0.0) + seconds
        return spent
