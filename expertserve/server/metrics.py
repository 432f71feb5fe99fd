"""What /metrics shows.

Owns the server's own counters and histograms, and reads the engine's and the streamer's plain counters when scraped.
One registry an app, never the process-wide one, so that two apps in one process do not share numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from expertserve.engine.request import Usage
from expertserve.server.state import ServerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATUSES = ("loading", "ready", "failed", "draining")
# Streaming from a disk spans milliseconds to minutes, so the buckets do too.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class _StateCollector(Collector):
    """Numbers that others own, read at scrape time."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[GaugeMetricFamily]:
        status = GaugeMetricFamily("expertserve_status", "1 for the state the server is in.", labels=["status"])
        for name in _STATUSES:
            status.add_metric([name], float(name == self._state.status))
        yield status
        model = self._state.loaded
        if model is None:
            return
        yield from _gauges("expertserve_engine_", "Of the engine: ", model.engine.snapshot())
        snapshot = model.stream_snapshot()
        yield from _gauges("expertserve_stream_", "Of the expert streamer: ", snapshot.get("about", {}))
        yield from _phase_gauges(snapshot.get("phases", {}))


def _gauges(prefix: str, about: str, values: Mapping[str, object]) -> Iterator[GaugeMetricFamily]:
    for name, value in values.items():
        if isinstance(value, int | float):
            yield GaugeMetricFamily(prefix + name, about + name.replace("_", " "), value=float(value))


def _phase_gauges(phases: Mapping[str, Mapping[str, float]]) -> Iterator[GaugeMetricFamily]:
    names = dict.fromkeys(name for counters in phases.values() for name in counters)
    for name in names:
        about = "Of the expert streamer: " + name.replace("_", " ")
        family = GaugeMetricFamily("expertserve_stream_" + name, about, labels=["phase"])
        for phase, counters in phases.items():
            family.add_metric([phase], float(counters.get(name, 0)))
        yield family


class ServerMetrics:
    """Counters that the handlers bump."""

    def __init__(self, state: ServerState) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_StateCollector(state))
        registry = self.registry
        self.http_requests = Counter(
            "expertserve_http_requests", "HTTP requests answered.", ["path", "status"], registry=registry
        )
        self.request_s = Histogram(
            "expertserve_request_seconds", "From request to end of response.", registry=registry, buckets=_SECONDS
        )
        self.requests_running = Gauge("expertserve_requests_running", "Generating requests.", registry=registry)
        self.choices_finished = Counter(
            "expertserve_choices_finished", "Ended sequences by reason.", ["reason"], registry=registry
        )
        self.refused = Counter(
            "expertserve_requests_refused", "Requests refused with 429, by limit.", ["limit"], registry=registry
        )
        self.prompt_tokens = Counter(
            "expertserve_prompt_tokens", "Prompt tokens of finished choices.", registry=registry
        )
        self.cached_tokens = Counter(
            "expertserve_cached_tokens", "Prompt tokens that an earlier prefix spared.", registry=registry
        )
        self.completion_tokens = Counter("expertserve_completion_tokens", "Generated tokens.", registry=registry)
        self.first_token_s = Histogram(
            "expertserve_time_to_first_token_seconds",
            "From submission to first token.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.inter_token_s = Histogram(
            "expertserve_inter_token_seconds", "Between two tokens.", registry=registry, buckets=_SECONDS
        )

    def count_finished(self, reason: str, usage: Usage) -> None:
        self.choices_finished.labels(reason).inc()
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.cached_tokens.inc(usage.cached_tokens)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
