"""``/metrics`` for Prometheus."""

from collections.abc import Iterator

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from colossal._src.inference.online import EngineThread

_GAUGES = {
    "running": ("num_running", "Sequences that have pages."),
    "waiting": ("num_waiting", "Sequences that wait for room."),
    "pages": ("num_pages", "Pages of keys and values."),
    "pages_used": ("num_used_pages", "Pages that sequences own."),
    "pages_cached": ("num_cached_pages", "Pages that no sequence owns, and that hold the tokens of an earlier one."),
}
_COUNTERS = {
    "steps": ("num_steps", "Steps of the engine."),
    "prompt_tokens": ("num_prompt_tokens", "Tokens of sequences when they were admitted."),
    "prefix_hit_tokens": ("num_hit_tokens", "Of these, tokens that were not computed because pages held them."),
    "generated_tokens": ("num_generated_tokens", "Tokens of all outputs."),
    "preempted": ("num_preempted", "How often a sequence lost its pages to an earlier one."),
}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class _EngineCollector:
    """Reads the statistics of the engine when they are asked for."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread

    def collect(self) -> Iterator[Metric]:
        statistics = self._thread.statistics
        for name, (field, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"colossal_{name}", text, getattr(statistics, field))
        for name, (field, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"colossal_{name}", text, getattr(statistics, field))


def metrics_router(thread: EngineThread) -> APIRouter:
    """Make the route, with a registry of its own: there may be several servers in a process."""
    router = APIRouter()
    registry = CollectorRegistry()
    registry.register(_EngineCollector(thread))
    first_token = Histogram(
        "colossal_time_to_first_token_seconds",
        "From the arrival of a request to its first token.",
        buckets=_SECONDS,
        registry=registry,
    )
    thread.on_first_token = first_token.observe

    @router.get("/metrics")
    async def metrics() -> Response:
        """Count requests, tokens and pages."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router
