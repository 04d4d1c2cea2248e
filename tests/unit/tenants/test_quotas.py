"""A caller's limits as demands."""

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from catalog.types import DeploymentKind, EngineKind, ServedModel
from core.demand import Demand, DemandKind
from core.money import Currency
from core.tiers import Tier
from tenants.quotas import demands
from tenants.types import Principal

MODEL = ServedModel(
    name="m",
    model_id=UUID(int=1),
    version_id=UUID(int=2),
    deployment_id=UUID(int=3),
    kind=DeploymentKind.LOCAL,
    engine=EngineKind.SIMULATOR,
    upstream_model="m",
    context_max=4096,
    default_max_tokens=256,
    endpoints=frozenset({"chat"}),
)


def _principal(key_rpm: int, project_rpm: int, key_conc: int, project_conc: int, tenant_conc: int) -> Principal:
    return Principal(
        tenant_id=UUID(int=10),
        project_id=UUID(int=11),
        key_id=UUID(int=12),
        currency=Currency.USD,
        scopes=frozenset({"inference"}),
        tier_default=Tier.STANDARD,
        tier_max=Tier.PRIORITY,
        key_rpm=key_rpm,
        key_concurrency=key_conc,
        project_rpm=project_rpm,
        project_concurrency=project_conc,
        tenant_concurrency=tenant_conc,
    )


def test_no_limits_demand_nothing() -> None:
    assert demands(_principal(0, 0, 0, 0, 0), MODEL) == ()


def test_each_limit_is_one_demand_on_its_own_counter() -> None:
    key, project, tenant = UUID(int=12).hex, UUID(int=11).hex, UUID(int=10).hex
    assert demands(_principal(60, 600, 4, 8, 16), MODEL) == (
        Demand(DemandKind.RATE, f"key:{key}:rpm", 1, 60, "RATE_LIMITED", 60),
        Demand(DemandKind.RATE, f"project:{project}:rpm", 1, 600, "RATE_LIMITED", 60),
        Demand(DemandKind.CONCURRENCY, f"key:{key}:conc", 1, 4, "CONCURRENCY_LIMITED"),
        Demand(DemandKind.CONCURRENCY, f"project:{project}:conc", 1, 8, "CONCURRENCY_LIMITED"),
        Demand(DemandKind.CONCURRENCY, f"tenant:{tenant}:conc", 1, 16, "CONCURRENCY_LIMITED"),
    )


@given(st.tuples(*[st.integers(0, 3)] * 5))
def test_one_demand_per_limit_that_is_set(limits: tuple[int, int, int, int, int]) -> None:
    wanted = demands(_principal(*limits), MODEL)
    assert sorted(d.limit for d in wanted) == sorted(limit for limit in limits if limit)
    assert len({d.counter for d in wanted}) == len(wanted)
    assert all(d.amount == 1 for d in wanted)
