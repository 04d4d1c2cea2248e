"""Limits for tests."""

from typing import Any

from core import db
from core.clock import SystemClock
from tenants import limits
from tenants.limits import Why
from tenants.types import Actor, ActorKind, LimitLevel, LimitMetric, LimitRule, LimitSlot
from tests.factories.tenants import Customer

SOMEBODY = Actor(ActorKind.OPERATOR)


def why(reason: str = "test") -> Why:
    return Why(SOMEBODY, reason, SystemClock())


def of_key(who: Customer, metric: LimitMetric = LimitMetric.REQUESTS_PER_MINUTE, **changes: Any) -> LimitSlot:
    values: dict[str, Any] = {"tenant_id": who.tenant.id, "key_id": who.key.id, **changes}
    return LimitSlot(LimitLevel.KEY, metric, **values)


def of_tenant(who: Customer, level: LimitLevel = LimitLevel.TENANT, **changes: Any) -> LimitSlot:
    values: dict[str, Any] = {"metric": LimitMetric.REQUESTS_PER_MINUTE, "tenant_id": who.tenant.id, **changes}
    return LimitSlot(level, **values)


async def limited(sessions: db.Sessions, slot: LimitSlot, amount: int, reason: str = "test") -> LimitRule:
    """Commit a limit."""
    async with db.transaction(sessions) as session:
        rule, _ = await limits.set_limit(session, slot, amount, why(reason))
    return rule
