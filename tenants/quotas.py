"""Pure: a caller's limits as demands on shared counters."""

from catalog.types import ServedModel
from core.demand import Demand, DemandKind
from tenants.types import Principal

RPM_WINDOW_S = 60
RATE_LIMITED = "RATE_LIMITED"
CONCURRENCY_LIMITED = "CONCURRENCY_LIMITED"


def _rate(counter: str, limit: int) -> Demand:
    return Demand(DemandKind.RATE, counter, 1, limit, RATE_LIMITED, RPM_WINDOW_S)


def _concurrency(counter: str, limit: int) -> Demand:
    return Demand(DemandKind.CONCURRENCY, counter, 1, limit, CONCURRENCY_LIMITED)


def demands(principal: Principal, model: ServedModel) -> tuple[Demand, ...]:  # noqa: ARG001 - limits per model come to this seam
    """Return what one request of `principal` takes: narrowest first, and only where there is a limit."""
    return limits(principal)


def limits(principal: Principal) -> tuple[Demand, ...]:
    """Return what a request takes whatever its model."""
    key, project, tenant = principal.key_id.hex, principal.project_id.hex, principal.tenant_id.hex
    wanted = (
        _rate(f"key:{key}:rpm", principal.key_rpm),
        _rate(f"project:{project}:rpm", principal.project_rpm),
        _concurrency(f"key:{key}:conc", principal.key_concurrency),
        _concurrency(f"project:{project}:conc", principal.project_concurrency),
        _concurrency(f"tenant:{tenant}:conc", principal.tenant_concurrency),
    )
    return tuple(demand for demand in wanted if demand.limit > 0)
