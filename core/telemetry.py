"""Prometheus metrics of the cold processes (api, poster, controller, worker); the gateway keeps arrays of its own.

Each process has a registry of its own, so nothing is registered at import. A process that serves no HTTP writes its
figures to a file beside the others, and the control plane serves the file.
"""

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from core.settings import Settings

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
STALE_S = 60.0
_PROCESS_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")


def create_registry() -> CollectorRegistry:
    """Return a registry with the figures that every process has: CPU, memory, garbage collection."""
    # no second series for every counter, of its birth
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no annotation here
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


@dataclass(frozen=True, slots=True)
class HttpMetrics:
    """Of a process that serves HTTP. Labels are route templates, never paths, tenants or keys."""

    registry: CollectorRegistry
    requests: Counter
    seconds: Histogram


def http_metrics(registry: CollectorRegistry) -> HttpMetrics:
    return HttpMetrics(
        registry,
        Counter(
            "tidegate_api_requests_total",
            "Requests of the control plane by route, method and status.",
            ("route", "method", "status"),
            registry=registry,
        ),
        Histogram(
            "tidegate_api_request_seconds",
            "Time to the end of the answer.",
            ("route", "method"),
            buckets=SECONDS_BUCKETS,
            registry=registry,
        ),
    )


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """Of the worker's tasks."""

    tasks: Counter
    seconds: Histogram
    outbox_open: Gauge
    outbox_dead: Gauge


def worker_metrics(registry: CollectorRegistry) -> WorkerMetrics:
    return WorkerMetrics(
        Counter("tidegate_tasks_total", "Tasks by name and outcome.", ("task", "outcome"), registry=registry),
        Histogram("tidegate_task_seconds", "Time of a task.", ("task",), buckets=SECONDS_BUCKETS, registry=registry),
        Gauge("tidegate_outbox_open", "Outbox rows that wait for their effect.", registry=registry),
        Gauge("tidegate_outbox_dead", "Outbox rows given up after the last attempt.", registry=registry),
    )


class TaskFigures:
    """What tasks themselves measure, each figure registered when it is first set. No label, so no tenant."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}

    def set(self, name: str, text: str, value: float) -> None:
        """Set ``tidegate_<name>``; `text` is its help."""
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = Gauge(f"tidegate_{name}", text, registry=self._registry)
        gauge.set(value)


def render(registry: CollectorRegistry) -> bytes:
    """Return the figures in Prometheus' text format."""
    return generate_latest(registry)


def _folder(settings: Settings) -> Path:
    return settings.home / "metrics"


def write_snapshot(registry: CollectorRegistry, settings: Settings, process: str) -> None:
    """Replace the process's file of figures; whole or not at all."""
    folder = _folder(settings)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = folder / f".{process}.{os.getpid()}"
    draft.write_bytes(render(registry))
    draft.replace(folder / f"{process}.prom")


def read_snapshot(settings: Settings, process: str, now_s: Callable[[], float]) -> bytes | None:
    """Return another process's figures; None when it wrote none lately or is not known.

    Args:
        settings: names the home.
        process: a plain name, nothing with a slash.
        now_s: wall time in seconds since the epoch, as files have it.
    """
    if _PROCESS_NAME.fullmatch(process) is None:
        return None
    path = _folder(settings) / f"{process}.prom"
    with contextlib.suppress(FileNotFoundError):
        if now_s() - path.stat().st_mtime <= STALE_S:
            return path.read_bytes()
    return None
