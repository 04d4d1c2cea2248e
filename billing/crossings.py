"""Crossings: what is posted on a budget reached a threshold of it, in one of its periods.

Decided from the rollup, beside the posting and some seconds after it: the poster notes whose usage it posted
(`watch.py`), and the worker looks at all budgets now and then, for what a killed poster did not look at and for
limits that were set below what is spent. Both may see the same crossing; the table takes it once for all time, and the
job that tells people is asked for in the transaction that made it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from uuid import UUID

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from billing import alert_queries, alert_settings, budget_queries
from billing.budget_queries import Window
from billing.budgets import window_of
from catalog import models
from core import outbox
from core.clock import Clock
from core.db import Sessions, transaction
from core.ids import new_uuid
from core.logging import get_logger
from tenants import spend_limits
from tenants.spend_limits import Budget, SpendBook
from tenants.types import LimitMetric

TELL = "billing.tell_crossings"
PAGE = 500
PARTS = 10**6  # of a budget, to compare by

Use = tuple[UUID, UUID, datetime]
"""Project, key and an instant in the period that is looked at."""

_log = get_logger(__name__)


class Spending(msgspec.Struct, frozen=True):
    """A budget in one of its periods, and what is posted on it."""

    budget: Budget
    window: Window
    spent_pico: int


class Crossing(msgspec.Struct, frozen=True):
    """A threshold, in percent of the amount, that was reached."""

    id: UUID
    level: str
    owner_id: UUID
    project_id: UUID | None
    metric: str
    mode: str
    model: str
    window: Window
    threshold: int
    limit_pico: int
    spent_pico: int
    crossed_at: datetime


def reached(spent_pico: int, limit_pico: int, thresholds: Iterable[int]) -> list[int]:
    """Return the thresholds, in percent, that the spend has reached; an amount of 0 has none: nothing can be spent."""
    return [percent for percent in thresholds if limit_pico > 0 and spent_pico * 100 >= percent * limit_pico]


async def spendings(session: AsyncSession, book: SpendBook, uses: Collection[Use]) -> list[Spending]:
    """Return the budgets that these uses count on, each with its period and what is posted on it there."""
    found: dict[tuple[Budget, Window], None] = {}
    for project_id, key_id, at in uses:
        for budget in book.budgets(project_id, key_id):
            found[budget, window_of(budget.metric, book.zone, at)] = None
    windows = list(dict.fromkeys(window for _, window in found))
    named = {budget.model for budget, _ in found if budget.model}
    if not windows:
        return []
    ids = {model.name: model.id for model in await models.list_models(session)} if named else {}
    sums = _sums(await budget_queries.spent_by_owner(session, book.tenant_id, windows), book.tenant_id)
    place = {window: number for number, window in enumerate(windows)}
    return [
        Spending(
            budget,
            window,
            sums.get((place[window], budget.owner_id, ids.get(budget.model) if budget.model else None), 0),
        )
        for budget, window in found
    ]


def _sums(rows: Sequence[Row[tuple[object, ...]]], tenant_id: UUID) -> Mapping[tuple[int, UUID, UUID | None], int]:
    """Add up by window, owner and model, and over all models."""
    sums: dict[tuple[int, UUID, UUID | None], int] = {}
    for row in rows:
        for owner in (tenant_id, row.project_id, row.key_id):
            for model in (None, row.model_id):
                key = row.place, owner, model
                sums[key] = sums.get(key, 0) + int(row.pico)
    return sums


async def evaluate(session: AsyncSession, book: SpendBook, uses: Collection[Use], thresholds: Sequence[int]) -> int:
    """Emit the crossings of the budgets that these uses count on; returns how many are new.

    Doing it again, or at the same time elsewhere, emits none twice.
    """
    rows = [
        {
            "id": new_uuid(),
            "level": one.budget.level.value,
            "owner_id": one.budget.owner_id,
            "project_id": one.budget.project_id,
            "metric": one.budget.metric.value,
            "mode": one.budget.mode.value,
            "model": one.budget.model,
            "window_start": one.window[0],
            "window_end": one.window[1],
            "threshold": threshold,
            "limit_pico": one.budget.limit_pico,
            "spent_pico": one.spent_pico,
        }
        for one in await spendings(session, book, uses)
        for threshold in reached(one.spent_pico, one.budget.limit_pico, thresholds)
    ]
    rows.sort(key=lambda row: (str(row["owner_id"]), row["metric"], row["mode"], row["model"], row["threshold"]))
    made = await alert_queries.insert_crossings(session, book.tenant_id, rows)
    if made:
        arguments = {"tenant_id": book.tenant_id.hex, "crossings": sorted(one.hex for one in made)}
        await outbox.add(session, TELL, arguments)
        _log.info("budget.crossed", tenant_id=book.tenant_id.hex, crossings=len(made))
    return len(made)


async def look(sessions: Sessions, tenant_ids: Sequence[UUID], uses: Mapping[UUID, Collection[Use]]) -> int:
    """Emit the crossings of these tenants' budgets that their uses count on; returns how many are new."""
    async with transaction(sessions) as session:
        books = await spend_limits.books_of(session, tenant_ids)
        chosen = await alert_settings.of_many(session, [book.tenant_id for book in books])
    new = 0
    for book in books:
        async with transaction(sessions) as session:
            new += await evaluate(session, book, uses[book.tenant_id], chosen[book.tenant_id].thresholds)
    return new


