"""What the poster and its reconciliation count. No label names a tenant."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LAG_BUCKETS = (0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 15, 60, 300, 3600)


@dataclass(frozen=True, slots=True)
class PosterMetrics:
    """See the help texts in `poster_metrics`."""

    posted: Counter
    repeated: Counter
    quarantined: Counter
    overruns: Counter
    posting_lag: Histogram
    posting_failures: Counter
    settle_failures: Counter
    spool_bytes: Gauge
    drift_nano: Gauge
    repairs: Counter


def poster_metrics(registry: CollectorRegistry) -> PosterMetrics:
    def counter(name: str, text: str) -> Counter:
        return Counter(f"tidegate_{name}_total", text, registry=registry)

    return PosterMetrics(
        posted=counter("usage_events_posted", "Usage events posted to the ledger, each once."),
        repeated=counter("usage_events_repeated", "Usage events offered again and not posted again."),
        quarantined=counter("usage_events_quarantined", "Usage events kept from billing for a person to see."),
        overruns=counter("usage_overruns", "Batches of a tenant that used more than its credit had left."),
        posting_lag=Histogram(
            "tidegate_posting_lag_seconds",
            "Per batch: from the end of its oldest request to its commit.",
            buckets=LAG_BUCKETS,
            registry=registry,
        ),
        posting_failures=counter("posting_failures", "Batches that Postgres did not take; they are tried again."),
        settle_failures=counter("settle_failures", "Posted batches that Valkey was not told of at once."),
        spool_bytes=Gauge(
            "tidegate_spool_unposted_bytes", "Bytes in the spools of this host not posted yet.", registry=registry
        ),
        drift_nano=Gauge(
            "tidegate_credit_drift_nano",
            "By how much Valkey's credit figures were off at the last comparison.",
            registry=registry,
        ),
        repairs=counter("credit_repairs", "Credit figures and entries that the reconciliation put right."),
    )
