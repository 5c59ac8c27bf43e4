"""Tables of docs/benchmarks/serving.md, from the records of bench_serving.py, soak_serving.py and scripts/serving/.

`scripts/render_benchmarks.py` writes them. Needs the standard library alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from scripts.markdown import table
from scripts.render_memory import Record, source


def load_table(records: Sequence[Record]) -> str:
    """Latency, throughput and goodput, a row a run."""
    columns = ["Hardware", "Server, model", "Requests", "Load", "Requests/s", "Output tokens/s"]
    columns += ["TTFT p50", "p99", "TPOT p50", "p99", "ITL p99", "E2E p50", "p99"]
    columns += ["Objective kept", "Errors", "Server, us a token", "Client", "Others", "Measured"]
    rows = []
    for record in records:
        results = record.results
        if record.script != "bench_serving":
            continue
        for run in results["runs"]:
            kind = "streaming" if results["stream"] else "in one piece"
            rows.append(
                [
                    record.device if results["server_device"] in (None, "cpu") else results["server_device"],
                    f"{results['server']}, {results['model']}",
                    f"{run['requests']} of {results['lengths']}, {kind}",
                    run["load"],
                    f"{run['requests_per_s']:,.2f}",
                    f"{run['output_tokens_per_s']:,.1f}",
                    *(_ms(run, *which) for which in _COLUMNS),
                    _objective(run),
                    f"{sum(run['errors'].values())}",
                    f"{sum(cpu.values()):,.1f}" if (cpu := run.get("server_cpu_us_per_token")) else "–",
                    f"{run['client']['cpu_us_per_token']:,.1f}"
                    + (" (too slow)" if run["client"]["is_bottleneck"] else ""),
                    _others(record),
                    source(record),
                ]
            )
    return table(columns, rows, num_text=4)


_COLUMNS: Final = (
    ("ttft", "p50"),
    ("ttft", "p99"),
    ("tpot", "p50"),
    ("tpot", "p99"),
    ("itl", "p99"),
    ("e2e", "p50"),
    ("e2e", "p99"),
)


def _ms(run: Mapping[str, Any], kind: str, column: str) -> str:
    figures = run[f"{kind}_ms"]
    return "–" if figures is None else f"{figures[column]:,.1f}"


def _objective(run: Mapping[str, Any]) -> str:
    if "objective_s" not in run:
        return "–"
    wanted = ", ".join(f"{name} {seconds:g} s" for name, seconds in run["objective_s"].items())
    return f"{run['good_fraction']:.1%} ({wanted})"


def host_table(records: Sequence[Record]) -> str:
    """CPU time a token of everything but the engine."""
    columns = ["Hardware", "Streams", "HTTP", "Engine", "Together", "Not streaming, together", "Bare", "Others"]
    columns += ["Measured"]
    rows = []
    for record in records:
        if record.script != "bench_serving" or "host_cost" not in record.results:
            continue
        results = record.results["host_cost"]
        spent = {name: row["us_per_token"] for name, row in results["by_kind"].items()}
        streaming = spent["jpaged, streaming"]
        rows.append(
            [
                record.device,
                f"{results['streams']} of {results['tokens']} tokens, {results['step_ms']:g} ms a step",
                f"{streaming['server']:.1f}",
                f"{sum(streaming.values()) - streaming['server']:.1f}",
                f"{sum(streaming.values()):.1f}",
                f"{sum(spent['jpaged, in one piece'].values()):.1f}",
                f"{sum(spent['bare'].values()):.1f}",
                _others(record),
                source(record),
            ]
        )
    return table(columns, rows, num_text=2)


def flood_table(records: Sequence[Record]) -> str:
    """How long `/health` takes, a row for each thing that is sent."""
    columns = ["Hardware", "Sent", "Answers by status", "Asked", "p50", "p99", "Longest", "Others", "Measured"]
    rows = []
    for record in records:
        if record.script != "bench_serving" or "flood" not in record.results:
            continue
        for sent, figures in record.results["flood"].items():
            health = figures["health"]
            rows.append(
                [
                    record.device,
                    sent,
                    ", ".join(f"{count} x {status}" for status, count in figures["statuses"].items()),
                    f"{health['asked']:,}",
                    *(f"{health['ms'][name]:,.1f}" for name in ("p50", "p99", "max")),
                    _others(record),
                    source(record),
                ]
            )
    return table(columns, rows, num_text=3)


def offline_table(records: Sequence[Record]) -> str:
    """How much of its engine's speed a server's clients get."""
    columns = ["Hardware", "Model", "Streams", "Tokens in + out", "Engine alone, tokens/s", "Server, tokens/s", "Of it"]
    columns += ["TTFT p50", "p99", "ITL p50", "p99", "HTTP, us a token", "Engine's process", "/health p99", "Measured"]
    rows = []
    for record in records:
        if record.script != "serving/against_offline":
            continue
        r, server = record.results, record.results["server"]
        rows.append(
            [
                r["engine_device"] if r["engine_device"] != "cpu" else record.device,
                f"{r['model']}, {server['info']['dtype']}",
                f"{r['streams']}",
                f"{r['prompt_tokens']} + {r['output_tokens']}",
                f"{r['offline']['output_tokens_per_s']:,.0f}",
                f"{server['output_tokens_per_s']:,.0f}",
                f"{r['server_of_offline']:.1%}",
                *(_ms(server, *which) for which in (("ttft", "p50"), ("ttft", "p99"), ("itl", "p50"), ("itl", "p99"))),
                *(f"{server['server_cpu_us_per_token'][name]:.1f}" for name in ("server", "jpaged.engine_host")),
                f"{server['health']['ms']['p99']:.1f}",
                source(record),
            ]
        )
    return table(columns, rows, num_text=2)


def soak_table(records: Sequence[Record]) -> str:
    """What became of random requests."""
    columns = ["Hardware", "Requests", "Answered", "Refused", "Come again", "Left", "Aborted", "Compared", "Preempted"]
    columns += ["Leaked pages", "Stuck", "Faults", "Errors in the log", "Resident, MiB", "Growth, KiB"]
    columns += ["Ended in order", "Others", "Measured"]
    rows = []
    for record in _soaks(records, equality=False):
        r, outcomes = record.results, record.results["outcomes"]
        rows.append(
            [
                record.device,
                f"{r['requests']:,}",
                *(
                    f"{_count(outcomes, word):,}"
                    for word in ("answered", "refused", "told", "left", "aborted", "compared")
                ),
                f"{r['preemptions']:,}",
                f"{r['leaked_pages']}",
                f"{r['stuck']}",
                f"{r['faults']}",
                f"{r['log_faults']}",
                ", ".join(f"{name.rpartition('.')[2]} {mib[-1]:,.0f}" for name, mib in r["resident_mib"].items()),
                ", ".join(f"{kib:,.0f}" for kib in r["growth_kib_per_1000_requests"].values()),
                "yes" if r["drained_in_order"] else "no",
                _others(record),
                source(record),
            ]
        )
    return table(columns, rows)


def equality_table(records: Sequence[Record]) -> str:
    """Requests that were sent both ways."""
    columns = ["Hardware", "Requests", "Equal", "Different", "Tokens generated", "Measured"]
    return table(
        columns,
        (
            [
                record.device,
                f"{record.results['requests']:,}",
                f"{record.results['compared']:,}",
                f"{record.results['faults']}",
                f"{record.results['generated_tokens']:,}",
                source(record),
            ]
            for record in _soaks(records, equality=True)
        ),
    )


def clients_table(records: Sequence[Record]) -> str:
    """What other people's clients got."""
    columns = ["Hardware", "Model", "openai", "Checks", "Failed", "lm-eval", "Questions", "Accuracy"]
    columns += ["Largest difference", "Measured"]
    rows = []
    for record in records:
        if record.script != "serving/clients":
            continue
        checks, scored = record.results["openai"]["checks"], record.results["lm_eval"]
        rows.append(
            [
                record.device,
                record.results["model"],
                record.results["openai"]["version"],
                f"{len(checks)}",
                f"{sum(value != 'ok' for value in checks.values())}",
                *(
                    ["–"] * 4
                    if scored is None
                    else [
                        scored["version"],
                        f"{scored['questions']}",
                        f"{scored['accuracy']:.3f}",
                        f"{scored['largest_difference']:.1e}",
                    ]
                ),
                source(record),
            ]
        )
    return table(columns, rows, num_text=2)


