"""What poster and reconciliation count. No label names a tenant."""

from prometheus_client import Counter, Gauge, Histogram

POSTED = Counter("tidegate_usage_events_posted_total", "Usage events posted to the ledger, each once.")
REPEATED = Counter("tidegate_usage_events_repeated_total", "Usage events offered again and not posted again.")
QUARANTINED = Counter("tidegate_usage_events_quarantined_total", "Usage events kept from billing for a person to see.")
OVERRUNS = Counter("tidegate_usage_overruns_total", "Batches of a tenant that used more than its credit had left.")
POSTING_LAG = Histogram(
    "tidegate_posting_lag_seconds",
    "Per batch: from the end of its oldest request to its commit.",
    buckets=(0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 15, 60, 300, 3600),
)
POSTING_FAILURES = Counter(
    "tidegate_posting_failures_total", "Batches that Postgres did not take; they are tried again."
)
SETTLE_FAILURES = Counter("tidegate_settle_failures_total", "Posted batches that Valkey was not told of at once.")
SPOOL_BYTES = Gauge("tidegate_spool_unposted_bytes", "Bytes in the spools of this host that are not posted yet.")
CREDIT_DRIFT_NANO = Gauge("tidegate_credit_drift_nano", "Difference between Valkey's credit figures and the ledger.")
CREDIT_REPAIRS = Counter(
    "tidegate_credit_repairs_total", "Credit figures and entries that the reconciliation put right."
)
