"""What the scheduler says of itself at this gateway, as Prometheus text. Labels are few; names: docs/metrics.md."""

from collections.abc import Iterable, Iterator, Mapping

from api.inference.ports import Admission

PREFIX = "tidegate_admission_"


def family(name: str, kind: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    """Yield a family's lines: its type, then a line per sample of labels and value."""
    yield f"# TYPE {PREFIX}{name} {kind}"
    for labels, value in samples:
        named = ",".join(f'{label}="{text}"' for label, text in labels.items())
        yield f"{PREFIX}{name}{{{named}}} {value:g}" if named else f"{PREFIX}{name} {value:g}"


def lines(admission: Admission) -> Iterator[str]:
    """Yield all of it."""
    drift = admission.drift
    yield from family("recounts_total", "counter", [({}, drift.rounds)])
    yield from family("drift", "gauge", [({"kind": kind}, off) for kind, off in drift.last.items()])
    yield from family("drift_total", "counter", [({"kind": kind}, off) for kind, off in drift.total.items()])
