"""What the scheduler does at this gateway, as Prometheus text. Labels are few; names: docs/metrics.md."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from api.inference.metrics import Histogram
from api.inference.ports import Admission
from core.errors import PlatformError
from core.tiers import Tier

PREFIX = "tidegate_admission_"
WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
# Codes of requests that admission refused; a model that is busy says why.
REFUSED = frozenset(
    {
        *("RATE_LIMITED", "TOKENS_LIMITED", "CONCURRENCY_LIMITED", "BUDGET_EXCEEDED", "INSUFFICIENT_CREDIT"),
        *("MODEL_BUSY", "PREEMPTED", "SERVICE_UNAVAILABLE"),
    }
)


class AdmissionMetrics:
    """Counts by tier and public name of the model. A request that did not wait costs one addition."""

    def __init__(self) -> None:
        self.grants: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(Tier))  # by model, then tier
        self.refusals: dict[tuple[Tier, str, str], int] = {}
        self.waits: dict[tuple[Tier, str], Histogram] = {}  # of those that were granted a place after waiting for it

    def waited(self, tier: Tier, model: str, queue_us: int) -> None:
        """Count how long a place was waited for."""
        waits = self.waits.get((tier, model))
        if waits is None:
            waits = self.waits[tier, model] = Histogram(WAIT_BUCKETS_S)
        waits.observe(queue_us / 1_000_000)

    def refused(self, tier: Tier, model: str, error: PlatformError) -> None:
        """Count a request that got no place or lost it, by code and reason; other errors are not admission's."""
        if error.code in REFUSED:
            key = (tier, model, str(error.fields.get("reason") or error.code.lower()))
            self.refusals[key] = self.refusals.get(key, 0) + 1

    def lines(self, admission: Admission) -> Iterator[str]:
        """Yield all of it, and what the scheduler itself counts."""
        yield from family("waiting", "gauge", [({}, admission.waiting)])
        grants = [(_labels(tier, model), of[tier]) for model, of in sorted(self.grants.items()) for tier in Tier]
        yield from family("grants_total", "counter", grants)
        refusals = [
            (_labels(tier, model) | {"reason": why}, n) for (tier, model, why), n in sorted(self.refusals.items())
        ]
        yield from family("refusals_total", "counter", refusals)
        yield f"# TYPE {PREFIX}wait_seconds histogram"
        for (tier, model), waits in sorted(self.waits.items()):
            yield from waits.lines(f"{PREFIX}wait_seconds", _text(_labels(tier, model)) + ",")
        yield from family("blocks", "gauge", [({}, len(admission.blocks))])
        yield from family("block_grants_total", "counter", [({}, admission.blocks.granted)])
        drift = admission.drift
        yield from family("recounts_total", "counter", [({}, drift.rounds)])
        yield from family("drift", "gauge", [({"kind": kind}, off) for kind, off in drift.last.items()])
        yield from family("drift_total", "counter", [({"kind": kind}, off) for kind, off in drift.total.items()])


def family(name: str, kind: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    """Yield a family's lines: its type, then a line per sample of labels and value."""
    yield f"# TYPE {PREFIX}{name} {kind}"
    for labels, value in samples:
        named = _text(labels)
        yield f"{PREFIX}{name}{{{named}}} {value:.15g}" if named else f"{PREFIX}{name} {value:.15g}"


def _labels(tier: Tier, model: str) -> dict[str, str]:
    return {"tier": tier.label, "model": model}


def _text(labels: Mapping[str, str]) -> str:
    return ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
