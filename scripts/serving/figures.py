"""`draw_runs`: pictures of a load test, in the style of `jpaged.plots`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.plots import Lines, Panel, save_figure
from scripts.serving.measures import latencies
from scripts.serving.record import Record

_POINTS = 200
_TITLES = {
    "ttft": "Time to the first token",
    "tpot": "Time per output token",
    "itl": "Gaps between events",
    "e2e": "Time to the end",
}


def draw_runs(path: Path, runs: Mapping[str, Sequence[Record]], summaries: Sequence[Mapping[str, Any]]) -> None:
    """Draws distributions of latencies, what went on over time, and, of several runs, how latency grows with the load.

    Args:
      path: a PNG file.
      runs: the records of each run, by its name, such as "4 requests/s".
      summaries: of the same runs, by `summarise`.

    Raises:
      ConfigError: it cannot be drawn or written.
    """
    panels: list[Panel] = [panel for kind in _TITLES if (panel := _distribution(runs, kind)) is not None]
    panels += [_tokens_over_time(runs), _requests_over_time(runs)]
    if len(runs) > 1:
        panels += _load_curves(summaries)
    save_figure(path, *panels)


def _distribution(runs: Mapping[str, Sequence[Record]], kind: str) -> Panel | None:
    series = {}
    for name, records in runs.items():
        if values := latencies(records)[kind]:
            parts = np.linspace(0, 100, _POINTS)
            series[name] = ((1e3 * np.percentile(values, parts)).tolist(), parts.tolist())
    if not series:
        return None
    return Lines(
        series=series, xlabel="ms", ylabel=f"% of {'events' if kind == 'itl' else 'requests'}", title=_TITLES[kind]
    )


def _tokens_over_time(runs: Mapping[str, Sequence[Record]]) -> Panel:
    series = {}
    for name, records in runs.items():
        good = [record for record in records if record.error is None]
        begin_s = min(record.due_s for record in records)
        # An event stands for as many tokens as its request's events do on average.
        times = [t - begin_s for record in good for t in record.event_s]
        weights = [record.num_output_tokens / len(record.event_s) for record in good for _ in record.event_s]
        edges = np.linspace(0, max(times, default=1.0), min(_POINTS, 60) + 1)
        counts, _ = np.histogram(times, edges, weights=weights)
        series[name] = (edges[:-1].tolist(), (counts / (edges[1] - edges[0])).tolist())
    return Lines(series=series, xlabel="s", ylabel="output tokens/s", title="Throughput over time", steps=True)


def _requests_over_time(runs: Mapping[str, Sequence[Record]]) -> Panel:
    series = {}
    for name, records in runs.items():
        begin_s = min(record.due_s for record in records)
        changes = sorted([(r.sent_s - begin_s, 1) for r in records] + [(r.end_s - begin_s, -1) for r in records])
        times, steps = zip(*changes, strict=True)
        series[name] = (list(times), np.cumsum(steps).tolist())
    return Lines(series=series, xlabel="s", ylabel="requests", title="Sent and not answered yet", steps=True)


def _load_curves(summaries: Sequence[Mapping[str, Any]]) -> list[Panel]:
    rates = [summary["requests_per_s"] for summary in summaries]
    panels: list[Panel] = []
    for kind in ("ttft", "tpot"):
        rows = [summary[f"{kind}_ms"] for summary in summaries]
        if all(rows):
            series = {name: (rates, [row[name] for row in rows]) for name in ("p50", "p90", "p99")}
            panels.append(Lines(series=series, xlabel="requests/s", ylabel="ms", title=f"{_TITLES[kind]} by load"))
    return panels
