"""`tidegate ledger verify`: add the books up again from their smallest rows, and name the first that is wrong."""

import asyncio
import sys
from collections.abc import Callable
from uuid import UUID

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from billing import periods, seals, verify_queries, verify_rerating
from billing.price_table import VersionPrices, content_sha256
from billing.seals import SealHead
from billing.spool_format import decode
from billing.types import PriceSchedule
from core.db import create_engine, create_sessions, transaction
from core.errors import PlatformError
from core.settings import Settings
from core.tiers import Tier


class Finding(msgspec.Struct, frozen=True):
    """A row that is wrong."""

    table: str
    row: str
    problem: str


async def verify(session: AsyncSession, anchor: SealHead | None = None) -> Finding | None:
    """Return the first wrong row, or None when all is right. Takes the transaction for itself, from its beginning.

    What seals cover against them, and these against the anchor; closed months; then price versions against their
    hashes; every event and every re-rating of one rated again; transfers against accounts, kinds and what was asked
    for; balances against transfers and bounds; debits against credits; events against transfers and rollups;
    quarantined events against what the gateway wrote; as many transactions as each tenant had.
    """
    await verify_queries.freeze(session)
    altered = await _sealed(session, anchor)
    if altered is not None:
        return altered
    finding, prices = await _price_versions(session)
    if finding is not None:
        return finding
    misrated = await _rates(session, prices)
    if misrated is not None:
        return Finding("usage_event", misrated.row, misrated.problem)
    wrong_line = await verify_rerating.first_misrated(session, prices)
    if wrong_line is not None:
        return Finding("usage_rerating", *wrong_line)
    for check in verify_queries.CHECKS:
        wrong = await verify_queries.first_wrong(session, check)
        if wrong is not None:
            return Finding(check, wrong.row, wrong.problem)
    return await _quarantine(session)


async def _sealed(session: AsyncSession, anchor: SealHead | None) -> Finding | None:
    """Seals and closed months: what was right once must still be the same."""
    broken = await seals.first_broken(session, anchor)
    if broken is not None:
        return Finding("ledger_seal", broken.row, broken.problem)
    changed = await periods.first_changed(session)
    if changed is not None:
        return Finding("ledger_period", f"{changed.month:%Y-%m}", "its trial balance is not what it was when it closed")
    return None


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


async def _rates(session: AsyncSession, prices: dict[UUID, VersionPrices]) -> Row[tuple[str, str]] | None:
    schedules: list[tuple[UUID, UUID, PriceSchedule]] = []
    for offer in await verify_queries.priced_offers(session):
        version = prices.get(offer.price_version_id)
        schedule = version.schedule(offer.model_id, Tier(offer.tier), offer.tenant_id) if version else None
        if schedule is not None:
            schedules.append((offer.tenant_id, offer.model_id, schedule))
    return await verify_queries.first_misrated(session, schedules)


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


def main(settings: Settings, say: Callable[[str], None] = _to_stdout) -> int:
    """Verify the books of an installation; returns the exit status, 0 when all is right."""

    async def check() -> tuple[Finding | None, dict[str, int]]:
        engine = create_engine(settings.database)
        try:
            async with transaction(create_sessions(engine)) as session:
                return await verify(session, seals.load_anchor(settings.home)), await verify_queries.counts(session)
        finally:
            await engine.dispose()

    finding, counts = asyncio.run(check())
    if finding is not None:
        say(f"wrong: {finding.table}: {finding.row}: {finding.problem}")
        return 1
    say("the books are right: " + ", ".join(f"{count:,} {table} rows" for table, count in counts.items()))
    return 0
