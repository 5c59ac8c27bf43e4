"""Draws the records of the kernels on an H200: how many times as fast as the best peer each cell is.

    python scripts/plot_kernels.py

Reads h200-kernels.json and h200-prefill.json in docs/benchmarks, and writes h200-kernels.png there. Needs matplotlib.
"""

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"


def cells_of(decode: list[dict[str, Any]], prefill: list[dict[str, Any]]) -> dict[str, list[tuple[str, float]]]:
    """For each panel: a cell's label, and its ratio; pages of 16 alone.

    Example:
      >>> row = {"heads": 9, "kv_heads": 3, "head_dim": 64, "page_size": 16, "rows": 1, "kv_len": 1024}
      >>> cells_of([{**row, "times_best_peer": 1.3}], [])
      {'decode, 9/3 x 64': [('1 x 1,024', 1.3)]}
    """
    panels: dict[str, list[tuple[str, float]]] = {}
    for r in decode:
        if r["page_size"] == 16:
            name = f"decode, {r['heads']}/{r['kv_heads']} x {r['head_dim']}"
            panels.setdefault(name, []).append((f"{r['rows']} x {r['kv_len']:,}", r["times_best_peer"]))
    for r in prefill:
        if r["page_size"] == 16 and r["times_fa3"] is not None:
            name = f"prefill, {r['heads']}/{r['kv_heads']} x {r['head_dim']}"
            label = f"{r['rows']} x {r['new_tokens']:,} @ {r['kv_len']:,}"
            panels.setdefault(name, []).append((label, r["times_fa3"]))
    return panels


def main() -> None:
    if len(sys.argv) > 1:
        sys.exit("takes no arguments; it reads and writes docs/benchmarks")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [
        json.loads((FOLDER / f"h200-{name}.json").read_text(encoding="utf-8")) for name in ("kernels", "prefill")
    ]
    panels = cells_of(records[0]["results"]["decode"], records[1]["results"]["prefill"])
    columns = 3
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(12, 3.4 * rows), layout="constrained", squeeze=False)
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    for ax, (name, cells) in zip(axes.flat, panels.items(), strict=False):
        labels, ratios = zip(*cells, strict=True)
        ax.barh(labels, ratios, color=["#00916e" if ratio >= 1 else "#d95f02" for ratio in ratios])
        ax.axvline(1, color="black", linewidth=0.8)
        ax.invert_yaxis()
        ax.set_title(name, fontsize=10)
        ax.tick_params(labelsize=8)
        ax.set_xlabel("times as fast as the best peer", fontsize=8)
    target = FOLDER / "h200-kernels.png"
    figure.savefig(target, dpi=110)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
