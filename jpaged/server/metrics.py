"""`/metrics`: what the engine reports and what the server counts, in Prometheus' words. The names are vLLM's."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.process_collector import ProcessCollector

from jpaged.engine_client import EngineInfo, EngineReport
from jpaged.metrics import HistogramSnapshot

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

# `EngineStats` -> name and meaning.
_GAUGES: Final = {
    "num_running": ("num_requests_running", "Sequences that hold pages."),
    "num_waiting": ("num_requests_waiting", "Requests that wait for pages, new or preempted."),
    "pages_free": ("pages_free", "Pages that hold nothing."),
    "pages_cached": ("pages_cached", "Pages that nobody holds, kept for prompts that begin alike."),
    "pages_pinned": ("pages_pinned", "Pages of pinned prefixes."),
}
_COUNTERS: Final = {
    "num_queried_tokens": ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "num_cached_tokens": ("prefix_cache_hits", "Those of them that were found."),
    "num_preemptions": ("num_preemptions", "Times a request lost its pages."),
    "num_swaps": ("num_swaps", "Those of them that moved pages to the host."),
    "num_generated_tokens": ("generation_tokens", "Output tokens."),
    "num_guessing_rows": ("spec_decode_num_drafts", "Rows that guessed tokens ahead."),
    "num_guesses": ("spec_decode_num_draft_tokens", "Tokens that they guessed."),
    "num_hits": ("spec_decode_num_accepted_tokens", "Those of them that came true."),
    "num_steps": ("engine_steps", "Steps of the engine."),
    "num_evicted_pages": ("evicted_pages", "Cached pages that were given out for other contents."),
    "num_compilations": ("compilations", "Programs that were compiled."),
}


class ServerMetrics:
    """What the server itself counts. Used by one event loop.

    Attributes:
      responses: by (path, status).
      num_active: requests between their headers and the end of the answer.
    """

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        self.num_active = 0


def render_metrics(
    info: EngineInfo | None,
    report: EngineReport | None,
    server: ServerMetrics,
    *,
    up: bool,
    report_age_s: float | None,
    model: str,
    rejections: Counter[str],
    num_at_door: int,
    vllm_names: bool,
) -> bytes:
    """The exposition.

    Args:
      info: of the engine; `None` until it was ready for the first time.
      report: of the engine; `None` while it does not serve, or does not answer.
      server: the server's own counters.
      up: whether the engine serves.
      report_age_s: how old the report is.
      model: label of every metric of the engine.
      rejections: refused requests, by reason.
      num_at_door: requests that are being read, templated and tokenized.
      vllm_names: every metric under `vllm:` too.
    """
    families = [*_server_families(server, rejections, num_at_door, up=up)]
    if report_age_s is not None:
        families.append(
            GaugeMetricFamily(
                "engine_report_age_seconds",
                "How old the engine's figures are: it may be too busy to say.",
                report_age_s,
            )
        )
    if info is not None:
        families.append(_cache_config(info))
    if report is not None:
        families += _engine_families(report, model)
    registry = CollectorRegistry()
    registry.register(_Families(families, ("jpaged:", "vllm:") if vllm_names else ("jpaged:",)))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Families:
    """Families under each prefix, for one registry."""

    def __init__(self, families: Iterable[Metric], prefixes: Iterable[str]) -> None:
        self._families, self._prefixes = list(families), list(prefixes)

    def collect(self) -> Iterator[Metric]:
        for prefix in self._prefixes:
            for family in self._families:
                named = Metric(prefix + family.name, family.documentation, family.type)
                for sample in family.samples:
                    named.add_sample(prefix + sample.name, sample.labels, sample.value)
                yield named


def _server_families(
    server: ServerMetrics, rejections: Counter[str], num_at_door: int, *, up: bool
) -> Iterator[Metric]:
    yield GaugeMetricFamily("engine_up", "1 while the engine serves.", value=float(up))
    yield GaugeMetricFamily(
        "server_load", "Requests between their headers and the end of the answer.", server.num_active
    )
    yield GaugeMetricFamily("num_requests_at_door", "Requests that are being read, checked and tokenized.", num_at_door)
    rejected = CounterMetricFamily("admission_rejections", "Requests that were told to come again.", labels=["reason"])
    for reason in ("draining", "key_limit", "queue_full", "engine_not_ready"):
        rejected.add_metric((reason,), rejections[reason])
    yield rejected
    responses = CounterMetricFamily("http_responses", "Answers, by path and status.", labels=["path", "status"])
    for (path, status), count in sorted(server.responses.items()):
        responses.add_metric((path, f"{status}"), count)
    yield responses


def _cache_config(info: EngineInfo) -> Metric:
    values = {
        "page_size": info.page_size,
        "num_pages": info.num_pages,
        "dtype": info.dtype,
        "prefix_cache": info.prefix_cache,
        "implementation": info.implementation,
        "device": info.device,
    }
    return InfoMetricFamily("cache_config", "The page pool.", {name: f"{value}" for name, value in values.items()})


def _engine_families(report: EngineReport, model: str) -> Iterator[Metric]:
    stats, labels = report.stats, {"names": ["model_name"], "values": (model,)}

    def gauge(name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, about, labels=labels["names"])
        family.add_metric(labels["values"], value)
        return family

    def counter(name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(name, about, labels=labels["names"])
        family.add_metric(labels["values"], value)
        return family

    for field, (name, about) in _GAUGES.items():
        yield gauge(name, about, getattr(stats, field))
    waiting = GaugeMetricFamily(
        "num_requests_waiting_by_reason", "Requests that wait, by why.", labels=["model_name", "reason"]
    )
    paused = report.is_paused
    waiting.add_metric((model, "capacity"), 0 if paused else stats.num_waiting)
    waiting.add_metric((model, "paused"), stats.num_waiting if paused else 0)
    yield waiting
    yield gauge(
        "kv_cache_usage_perc", "Used part of the pages, 1 is all.", stats.now.pages_used / (stats.num_pages - 1)
    )
    yield gauge(
        "kv_cache_wasted_fraction", "Part of the used pages' token slots that is empty.", stats.now.wasted_fraction
    )
    for field, (name, about) in _COUNTERS.items():
        yield counter(name, about, getattr(stats, field))
    yield counter("prompt_tokens", "Prompt tokens of requests that ended.", report.num_prompt_tokens)
    yield counter("prompt_tokens_cached", "Those of them found in the prefix cache.", report.num_cached_prompt_tokens)
    yield counter(
        "refused_requests", "Requests that were taken and refused for the form of their output.", report.num_refused
    )
    yield counter("corrupted_requests", "Requests that ended with an error.", report.finished.get("error", 0))
    yield counter("engine_restarts", "Times the engine was replaced after a failure.", report.num_restarts)
    yield gauge("engine_paused", "1 while the engine is paused.", float(report.is_paused))
    ended = CounterMetricFamily("request_success", "Requests that ended.", labels=["model_name", "finished_reason"])
    for reason in ("stop", "length", "abort", "error"):
        ended.add_metric((model, reason), report.finished.get(reason, 0))  # type: ignore[call-overload]
    yield ended
    for name, snapshot in report.histograms.items():
        yield _histogram(name, snapshot, labels)


def _histogram(name: str, snapshot: HistogramSnapshot, labels: dict[str, Any]) -> Metric:
    about = name.replace("_", " ").capitalize() + "."
    family = HistogramMetricFamily(name, about, labels=labels["names"])
    bounds = [f"{float(bound)}" for bound in snapshot.bounds] + ["+Inf"]
    family.add_metric(labels["values"], list(zip(bounds, snapshot.cumulative, strict=True)), snapshot.sum)
    return family
