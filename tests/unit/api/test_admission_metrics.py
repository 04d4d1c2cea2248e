"""What a gateway tells of its admission, by tier and model."""

from api.inference.admission_metrics import AdmissionMetrics
from core.errors import ErrorKind, PlatformError
from core.tiers import Tier
from core.waits import Wait
from scheduler import refusals
from tests.factories.gateway import FakeAdmission


def test_grants_waits_and_refusals_by_tier_and_model() -> None:
    metrics, admission = AdmissionMetrics(), FakeAdmission()
    admission.waiting = 3
    metrics.grants["small"][Tier.PRIORITY] += 2
    metrics.grants['a "b"'][Tier.BATCH] += 1
    metrics.waited(Tier.PRIORITY, "small", 300_000)
    metrics.refused(Tier.BATCH, "small", refusals.busy("small", 4, "too_late", Wait(4, 64, 0, 7)))
    metrics.refused(Tier.STANDARD, "small", refusals.no_credit())
    metrics.refused(Tier.STANDARD, "small", PlatformError("UPSTREAM_ERROR", ErrorKind.UPSTREAM, "It failed."))
    lines = list(metrics.lines(admission))
    for line in (
        "tidegate_admission_waiting 3",
        'tidegate_admission_grants_total{tier="priority",model="small"} 2',
        'tidegate_admission_grants_total{tier="batch",model="a \\"b\\""} 1',
        'tidegate_admission_refusals_total{tier="batch",model="small",reason="too_late"} 1',
        'tidegate_admission_refusals_total{tier="standard",model="small",reason="insufficient_credit"} 1',
        'tidegate_admission_wait_seconds_bucket{tier="priority",model="small",le="0.25"} 0',
        'tidegate_admission_wait_seconds_bucket{tier="priority",model="small",le="0.5"} 1',
        'tidegate_admission_wait_seconds_sum{tier="priority",model="small"} 0.300000',
        'tidegate_admission_wait_seconds_count{tier="priority",model="small"} 1',
        'tidegate_admission_drift{kind="global"} 0',
    ):
        assert line in lines
    assert not any("upstream" in line for line in lines)
