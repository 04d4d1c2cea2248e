"""What a tenant sets for itself: stricter limits for the whole of it, its projects and keys, never looser ones."""

from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.errors import ErrorKind, PlatformError
from core.ids import IdKind
from core.money import format_pico
from tenants import api_keys, limit_queries, limits, queries
from tenants.errors import invalid, not_found
from tenants.limit_merge import SPENDS, merge
from tenants.limits import LimitChange, Why, rule_of
from tenants.types import LimitAuthor, LimitLevel, LimitMode, LimitRule, LimitSlot

NO_PROJECT = UUID(int=0)
_WIDER = {
    LimitLevel.KEY: frozenset(LimitLevel),
    LimitLevel.PROJECT: frozenset({LimitLevel.PROJECT, LimitLevel.TENANT}),
    LimitLevel.TENANT: frozenset({LimitLevel.TENANT}),
}


async def set_limit(
    session: AsyncSession, slot: LimitSlot, amount: int, why: Why, *, replaces: LimitMode | None = None
) -> tuple[LimitRule, int | None]:
    """Put an amount in a slot of the tenant's own; see `limits.set_limit`.

    Returns:
        The rule, and the amount before, None when there was none.

    Raises:
        PlatformError: not_found; invalid for a trial, or for more than operators allow there or around it; conflict for
            too many rules.
    """
    if slot.mode is LimitMode.DARK:
        raise invalid("mode", "A limit of your own is hard or soft.")
    bounds = await allowed(session, slot)
    most = min((bound.amount for bound in bounds), default=None)
    if most is not None and amount > most:
        shown = format_pico(most) if slot.metric in SPENDS else str(most)
        raise PlatformError(
            "LIMIT_TOO_HIGH",
            ErrorKind.INVALID,
            f"{slot.metric.value} may be at most {shown} here. Set less, or ask for an increase.",
            param="amount",
            fields={"most": limits.amount_out(slot.metric, most)},
        )
    return await limits.set_limit(session, replace(slot, author=LimitAuthor.TENANT), amount, why, replaces=replaces)


async def allowed(session: AsyncSession, slot: LimitSlot) -> Sequence[LimitRule]:
    """Return the operators' hard rules that bound a slot: of its level and wider ones, for its model or for all."""
    assert slot.tenant_id is not None  # noqa: S101 - only a tenant has limits of its own
    tenant = await queries.tenant(session, slot.tenant_id)
    if tenant is None:
        raise not_found(IdKind.TENANT)
    project_id = slot.project_id
    if slot.key_id is not None:
        project_id = (await api_keys.get(session, slot.tenant_id, slot.key_id)).project_id
    rows = await limit_queries.rules_for(session, [slot.tenant_id], [tenant.plan_id])
    rules = [rule for rule in map(rule_of, rows) if rule.slot.author is LimitAuthor.OPERATOR]
    return [
        found.rule
        for found in merge(rules, project_id or NO_PROJECT, slot.key_id)
        if found.limit.mode is LimitMode.HARD
        and found.limit.metric is slot.metric
        and found.limit.level in _WIDER[slot.level]
        and found.limit.model in ("", slot.model)
    ]


async def remove(session: AsyncSession, rule: LimitRule, why: Why) -> None:
    """Take a rule of the tenant's own away.

    Raises:
        PlatformError: forbidden for one that operators set.
    """
    if rule.slot.author is not LimitAuthor.TENANT:
        raise PlatformError(
            "LIMIT_NOT_YOURS",
            ErrorKind.FORBIDDEN,
            "This limit is set by the platform. Ask for an increase instead.",
        )
    await limits.remove(session, rule, why)


async def revert(session: AsyncSession, change: LimitChange, why: Why, *, force: bool) -> LimitChange:
    """Undo a change of the tenant's own rule; what it puts back may not be above what operators allow by now."""
    if change.slot.author is not LimitAuthor.TENANT:
        raise not_found(IdKind.LIMIT_CHANGE)
    put_back = [change.before, None if change.beside is None else change.beside.before]
    most = max((amount for amount in put_back if amount is not None), default=None)
    bounds = [] if most is None else await allowed(session, change.slot)
    if most is not None and any(most > bound.amount for bound in bounds):
        raise PlatformError(
            "LIMIT_TOO_HIGH", ErrorKind.CONFLICT, "What was before that change is more than is allowed by now."
        )
    return await limits.revert(session, change, why, force=force)
