"""Limits as they would be: the rules in force with proposed changes on top. Nothing is saved."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.ids import new_uuid
from tenants import api_keys, limit_queries, plans, projects, tenants
from tenants.limits import rule_of
from tenants.types import LimitRule, LimitSlot, Tenant

NEVER = datetime(1970, 1, 1, tzinfo=UTC)  # a rule that is not saved has no time


@dataclass(frozen=True, slots=True)
class Proposal:
    """An amount for a slot, as it is stored; None takes the rule away."""

    slot: LimitSlot
    amount: int | None


async def check(session: AsyncSession, proposals: Iterable[Proposal]) -> None:
    """Look that projects and keys are the tenant's.

    Raises:
        PlatformError: not_found.
    """
    for slot in (proposal.slot for proposal in proposals):
        if slot.tenant_id is not None and slot.project_id is not None:
            await projects.get(session, slot.tenant_id, slot.project_id)
        if slot.tenant_id is not None and slot.key_id is not None:
            await api_keys.get(session, slot.tenant_id, slot.key_id)


async def rules_of(session: AsyncSession, tenant: Tenant) -> list[LimitRule]:
    """Return the rules of a tenant and of its plan."""
    return [rule_of(row) for row in await limit_queries.rules_for(session, [tenant.id], [tenant.plan_id])]


def applied(rules: Sequence[LimitRule], proposals: Iterable[Proposal]) -> list[LimitRule]:
    """Return the rules with the proposed amounts instead of those of the same slots; of one slot the last holds."""
    by_slot = {rule.slot: rule for rule in rules}
    for proposal in proposals:
        known = by_slot.pop(proposal.slot, None)
        if proposal.amount is not None and known is not None:
            by_slot[proposal.slot] = replace(known, amount=proposal.amount)
        elif proposal.amount is not None:
            by_slot[proposal.slot] = LimitRule(new_uuid(), proposal.slot, proposal.amount, NEVER)
    return list(by_slot.values())


async def tenants_on(session: AsyncSession, plan_id: UUID, limit: int) -> list[Tenant]:
    """Return at most `limit` tenants of a plan, the newest.

    Raises:
        PlatformError: not_found.
    """
    await plans.get(session, plan_id)
    return [await tenants.get(session, one) for one in await limit_queries.tenant_ids_on(session, plan_id, limit)]
