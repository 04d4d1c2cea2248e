"""Budgets as billing needs them: all that hold for a tenant's keys, and in which time zone their days begin."""

from collections.abc import Collection, Sequence
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from core.money import PICO_PER_NANO
from tenants import limit_queries
from tenants.limit_merge import SPENDS, LimitBook
from tenants.limits import rule_of
from tenants.types import Limit, LimitLevel, LimitMetric, LimitMode

WATCHED = frozenset({LimitMode.HARD, LimitMode.SOFT})
"""Modes of budgets that people are told about; a dark one is a trial and only counts."""


class Budget(msgspec.Struct, frozen=True):
    """A limit of spend that holds for one owner: the tenant, a project or a key. `model` is empty for all models."""

    level: LimitLevel
    owner_id: UUID
    project_id: UUID | None  # of a project's or key's
    metric: LimitMetric
    mode: LimitMode
    model: str
    limit_pico: int


class SpendBook:
    """The budgets of one tenant. `has_totals`: one at least has no period."""

    def __init__(self, tenant_id: UUID, plan_id: UUID, tz: str, book: LimitBook, *, has_totals: bool) -> None:
        self.tenant_id = tenant_id
        self.zone = ZoneInfo(tz)
        self.has_totals = has_totals
        self._plan_id = plan_id
        self._book = book

    def budgets(self, project_id: UUID, key_id: UUID) -> list[Budget]:
        """Return the budgets that this key's usage counts on: its own, its project's, the tenant's."""
        found = self._book.limits(self._plan_id, self.tenant_id, project_id, key_id)
        return [self._budget(limit, project_id, key_id) for limit in found]

    def _budget(self, limit: Limit, project_id: UUID, key_id: UUID) -> Budget:
        owner = {LimitLevel.TENANT: self.tenant_id, LimitLevel.PROJECT: project_id, LimitLevel.KEY: key_id}[limit.level]
        project = None if limit.level is LimitLevel.TENANT else project_id
        amount_pico = limit.amount * PICO_PER_NANO
        return Budget(limit.level, owner, project, limit.metric, limit.mode, limit.model, amount_pico)


async def books_of(session: AsyncSession, tenant_ids: Collection[UUID]) -> list[SpendBook]:
    """Return the books of those of the tenants that have a budget at all, in the order of their ids."""
    places = await limit_queries.places(session, tenant_ids)
    rows = await limit_queries.rules_for(session, tenant_ids, {plan_id for _, plan_id, _ in places})
    rules = [rule for rule in map(rule_of, rows) if rule.slot.metric in SPENDS and rule.slot.mode in WATCHED]
    metrics: dict[UUID | None, set[LimitMetric]] = {}  # by tenant or plan
    for rule in rules:
        metrics.setdefault(rule.slot.plan_id or rule.slot.tenant_id, set()).add(rule.slot.metric)
    book = LimitBook(rules)
    found = []
    for tenant_id, plan_id, tz in places:
        held = metrics.get(tenant_id, set()) | metrics.get(plan_id, set())
        if held:
            found.append(SpendBook(tenant_id, plan_id, tz, book, has_totals=LimitMetric.SPEND_TOTAL in held))
    return found


async def tenants_with_budgets(session: AsyncSession, after: UUID, limit: int) -> Sequence[UUID]:
    """Return the next tenants, by id, that have a budget of their own or by their plan."""
    return await limit_queries.tenants_limited(session, SPENDS, WATCHED, after, limit)
