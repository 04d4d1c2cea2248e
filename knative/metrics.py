"""The controller's figures, served by the control plane under ``/api/metrics/controller``."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LOAD_BUCKETS_S = (0.5, 1, 2, 5, 10, 20, 45, 90, 180)

PHASE_BUCKETS_S = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 20, 45, 90, 180, 600, 1800)


@dataclass(frozen=True, slots=True)
class ControllerMetrics:
    """No tenant and no key in labels; deployments are few."""

    term: Gauge
    deployments: Gauge
    starts: Counter
    failures: Counter
    load_seconds: Histogram
    wake_seconds: Histogram
    postgres_away: Counter


def controller_metrics(registry: CollectorRegistry) -> ControllerMetrics:
    return ControllerMetrics(
        Gauge("tidegate_controller_term", "Term of this leader; 0 while it stands by.", registry=registry),
        Gauge("tidegate_deployments", "Deployments by state.", ("state",), registry=registry),
        Counter("tidegate_engine_starts_total", "Engines started.", registry=registry),
        Counter("tidegate_engine_failures_total", "Engines that ended by themselves or hung.", registry=registry),
        Histogram("tidegate_engine_load_seconds", "From start to ready.", buckets=LOAD_BUCKETS_S, registry=registry),
        Histogram(
            "tidegate_wake_seconds",
            "Of a start by phase: decide, fetch, schedule, load, first_token.",
            ("phase",),
            buckets=PHASE_BUCKETS_S,
            registry=registry,
        ),
        Counter("tidegate_controller_postgres_away_total", "Looks at Postgres in vain.", registry=registry),
    )
