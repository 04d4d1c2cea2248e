"""`tidegate ledger verify`: add the books up again from their smallest rows, and name the first that is wrong."""

import asyncio
import sys
from collections.abc import Callable
from datetime import date
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from billing import (
    anchors,
    day_chain,
    periods,
    seal_queries,
    seals,
    usage_day_queries,
    verify_queries,
    verify_rerating,
    verify_usage_queries,
)
from billing.price_table import VersionPrices, content_sha256
from billing.seals import SealHead
from billing.spool_format import decode
from billing.types import PriceSchedule
from core.db import create_engine, create_sessions, transaction
from core.errors import PlatformError
from core.settings import Settings
from core.tiers import Tier

Tell = Callable[[str], None]


class Finding(msgspec.Struct, frozen=True):
    """A row that is wrong."""

    table: str
    row: str
    problem: str


def _quiet(_: str) -> None:
    """Say nothing."""


async def verify(session: AsyncSession, anchor: SealHead | None = None, tell: Tell = _quiet) -> Finding | None:
    """Return the first wrong row, or None when all is right. Takes the transaction for itself, from its beginning.

    Memory is bounded here and in Postgres, however large the books. `tell` is given a line for each step.
    """
    await verify_queries.freeze(session)
    return await check(session, anchor, tell)


async def check(session: AsyncSession, anchor: SealHead | None = None, tell: Tell = _quiet) -> Finding | None:
    """Do the same in a transaction that looks at one instant.

    What seals cover against them, and these against the anchor; closed months; days that were dropped; then price
    versions against their hashes; every event and every re-rating of one rated again; transfers against accounts, kinds
    and what was asked for; balances against transfers and bounds; debits against credits; events against transfers and
    rollups; quarantined events against what the gateway wrote and what was decided; as many transactions as each
    tenant had; what no seal covers against what waits for one.
    """
    tell("seals and closed months")
    altered = await _sealed(session, anchor)
    if altered is not None:
        return altered
    finding, admitted = await _priced(session, tell)
    if finding is not None:
        return finding
    for name in verify_queries.CHECKS:
        tell(name)
        wrong = await verify_queries.first_wrong(session, name)
        if wrong is not None:
            return Finding(name, wrong.row, wrong.problem)
    finding = await _usage(session, admitted, tell)
    if finding is not None:
        return finding
    tell("usage_quarantine")
    finding = await _quarantine(session)
    if finding is not None:
        return finding
    tell("what no seal covers")
    skipped = await seal_queries.first_skipped(session)
    return None if skipped is None else Finding("seal_queue", skipped, "no seal covers it and it waits for none")


async def _sealed(session: AsyncSession, anchor: SealHead | None) -> Finding | None:
    """Seals and closed months: what was right once must still be the same."""
    broken = await seals.first_broken(session, anchor)
    if broken is not None:
        return Finding("ledger_seal", broken.row, broken.problem)
    changed = await periods.first_changed(session)
    if changed is not None:
        return Finding("ledger_period", f"{changed.month:%Y-%m}", "its trial balance is not what it was when it closed")
    dropped = await day_chain.first_broken(session)
    return None if dropped is None else Finding("usage_day", *dropped)


async def _priced(session: AsyncSession, tell: Tell) -> tuple[Finding | None, dict[date, list[date]]]:
    """Price versions against their hashes, and with them re-ratings and events; see `_rates`."""
    tell("price versions")
    finding, prices = await _price_versions(session)
    if finding is not None:
        return finding, {}
    tell("usage_rerating")
    wrong_line = await verify_rerating.first_misrated(session, prices)
    if wrong_line is not None:
        return Finding("usage_rerating", *wrong_line), {}
    await verify_queries.read_all(session)
    return await _rates(session, prices, tell)


async def _price_versions(session: AsyncSession) -> tuple[Finding | None, dict[UUID, VersionPrices]]:
    prices = {}
    for row in await verify_queries.published_versions(session):
        try:
            version = await verify_queries.version_facts(session, row)
        except ValueError as error:
            return Finding("price_version", str(row.id), f"a price of it cannot be read: {error}"), {}
        if content_sha256(version) != row.content_sha256:
            return Finding("price_version", str(version.id), "its prices are not those that were published"), {}
        try:
            prices[version.id] = verify_queries.prices(version)
        except PlatformError as error:
            return Finding("price_version", str(version.id), error.message), {}
    return None, prices


