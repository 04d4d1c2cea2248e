"""Every query on plans, limits and their history. What a tenant owns takes `tenant_id` first."""

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Row, and_, func, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from tenants.errors import name_taken
from tenants.limit_tables import LimitChangeRow, LimitRequestRow, LimitRuleRow, PlanRow
from tenants.queries import UNIQUE_VIOLATION
from tenants.tables import TenantRow
from tenants.types import LimitSlot

TENANTS_COUNTED_MAX = 1_000_000


RuleRow = Row[*tuple[Any, ...]]
"""A rule as a plain row, for those who read many."""

SLICE = 500


async def _slices(session: AsyncSession, *where: ColumnElement[bool]) -> AsyncIterator[Sequence[RuleRow]]:
    query = select(*LimitRuleRow.__table__.columns).where(*where).order_by(LimitRuleRow.id).limit(SLICE)
    rows = (await session.execute(query)).all()
    while rows:
        yield rows
        rows = (await session.execute(query.where(LimitRuleRow.id > rows[-1].id))).all()


def all_rules(session: AsyncSession) -> AsyncIterator[Sequence[RuleRow]]:
    """Yield the rules of everybody in slices, for a gateway that starts."""
    return _slices(session)


async def rules_for(
    session: AsyncSession, tenant_ids: Collection[UUID], plan_ids: Collection[UUID]
) -> Sequence[LimitRuleRow]:
    """Return the rules of these tenants and of these plans."""
    owned = or_(LimitRuleRow.tenant_id.in_(tenant_ids), LimitRuleRow.plan_id.in_(plan_ids))
    return (await session.scalars(select(LimitRuleRow).where(owned))).all()


async def places(session: AsyncSession, tenant_ids: Collection[UUID]) -> list[tuple[UUID, UUID, str]]:
    """Return the plan and the time zone of each of these tenants, in the order of their ids."""
    query = select(TenantRow.id, TenantRow.plan_id, TenantRow.tz).where(TenantRow.id.in_(tenant_ids))
    return [(row[0], row[1], row[2]) for row in await session.execute(query.order_by(TenantRow.id))]


async def tenants_limited(
    session: AsyncSession, metrics: Collection[str], modes: Collection[str], after: UUID, limit: int
) -> Sequence[UUID]:
    """Return the next tenants, by id, with a rule of these metrics and modes, of their own or by their plan."""
    rules = select(LimitRuleRow).where(LimitRuleRow.metric.in_(metrics), LimitRuleRow.mode.in_(modes)).subquery()
    owned = or_(
        TenantRow.id.in_(select(rules.c.tenant_id).where(rules.c.tenant_id.is_not(None))),
        TenantRow.plan_id.in_(select(rules.c.plan_id).where(rules.c.plan_id.is_not(None))),
    )
    query = select(TenantRow.id).where(owned, TenantRow.id > after).order_by(TenantRow.id).limit(limit)
    return (await session.scalars(query)).all()


def rules_on_plan(session: AsyncSession, plan_id: UUID) -> AsyncIterator[Sequence[RuleRow]]:
    """Yield the rules of a plan and of every tenant on it in slices."""
    on_plan = select(TenantRow.id).where(TenantRow.plan_id == plan_id)
    return _slices(session, or_(LimitRuleRow.plan_id == plan_id, LimitRuleRow.tenant_id.in_(on_plan)))


def _owned(tenant_id: UUID | None, plan_id: UUID | None) -> ColumnElement[bool]:
    if tenant_id is not None:
        return LimitRuleRow.tenant_id == tenant_id
    return LimitRuleRow.plan_id == plan_id


def _same(column: ColumnElement[UUID | None], value: UUID | None) -> ColumnElement[bool]:
    return column.is_(None) if value is None else column == value


async def rule_at(session: AsyncSession, tenant_id: UUID | None, slot: LimitSlot) -> LimitRuleRow | None:
    """Return the rule of a slot; whoever changes it holds the lock of its owner."""
    query = select(LimitRuleRow).where(
        _owned(tenant_id, slot.plan_id),
        LimitRuleRow.author == slot.author,
        LimitRuleRow.level == slot.level,
        LimitRuleRow.metric == slot.metric,
        LimitRuleRow.mode == slot.mode,
        LimitRuleRow.model == slot.model,
        _same(LimitRuleRow.project_id.expression, slot.project_id),
        _same(LimitRuleRow.key_id.expression, slot.key_id),
    )
    return (await session.scalars(query)).one_or_none()


async def rule(session: AsyncSession, tenant_id: UUID, rule_id: UUID) -> LimitRuleRow | None:
    query = select(LimitRuleRow).where(LimitRuleRow.tenant_id == tenant_id, LimitRuleRow.id == rule_id)
    return (await session.scalars(query)).one_or_none()


async def plan_rule(session: AsyncSession, plan_id: UUID, rule_id: UUID) -> LimitRuleRow | None:
    query = select(LimitRuleRow).where(LimitRuleRow.plan_id == plan_id, LimitRuleRow.id == rule_id)
    return (await session.scalars(query)).one_or_none()


def _target(tenant_id: UUID | None, slot: LimitSlot) -> ColumnElement[bool]:
    """The rules of the same owner that name the same project or key; of none, those for all."""
    return and_(
        _owned(tenant_id, slot.plan_id),
        _same(LimitRuleRow.project_id.expression, slot.project_id),
        _same(LimitRuleRow.key_id.expression, slot.key_id),
    )


async def rules_at_target(session: AsyncSession, tenant_id: UUID | None, slot: LimitSlot) -> Sequence[LimitRuleRow]:
    """Return the rules of one project or key, or of the owner itself; their number is bounded when they are made."""
    query = select(LimitRuleRow).where(_target(tenant_id, slot)).order_by(LimitRuleRow.id)
    return (await session.scalars(query)).all()


