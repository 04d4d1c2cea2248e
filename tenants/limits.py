"""Limits: set, remove, list, undo. Every change says why and is kept, and gateways are told in the same transaction."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.clock import Clock
from core.db import record_config_change
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, new_uuid
from core.money import MAX_BALANCE_NANO, PICO_PER_NANO, format_pico, parse_pico
from core.unreadable import Report
from tenants import api_keys, limit_queries, projects, queries
from tenants.errors import invalid, not_found
from tenants.limit_merge import SPENDS, Effective, LimitBook, merge
from tenants.limit_queries import RuleRow
from tenants.limit_tables import LimitChangeRow, LimitRuleRow
from tenants.types import Actor, ActorKind, LimitAuthor, LimitLevel, LimitMetric, LimitMode, LimitRule, LimitSlot

RULES_MAX = 100
"""Of one author for one project or key, or for a tenant or plan itself."""

SPEND_MAX_PICO = MAX_BALANCE_NANO * PICO_PER_NANO
"""9,000,000 units: the largest amount that the admission script counts exactly."""

COUNT_MAX = {
    LimitMetric.REQUESTS_PER_MINUTE: 10_000_000,
    LimitMetric.INPUT_TOKENS_PER_MINUTE: 1_000_000_000_000,
    LimitMetric.OUTPUT_TOKENS_PER_MINUTE: 1_000_000_000_000,
    LimitMetric.CONCURRENCY: 1_000_000,
}


@dataclass(frozen=True, slots=True)
class Why:
    """Who changes a limit, when, and the reason as people read it in the history."""

    actor: Actor
    reason: str
    clock: Clock


@dataclass(frozen=True, slots=True)
class Beside:
    """What became, in the same change, of the rule of another mode: a trial that went as its limit became hard."""

    mode: LimitMode
    before: int | None
    after: int | None


@dataclass(frozen=True, slots=True)
class LimitChange:
    """One change of a rule; an amount of None means no rule."""

    id: UUID
    changed_at: datetime
    actor_kind: str
    actor_id: UUID | None
    reason: str
    slot: LimitSlot
    before: int | None
    after: int | None
    reverts: UUID | None
    beside: Beside | None = None


def parse_amount(metric: LimitMetric, amount: int | str) -> int:
    """Return what is stored of an amount as people give it: a count, or a decimal string for spend.

    Raises:
        PlatformError: invalid, of the wrong kind, negative, or beyond what can be counted exactly.
    """
    if metric not in SPENDS:
        most = COUNT_MAX[metric]
        if isinstance(amount, str) or not 0 <= amount <= most:
            raise invalid("amount", f"A limit of {metric.value} is a whole number from 0 to {most}; 0 allows nothing.")
        return amount
    if not isinstance(amount, str):
        raise invalid("amount", 'A spend limit is a decimal string in the tenant\'s currency, e.g. "100.00".')
    pico = parse_pico(amount)
    if not 0 <= pico <= SPEND_MAX_PICO:
        raise invalid("amount", "A spend limit is from 0 to 9000000; beyond that, leave the limit away.")
    return pico


def amount_out(metric: LimitMetric, amount: int) -> int | str:
    """Return a stored amount as people read it."""
    return format_pico(amount) if metric in SPENDS else amount


def rule_of(row: LimitRuleRow | RuleRow) -> LimitRule:
    return LimitRule(row.id, _slot(row), int(row.amount), row.updated_at)


def take_rules(book: LimitBook, rows: Iterable[LimitRuleRow | RuleRow], report: Report) -> LimitBook:
    """Add rules to a book; one that cannot be read closes the book to the narrowest that it names, and to no others."""
    for row in rows:
        try:
            book.add((rule_of(row),))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one row is not the others' fault
            report("limit_rule", row.id, error)
            narrowest = row.key_id or row.project_id or row.tenant_id or row.plan_id
            if narrowest is not None:
                book.close(narrowest)
    return book


def _slot(row: LimitRuleRow | RuleRow | LimitChangeRow) -> LimitSlot:
    return LimitSlot(
        level=LimitLevel(row.level),
        metric=LimitMetric(row.metric),
        mode=LimitMode(row.mode),
        model=row.model,
        project_id=row.project_id,
        key_id=row.key_id,
        author=LimitAuthor(row.author),
        tenant_id=row.tenant_id,
        plan_id=row.plan_id,
    )


def _amount(value: int | None) -> int | None:
    return None if value is None else int(value)


def _change(row: LimitChangeRow) -> LimitChange:
    beside = None
    if row.beside_mode is not None:
        beside = Beside(LimitMode(row.beside_mode), _amount(row.beside_before), _amount(row.beside_after))
    return LimitChange(
        id=row.id,
        changed_at=row.changed_at,
        actor_kind=row.actor_kind,
        actor_id=row.actor_id,
        reason=row.reason,
        slot=_slot(row),
        before=_amount(row.amount_before),
        after=_amount(row.amount_after),
        reverts=row.reverts,
        beside=beside,
    )


async def set_limit(
    session: AsyncSession, slot: LimitSlot, amount: int, why: Why, *, replaces: LimitMode | None = None
) -> tuple[LimitRule, int | None]:
    """Put an amount in a slot, whether it has one or not.

    Args:
        session: the transaction.
        slot: with its tenant or plan; a project or key must be that tenant's.
        amount: as `parse_amount` returns it.
        why: kept in the history.
        replaces: remove the rule of this mode in the same change: a trial becomes hard.

    Returns:
        The rule, and the amount before, None when there was none.

    Raises:
        PlatformError: not_found, conflict when there are too many rules, invalid when there is nothing to replace.
    """
    await _lock_owner(session, slot)
    beside = None if replaces is None else await _replace(session, replace(slot, mode=replaces), slot.mode)
    row = await limit_queries.rule_at(session, slot.tenant_id, slot)
    was = None if row is None else int(row.amount)
    if row is None and await limit_queries.count_at_target(session, slot.tenant_id, slot) >= RULES_MAX:
        raise PlatformError(
            "TOO_MANY_LIMITS", ErrorKind.CONFLICT, f"There are {RULES_MAX} limits here already. Remove one first."
        )
    if row is None:
        row = _add(session, slot, amount, why.clock.now())
    elif was != amount:
        row.amount, row.updated_at = amount, why.clock.now()
    if was != amount or beside is not None:
        await _record(session, _Edit(slot, why, beside=beside), was, amount)
    return rule_of(row), was


async def _replace(session: AsyncSession, old: LimitSlot, mode: LimitMode) -> Beside:
    row = None if old.mode is mode else await limit_queries.rule_at(session, old.tenant_id, old)
    if row is None:
        raise invalid("replaces", f"There is no {old.mode.value} limit of the same metric and model here.")
    await session.delete(row)
    await session.flush()
    return Beside(old.mode, int(row.amount), None)


async def remove(session: AsyncSession, rule: LimitRule, why: Why) -> None:
    """Take a rule away: what stood behind it applies again, or nothing."""
    await _lock_owner(session, rule.slot)
    row = await limit_queries.rule_at(session, rule.slot.tenant_id, rule.slot)
    if row is None:
        raise not_found(IdKind.LIMIT)
    await session.delete(row)
    await _record(session, _Edit(rule.slot, why), int(row.amount), None)


async def get(session: AsyncSession, tenant_id: UUID, rule_id: UUID) -> LimitRule:
    row = await limit_queries.rule(session, tenant_id, rule_id)
    if row is None:
        raise not_found(IdKind.LIMIT)
    return rule_of(row)


async def get_of_plan(session: AsyncSession, plan_id: UUID, rule_id: UUID) -> LimitRule:
    row = await limit_queries.plan_rule(session, plan_id, rule_id)
    if row is None:
        raise not_found(IdKind.LIMIT)
    return rule_of(row)


async def list_at(
    session: AsyncSession,
    *,
    tenant_id: UUID | None = None,
    plan_id: UUID | None = None,
    project_id: UUID | None = None,
    key_id: UUID | None = None,
) -> Sequence[LimitRule]:
    """Return the rules of one project or key, or of a tenant or plan itself: at most `RULES_MAX` of each author."""
    level = LimitLevel.KEY if key_id else LimitLevel.PROJECT if project_id else LimitLevel.TENANT
    slot = LimitSlot(
        level,
        LimitMetric.CONCURRENCY,
        project_id=project_id,
        key_id=key_id,
        tenant_id=tenant_id,
        plan_id=plan_id,
    )
    await check_target(session, slot)
    return [rule_of(row) for row in await limit_queries.rules_at_target(session, tenant_id, slot)]


async def check_target(session: AsyncSession, slot: LimitSlot) -> None:
    """Somebody else's project or key, and none, are the same `not_found`."""
    if slot.tenant_id is not None and slot.project_id is not None:
        await projects.get(session, slot.tenant_id, slot.project_id)
    if slot.tenant_id is not None and slot.key_id is not None:
        await api_keys.get(session, slot.tenant_id, slot.key_id)