async def _rates(
    session: AsyncSession, prices: dict[UUID, VersionPrices], tell: Tell
) -> tuple[Finding | None, dict[date, list[date]]]:
    """Compare every event with its digest and rate it again, day by day.

    Also return per UTC day of admission the days whose events were admitted.
    """
    admitted: dict[date, list[date]] = {}
    days = await usage_day_queries.days(session)
    for number, day in enumerate(days, 1):
        tell(f"usage_event of {day}, day {number} of {len(days)}")
        edited = await verify_usage_queries.first_edited(session, day)
        if edited is not None:
            return Finding("usage_event", edited.row, edited.problem), {}
        schedules: dict[tuple[UUID, UUID, Tier, UUID], PriceSchedule] = {}
        for offer in await verify_usage_queries.offers(session, day):
            if day not in admitted.setdefault(offer.admitted_on, []):
                admitted[offer.admitted_on].append(day)
            version = prices.get(offer.price_version_id)
            schedule = version.schedule(offer.model_id, Tier(offer.tier), offer.tenant_id) if version else None
            if schedule is not None:
                schedules[offer.tenant_id, offer.model_id, schedule.tier, schedule.price_version_id] = schedule
        rated = [(tenant, model, schedule) for (tenant, model, _, _), schedule in schedules.items()]
        wrong = await verify_usage_queries.first_misrated(session, day, rated)
        if wrong is not None:
            return Finding("usage_event", wrong.row, wrong.problem), {}
    return None, admitted


async def _usage(session: AsyncSession, admitted: dict[date, list[date]], tell: Tell) -> Finding | None:
    """Events, and what is kept of dropped ones, against transactions and rollups."""
    tell("usage_event and ledger_transfer")
    unmoved = await verify_usage_queries.first_unmoved(session)
    if unmoved is not None:
        return Finding(unmoved.table, unmoved.row, unmoved.problem)
    kept = await verify_usage_queries.kept_dates(session)
    dates = sorted(await verify_usage_queries.rollup_dates(session) | kept | admitted.keys())
    for number, on in enumerate(dates, 1):
        tell(f"usage_rollup of {on}, day {number} of {len(dates)}")
        wrong = await verify_usage_queries.first_unrolled(session, on, admitted.get(on, []), with_kept=on in kept)
        if wrong is not None:
            return Finding("usage_rollup", wrong.row, wrong.problem)
    return None


async def _quarantine(session: AsyncSession) -> Finding | None:
    tenant_id = event_id = UUID(int=0)
    while page := await verify_queries.quarantine_after(session, tenant_id, event_id):
        for row in page:
            tenant_id, event_id = row.tenant_id, row.id
            try:
                event = decode(row.payload)
            except msgspec.DecodeError:
                return Finding("usage_quarantine", str(event_id), "its payload cannot be read")
            if (event.tenant_id, event.id, event.amount_pico) != (tenant_id, event_id, int(row.amount_pico)):
                return Finding("usage_quarantine", str(event_id), "it differs from what the gateway wrote")
    return None


def _to_stdout(line: str) -> None:
    sys.stdout.write(line + "\n")


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"verify: {line}\n")
    sys.stderr.flush()


def main(settings: Settings, say: Callable[[str], None] = _to_stdout, tell: Tell = _to_stderr) -> int:
    """Verify the books of an installation; returns the exit status, 0 when all is right."""

    async def work() -> tuple[Finding | None, dict[str, int]]:
        engine = create_engine(settings.database)
        try:
            async with transaction(create_sessions(engine)) as session:
                found = await verify(session, anchors.load(settings.home), tell)
                return found, await verify_queries.counts(session)
        finally:
            await engine.dispose()

    finding, counts = asyncio.run(work())
    if finding is not None:
        say(f"wrong: {finding.table}: {finding.row}: {finding.problem}")
        return 1
    say("the books are right: " + ", ".join(f"{count:,} {table} rows" for table, count in counts.items()))
    return 0