async def count_at_target(session: AsyncSession, tenant_id: UUID | None, slot: LimitSlot) -> int:
    """Return how many rules the same author has there."""
    query = select(func.count()).where(_target(tenant_id, slot), LimitRuleRow.author == slot.author)
    return (await session.execute(query)).scalar_one()


async def lock_tenant(session: AsyncSession, tenant_id: UUID) -> TenantRow | None:
    """Return the tenant; who changes its limits does so one at a time."""
    query = select(TenantRow).where(TenantRow.id == tenant_id).with_for_update(key_share=True)
    return (await session.scalars(query)).one_or_none()


async def plan(session: AsyncSession, plan_id: UUID, *, lock: bool = False) -> PlanRow | None:
    query = select(PlanRow).where(PlanRow.id == plan_id)
    return (await session.scalars(query.with_for_update(key_share=True) if lock else query)).one_or_none()


async def plans(session: AsyncSession, after: UUID | None, limit: int) -> Sequence[PlanRow]:
    query = select(PlanRow).order_by(PlanRow.id.desc()).limit(limit)
    if after is not None:
        query = query.where(PlanRow.id < after)
    return (await session.scalars(query)).all()


async def tenants_with_book(session: AsyncSession, price_book_id: UUID) -> Sequence[UUID]:
    query = select(TenantRow.id).join(PlanRow, PlanRow.id == TenantRow.plan_id)
    return (await session.scalars(query.where(PlanRow.price_book_id == price_book_id))).all()


async def save_plan(session: AsyncSession, row: PlanRow) -> None:
    """Write a new or changed plan.

    Raises:
        PlatformError: conflict, when the name is in use.
    """
    session.add(row)
    try:
        await session.flush()
    except IntegrityError as error:
        if getattr(error.orig, "sqlstate", "") != UNIQUE_VIOLATION:
            raise
        raise name_taken("plan") from error
    await session.refresh(row)


async def tenants_on(session: AsyncSession, plan_id: UUID) -> int:
    """Return how many tenants are on a plan."""
    found = select(TenantRow.id).where(TenantRow.plan_id == plan_id).limit(TENANTS_COUNTED_MAX).subquery()
    return (await session.execute(select(func.count()).select_from(found))).scalar_one()


async def tenant_ids_on(session: AsyncSession, plan_id: UUID, limit: int) -> Sequence[UUID]:
    """Return at most `limit` tenants on a plan, the newest."""
    query = select(TenantRow.id).where(TenantRow.plan_id == plan_id).order_by(TenantRow.id.desc()).limit(limit)
    return (await session.scalars(query)).all()


async def changes(
    session: AsyncSession, tenant_id: UUID, author: str | None, *, after: UUID | None, limit: int
) -> Sequence[LimitChangeRow]:
    query = select(LimitChangeRow).where(LimitChangeRow.tenant_id == tenant_id)
    query = query.order_by(LimitChangeRow.id.desc()).limit(limit)
    if author is not None:
        query = query.where(LimitChangeRow.author == author)
    if after is not None:
        query = query.where(LimitChangeRow.id < after)
    return (await session.scalars(query)).all()


async def plan_changes(
    session: AsyncSession, plan_id: UUID, after: UUID | None, limit: int
) -> Sequence[LimitChangeRow]:
    query = select(LimitChangeRow).where(LimitChangeRow.plan_id == plan_id)
    query = query.order_by(LimitChangeRow.id.desc()).limit(limit)
    if after is not None:
        query = query.where(LimitChangeRow.id < after)
    return (await session.scalars(query)).all()


async def change(session: AsyncSession, tenant_id: UUID, change_id: UUID) -> LimitChangeRow | None:
    query = select(LimitChangeRow).where(LimitChangeRow.tenant_id == tenant_id, LimitChangeRow.id == change_id)
    return (await session.scalars(query)).one_or_none()


async def plan_change(session: AsyncSession, plan_id: UUID, change_id: UUID) -> LimitChangeRow | None:
    query = select(LimitChangeRow).where(LimitChangeRow.plan_id == plan_id, LimitChangeRow.id == change_id)
    return (await session.scalars(query)).one_or_none()


async def request(
    session: AsyncSession, tenant_id: UUID, request_id: UUID, *, lock: bool = False
) -> LimitRequestRow | None:
    query = select(LimitRequestRow).where(LimitRequestRow.tenant_id == tenant_id, LimitRequestRow.id == request_id)
    return (await session.scalars(query.with_for_update() if lock else query)).one_or_none()


async def requests(
    session: AsyncSession,
    tenant_id: UUID | None,
    state: str | None,
    asked_by: UUID | None,
    *,
    after: UUID | None,
    limit: int,
) -> Sequence[LimitRequestRow]:
    """Return requests newest first, of one tenant, or of all when None."""
    query = select(LimitRequestRow).order_by(LimitRequestRow.id.desc()).limit(limit)
    if tenant_id is not None:
        query = query.where(LimitRequestRow.tenant_id == tenant_id)
    if state is not None:
        query = query.where(LimitRequestRow.state == state)
    if asked_by is not None:
        query = query.where(LimitRequestRow.asked_by_id == asked_by)
    if after is not None:
        query = query.where(LimitRequestRow.id < after)
    return (await session.scalars(query)).all()


async def count_open_requests(session: AsyncSession, tenant_id: UUID) -> int:
    query = select(func.count()).where(LimitRequestRow.tenant_id == tenant_id, LimitRequestRow.state == "open")
    return (await session.execute(query)).scalar_one()