async def _lock_owner(session: AsyncSession, slot: LimitSlot) -> None:
    """One change of an owner's limits at a time: the number of rules and the history stay exact."""
    if slot.tenant_id is not None:
        if await limit_queries.lock_tenant(session, slot.tenant_id) is None:
            raise not_found(IdKind.TENANT)
        await check_target(session, slot)
    elif slot.plan_id is None or await limit_queries.plan(session, slot.plan_id, lock=True) is None:
        raise not_found(IdKind.PLAN)


@dataclass(frozen=True, slots=True)
class _Edit:
    """Which slot is changed, and why; `reverts` is the change that is undone."""

    slot: LimitSlot
    why: Why
    reverts: UUID | None = None
    beside: Beside | None = None


def _add(session: AsyncSession, slot: LimitSlot, amount: int, now: datetime) -> LimitRuleRow:
    row = LimitRuleRow(
        id=new_uuid(),
        tenant_id=slot.tenant_id,
        plan_id=slot.plan_id,
        author=slot.author,
        level=slot.level,
        project_id=slot.project_id,
        key_id=slot.key_id,
        model=slot.model,
        metric=slot.metric,
        mode=slot.mode,
        amount=amount,
        created_at=now,
        updated_at=now,
    )
    session.add(row)
    return row


async def _record(session: AsyncSession, edit: _Edit, before: int | None, after: int | None) -> LimitChange:
    slot, why = edit.slot, edit.why
    row = LimitChangeRow(
        id=new_uuid(),
        changed_at=why.clock.now(),
        actor_kind=why.actor.kind,
        actor_id=why.actor.id,
        reason=why.reason,
        tenant_id=slot.tenant_id,
        plan_id=slot.plan_id,
        author=slot.author,
        level=slot.level,
        project_id=slot.project_id,
        key_id=slot.key_id,
        model=slot.model,
        metric=slot.metric,
        mode=slot.mode,
        amount_before=before,
        amount_after=after,
        beside_mode=None if edit.beside is None else edit.beside.mode,
        beside_before=None if edit.beside is None else edit.beside.before,
        beside_after=None if edit.beside is None else edit.beside.after,
        reverts=edit.reverts,
    )
    session.add(row)
    await session.flush()
    if slot.tenant_id is not None:
        await record_config_change(session, "tenant_limits", slot.tenant_id)
    else:
        await record_config_change(session, "plan", slot.plan_id)
    return _change(row)