async def users(session: AsyncSession, book: SpendBook, at: datetime) -> list[tuple[UUID, UUID]]:
    """Return project and key of all usage that counts on a budget in the periods an instant is in."""
    since = None if book.has_totals else window_of(LimitMetric.SPEND_PER_MONTH, book.zone, at)[0]
    return await budget_queries.users_since(session, book.tenant_id, since)


async def sweep(sessions: Sessions, clock: Clock) -> int:
    """Look at every budget there is, in the period it is now and in that of a day ago; returns how many crossed."""
    new, last = 0, UUID(int=0)
    while True:
        async with transaction(sessions) as session:
            page = await spend_limits.tenants_with_budgets(session, last, PAGE)
        new += await sweep_these(sessions, page, clock)
        if len(page) < PAGE:
            return new
        last = page[-1]


async def sweep_these(sessions: Sessions, tenant_ids: Sequence[UUID], clock: Clock) -> int:
    """The same for the budgets of these tenants."""
    new, instants = 0, (clock.now(), clock.now() - timedelta(days=1))
    async with transaction(sessions) as session:
        books = await spend_limits.books_of(session, tenant_ids)
    for book in books:
        async with transaction(sessions) as session:
            who = await users(session, book, instants[1])
            uses = [(project, key, at) for project, key in who for at in instants]
            chosen = await alert_settings.get(session, book.tenant_id)
            new += await evaluate(session, book, uses, chosen.thresholds)
    return new


async def status(
    session: AsyncSession, tenant_id: UUID, projects: Collection[UUID] | None, now: datetime
) -> list[Spending]:
    """Return the budgets of a tenant that are in use, as they stand; with `projects` only theirs and their keys'.

    The nearest to its end comes first.
    """
    found: list[Spending] = []
    for book in await spend_limits.books_of(session, [tenant_id]):
        nobody = (UUID(int=0), UUID(int=0), now)  # so that the tenant's own budgets are there without any use
        uses = [nobody, *((project, key, now) for project, key in await users(session, book, now))]
        found += await spendings(session, book, uses)
    shown = [
        one for one in found if one.budget.owner_id.int and (projects is None or one.budget.project_id in projects)
    ]
    return sorted(shown, key=_used, reverse=True)


def _used(one: Spending) -> tuple[int, str]:
    limit = one.budget.limit_pico
    return one.spent_pico * PARTS // limit if limit else PARTS, str(one.budget.owner_id)


async def search(
    session: AsyncSession, tenant_id: UUID, projects: Collection[UUID] | None, *, after: UUID | None, limit: int
) -> list[Crossing]:
    """Return crossings newest first; with `projects` only those of their budgets and their keys'."""
    rows = await alert_queries.crossings(session, tenant_id, projects, after=after, limit=limit)
    return [_crossing(row) for row in rows]


async def named(session: AsyncSession, tenant_id: UUID, ids: Sequence[UUID]) -> list[Crossing]:
    return [_crossing(row) for row in await alert_queries.crossings_named(session, tenant_id, ids)]


def _crossing(row: Row[tuple[object, ...]]) -> Crossing:
    return Crossing(
        row.id,
        row.level,
        row.owner_id,
        row.project_id,
        row.metric,
        row.mode,
        row.model,
        (row.window_start, row.window_end),
        row.threshold,
        int(row.limit_pico),
        int(row.spent_pico),
        row.crossed_at,
    )
