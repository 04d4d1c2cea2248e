"""One batch of usage events into the ledger: dedupe, rollup, transfers and balances in one transaction."""

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import psycopg
from sqlalchemy import Row
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from billing import (
    assess,
    idempotency,
    ledger,
    lots,
    posting_queries,
    price_book,
    quarantine_queries,
    queries,
    usage_day_queries,
)
from billing.assess import FIRST_DAY
from billing.ledger import Charge
from billing.metrics import PosterMetrics
from billing.price_table import VersionPrices
from billing.spool_format import encode_payload
from billing.types import Balance, Transaction, UsageEvent
from core.clock import Clock
from core.db import Sessions, transaction
from core.ids import new_uuid
from core.logging import get_logger
from core.money import Currency
from core.tiers import Tier

PRICE_CACHE_MAX = 1000
HELD_LOGGED_MAX = 10  # per batch
DAYS_AHEAD = 7
_log = get_logger(__name__)


class Posted(msgspec.Struct, frozen=True):
    """What became of a batch. All of its events are in the database now, each once."""

    new: int
    repeated: int
    quarantined: int
    settlements: tuple[tuple[UUID, Balance | None, tuple[UUID, ...]], ...]  # tenant, balance after, requests


async def ensure_partitions(sessions: Sessions, clock: Clock, ahead: int = DAYS_AHEAD) -> None:
    """Make the partitions of today and the days ahead, so that posting seldom has to."""
    today = clock.now().astimezone(UTC).date()
    for day in range(ahead + 1):
        async with transaction(sessions) as session:
            await posting_queries.ensure_partition(session, today + timedelta(days=day))


class Posting:
    """Posts batches; remembers published prices, which never change, and partitions that exist."""

    def __init__(self, sessions: Sessions, clock: Clock, metrics: PosterMetrics) -> None:
        self._sessions = sessions
        self._metrics = metrics
        self._clock = clock
        self._prices: dict[UUID, VersionPrices] = {}
        self._days: set[int] = set()

    async def post(self, events: Sequence[UsageEvent]) -> list[Posted]:
        """Post the events, however often they are given, and return what became of them.

        An event that Postgres refuses by its values is found by halving and put into quarantine, so that it does not
        hold up the others.

        Raises:
            sqlalchemy.exc.DBAPIError, psycopg.Error, OSError: Postgres is away or does not work; nothing of the batch
                or only whole halves of it are posted, and posting it again is safe.
        """
        try:
            return [await self._post(events, "")]
        except (DBAPIError, psycopg.Error) as error:
            if not refuses_values(error):
                raise
            if len(events) == 1:
                _log.error("usage.event_refused", event_id=events[0].id.hex, sqlstate=_sqlstate(error))
                return [await self._post(events, f"Postgres refused it ({_sqlstate(error)})")]
        half = len(events) // 2
        return [*await self.post(events[:half]), *await self.post(events[half:])]

    async def _make_days(self, days: Sequence[int]) -> None:
        for day in days:
            if day not in self._days:
                async with transaction(self._sessions) as session:
                    await posting_queries.ensure_partition(session, date.fromordinal(day))
                self._days.add(day)

    async def _post(self, events: Sequence[UsageEvent], refused: str) -> Posted:
        tenants = {event.tenant_id for event in events}
        today = self._clock.now().astimezone(UTC).toordinal()
        days = {assess.day_number(event.id) for event in events}
        async with transaction(self._sessions) as session:
            await self._load_prices(session, events)
            closed = await _closed(session, [day for day in days if FIRST_DAY <= day < today])
        await self._make_days([day for day in sorted(days) if assess.day_in_range(day, today)])
        async with transaction(self._sessions) as session:
            profiles = {row.tenant_id: row for row in await posting_queries.lock_profiles(session, tenants)}
            currencies = {tenant: Currency(row.currency) for tenant, row in profiles.items()}
            objections = [
                refused
                or assess.objection(
                    event, self._prices.get(event.price_version_id), currencies.get(event.tenant_id), today, closed
                )
                for event in events
            ]
            events = await idempotency.bill_once(session, events, objections)
            names: dict[tuple[UUID, int, int], str] = {}  # a transaction per tenant, day and month of admission
            lines = "".join(
                assess.copy_line(
                    event,
                    _name(names, event),
                    assess.min_charge(event, self._prices.get(event.price_version_id)),
                )
                for event, objected in zip(events, objections, strict=True)
                if not objected
            )
            new = 0
            if lines:
                await posting_queries.copy_incoming(session, lines.encode())
                new = await self._post_incoming(session, profiles)
            held = [(event, why) for event, why in zip(events, objections, strict=True) if why]
            await quarantine_queries.insert_quarantine(session, [quarantine_row(event, why) for event, why in held])
            balances = {balance.tenant_id: balance for balance in await queries.balances(session, sorted(tenants))}
        requests: dict[UUID, list[UUID]] = {}
        for event in events:
            requests.setdefault(event.tenant_id, []).append(event.id)
        self._count(new, len(events) - len(held) - new, held)
        return Posted(
            new,
            len(events) - len(held) - new,
            len(held),
            tuple((tenant, balances.get(tenant), tuple(ids)) for tenant, ids in requests.items()),
        )

    async def _post_incoming(self, session: AsyncSession, profiles: Mapping[UUID, Row[Any]]) -> int:
        new, overruns = await post_incoming(session, profiles)
        for tenant_id, overrun_pico in overruns:
            self._metrics.overruns.inc()
            _log.warning("usage.credit_overrun", tenant_id=tenant_id.hex, overrun_pico=overrun_pico)
        return new

    def _count(self, new: int, repeated: int, held: Sequence[tuple[UsageEvent, str]]) -> None:
        self._metrics.posted.inc(new)
        self._metrics.repeated.inc(repeated)
        self._metrics.quarantined.inc(len(held))
        for event, why in held[:HELD_LOGGED_MAX]:
            _log.warning("usage.event_quarantined", event_id=event.id.hex, tenant_id=event.tenant_id.hex, reason=why)

    async def _load_prices(self, session: AsyncSession, events: Sequence[UsageEvent]) -> None:
        if len(self._prices) > PRICE_CACHE_MAX:
            self._prices.clear()
        for version_id in {event.price_version_id for event in events} - self._prices.keys():
            version = await price_book.load_version(session, version_id)
            if version is not None:
                self._prices[version_id] = version