async def list_changes(
    session: AsyncSession, tenant_id: UUID, *, after: UUID | None, limit: int, author: LimitAuthor | None = None
) -> Sequence[LimitChange]:
    """Return at most `limit` changes of a tenant's rules, newest first, of one author or of all."""
    rows = await limit_queries.changes(session, tenant_id, author, after=after, limit=limit)
    return [_change(row) for row in rows]


async def list_changes_of_plan(
    session: AsyncSession, plan_id: UUID, *, after: UUID | None, limit: int
) -> Sequence[LimitChange]:
    """Return at most `limit` changes of a plan's rules, newest first."""
    return [_change(row) for row in await limit_queries.plan_changes(session, plan_id, after, limit)]


async def get_change(session: AsyncSession, tenant_id: UUID, change_id: UUID) -> LimitChange:
    row = await limit_queries.change(session, tenant_id, change_id)
    if row is None:
        raise not_found(IdKind.LIMIT_CHANGE)
    return _change(row)


async def get_change_of_plan(session: AsyncSession, plan_id: UUID, change_id: UUID) -> LimitChange:
    row = await limit_queries.plan_change(session, plan_id, change_id)
    if row is None:
        raise not_found(IdKind.LIMIT_CHANGE)
    return _change(row)


async def revert(session: AsyncSession, change: LimitChange, why: Why, *, force: bool) -> LimitChange:
    """Put back what a change replaced, as a change of its own.

    Raises:
        PlatformError: conflict when the rule was changed since, unless forced, or is as before already.
    """
    slot, beside = change.slot, change.beside
    await _lock_owner(session, slot)
    other = slot if beside is None else replace(slot, mode=beside.mode)
    now = await _amount_at(session, slot), None if beside is None else await _amount_at(session, other)
    before = change.before, None if beside is None else beside.before
    after = change.after, None if beside is None else beside.after
    if now == before:
        raise PlatformError("NOTHING_TO_REVERT", ErrorKind.CONFLICT, "The limit is as it was before that change.")
    if now != after and not force:
        raise PlatformError(
            "LIMIT_CHANGED_SINCE",
            ErrorKind.CONFLICT,
            "The limit was changed again since. Look at it, then send `force` to put back what was before this change.",
            fields={"amount": None if now[0] is None else amount_out(slot.metric, now[0])},
        )
    await _put(session, slot, before[0], why.clock.now())
    if beside is None or now[1] == before[1]:
        return await _record(session, _Edit(slot, why, change.id), now[0], before[0])
    await _put(session, other, before[1], why.clock.now())
    if now[0] == before[0]:
        return await _record(session, _Edit(other, why, change.id), now[1], before[1])
    edit = _Edit(slot, why, change.id, Beside(beside.mode, now[1], before[1]))
    return await _record(session, edit, now[0], before[0])