def plans_table(records: Sequence[Record]) -> str:
    """What the launcher plans for chips that are not here."""
    columns = ["Topology", "Model", "Fits", "Models x devices each", "Weights", "All but pages", "Pages", "Of"]
    columns += ["Tokens in pages", "At once", "Measured"]
    rows = []
    for record in records:
        if record.script != "serving/plans":
            continue
        for plan in record.results["plans"]:
            rows.append(
                [
                    plan["topology"],
                    plan["model"],
                    "yes" if plan["fits"] else f"no, {plan['lacking_gb']:.2f} are lacking",
                    f"{plan['num_models']} x {plan['devices_each']}",
                    f"{plan['weights_gb']:.2f}",
                    f"{plan['all_but_pages_gb']:.2f}",
                    f"{plan['pages_gb']:.2f}" if plan["fits"] else "–",
                    f"{plan['memory_gb']:.2f}",
                    f"{plan['tokens_in_pages']:,}" if plan["fits"] else "–",
                    f"{plan['max_num_seqs']}" if plan["fits"] else "–",
                    source(record),
                ]
            )
    return table(columns, rows, num_text=3)


def _soaks(records: Sequence[Record], *, equality: bool) -> list[Record]:
    return [record for record in records if record.script == "soak_serving" and record.results["equality"] == equality]


def _count(outcomes: Mapping[str, int], word: str) -> int:
    return sum(count for outcome, count in outcomes.items() if outcome.startswith(word))


def _others(record: Record) -> str:
    """Load averages of the machine, which older records do not have."""
    found = record.results.get("load_average")
    return "–" if found is None else " to ".join(f"{average:.1f}" for average in found)


PARTS: Final[Mapping[str, Callable[[Sequence[Record]], str]]] = {
    "serving-load": load_table,
    "serving-host": host_table,
    "serving-flood": flood_table,
    "serving-offline": offline_table,
    "serving-soak": soak_table,
    "serving-equality": equality_table,
    "serving-clients": clients_table,
    "serving-plans": plans_table,
}