async def post_incoming(session: AsyncSession, profiles: Mapping[UUID, Row[Any]]) -> tuple[int, list[tuple[UUID, int]]]:
    """Post the events that were copied in: those that are new, their rollup, transfers and balances.

    The caller holds the locks of `profiles`.

    Returns:
        how many were new; and per transaction that exceeded its credit, its tenant and by how many pico.
    """
    inserted = await posting_queries.insert_incoming(session)
    if not inserted:
        return 0, []
    sources = await lots.sources_of(session, {row.tenant_id for row in inserted})
    transactions, overruns = [], []
    for (tenant_id, tx_id), rows in _by_transaction(inserted).items():
        profile = profiles[tenant_id]
        transfers, overrun = ledger.usage_transfers(
            [_charge(row) for row in rows],
            sources.get(tenant_id, ()),
            revenue=profile.revenue_account,
            min_charges=profile.min_charge_account,
            overrun=profile.overrun_account,
        )
        if overrun:
            overruns.append((tenant_id, overrun))
        transactions.append(
            Transaction(
                tx_id,
                tenant_id,
                "usage",
                Currency(profile.currency),
                transfers,
                effective_at=rows[0].minute,
                usage_sha256=bytes(rows[0].usage_sha256),
            )
        )
    await ledger.post(session, transactions)
    return sum(row.events for row in inserted), overruns


def _charge(row: Row[Any]) -> Charge:
    lifted = int(row.min_charge)
    return Charge(int(row.amount) - lifted, row.model_id, Tier(row.tier), row.minute, lifted)


async def _closed(session: AsyncSession, days: Sequence[int]) -> frozenset[int]:
    """Return those of these days (ordinals) that take no more events."""
    if not days:
        return frozenset()
    rows = await usage_day_queries.known(session, [date.fromordinal(day) for day in days])
    return frozenset(row.day.toordinal() for row in rows)


def _name(names: dict[tuple[UUID, int, int], str], event: UsageEvent) -> str:
    key = event.tenant_id, assess.day_number(event.id), assess.month_number(event.admitted_at_us)
    found = names.get(key)
    if found is None:
        found = names[key] = new_uuid().hex
    return found


def _by_transaction(rows: Sequence[Row[Any]]) -> dict[tuple[UUID, UUID], list[Row[Any]]]:
    found: dict[tuple[UUID, UUID], list[Row[Any]]] = {}
    for row in rows:
        found.setdefault((row.tenant_id, row.tx_id), []).append(row)
    return found


def quarantine_row(event: UsageEvent, why: str) -> dict[str, object]:
    admitted_us = min(max(event.admitted_at_us, 0), assess.LAST_US)
    return {
        "tenant_id": event.tenant_id,
        "id": event.id,
        "reason": assess.plain(why),
        "amount_pico": event.amount_pico,
        "admitted_at": datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=admitted_us),
        "model": assess.plain(event.model),
        "outcome": event.outcome.value,
        "raw_usage": event.raw_usage.replace("\0", ""),
        "payload": encode_payload(event),
    }


def _sqlstate(error: DBAPIError | psycopg.Error) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else error
    return str(getattr(cause, "sqlstate", "") or "")


def refuses_values(error: DBAPIError | psycopg.Error) -> bool:
    """Whether Postgres works and refuses the batch for what is in it (data or integrity, classes 22 and 23)."""
    return _sqlstate(error)[:2] in {"22", "23"}