async def _amount_at(session: AsyncSession, slot: LimitSlot) -> int | None:
    row = await limit_queries.rule_at(session, slot.tenant_id, slot)
    return None if row is None else int(row.amount)


async def _put(session: AsyncSession, slot: LimitSlot, amount: int | None, now: datetime) -> None:
    """Make the rule of a slot so; None: there is none."""
    row = await limit_queries.rule_at(session, slot.tenant_id, slot)
    if row is not None and amount is None:
        await session.delete(row)
    elif row is not None and amount is not None:
        row.amount, row.updated_at = amount, now
    elif amount is not None:
        _add(session, slot, amount, now)
    await session.flush()


async def effective(
    session: AsyncSession, tenant_id: UUID, project_id: UUID, key_id: UUID | None
) -> Sequence[Effective]:
    """Return what holds for a key, or for a key without rules of its own, and the rule behind each."""
    tenant = await queries.tenant(session, tenant_id)
    if tenant is None:
        raise not_found(IdKind.TENANT)
    rows = await limit_queries.rules_for(session, [tenant_id], [tenant.plan_id])
    return merge([rule_of(row) for row in rows], project_id, key_id)


def system_why(reason: str, clock: Clock) -> Why:
    """For what the platform itself sets, such as the demo's limits."""
    return Why(Actor(ActorKind.SYSTEM), reason, clock)
