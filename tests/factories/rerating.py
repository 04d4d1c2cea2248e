"""Re-rating for tests: two price versions, and runs driven to their end without a worker."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from billing import price_book, rerating, rerating_post
from billing.price_table import VersionPrices
from billing.rerating import Run, Wanted
from billing.types import Meter, PriceItem
from core.db import Sessions, transaction
from core.ids import new_uuid
from core.tiers import Tier
from tenants.types import Responsible
from tests.factories.lots import ASKER

BEGIN = datetime(2025, 1, 1, tzinfo=UTC)
END = datetime(2027, 1, 1, tzinfo=UTC)
NOW = datetime(2025, 12, 11, 12, 0, tzinfo=UTC)
NO_LIMIT = 10**30


async def version(sessions: Sessions, items: list[PriceItem]) -> VersionPrices:
    """Another published version of the one book, of these prices alone."""
    now = datetime.now(UTC) + timedelta(microseconds=new_uuid().int % 10**6)
    async with transaction(sessions) as session:
        book = (await price_book.list_books(session))[0]
        draft = await price_book.create_draft(session, book.id, items, complete=True)
        await price_book.publish(session, draft, now=now)
        found = await price_book.load_version(session, draft)
    assert found is not None
    return found


def wanted(wrong: VersionPrices, right: VersionPrices, *, charge_more: bool = False, **chosen: object) -> Wanted:
    since, until = chosen.pop("since", BEGIN), chosen.pop("until", END)
    assert isinstance(since, datetime)
    assert isinstance(until, datetime)
    models, tiers, meters = (chosen.get(name, ()) for name in ("models", "tiers", "meters"))
    assert isinstance(models, tuple)
    assert isinstance(tiers, tuple)
    assert isinstance(meters, tuple)
    return Wanted(
        (wrong.version_id,),
        right.version_id,
        since,
        until,
        models,
        tuple(Tier(tier) for tier in tiers),
        tuple(Meter(meter) for meter in meters),
        charge_more,
    )


async def ask(sessions: Sessions, what: Wanted, key: str = "", *, note: str = "wrong price") -> Run:
    async with transaction(sessions) as session:
        return await rerating.ask(session, what, by=ASKER, note=note, idempotency_key=key or new_uuid().hex, now=NOW)


async def moved(session: AsyncSession, tenant_id: UUID) -> None:
    """What a worker would do to the tenant's figure."""
    await session.execute(text("SELECT 1"), {"tenant": tenant_id})


async def drive(
    sessions: Sessions, run_id: UUID, *, alone_max_pico: int = NO_LIMIT, now: datetime = NOW, batches: int = 1000
) -> Run:
    """Do up to so many batches."""
    prices = rerating_post.Prices()
    for _ in range(batches):
        if not await rerating_post.step(
            sessions, run_id, prices, alone_max_pico=alone_max_pico, now=now, on_moved=moved
        ):
            break
    async with transaction(sessions) as session:
        return await rerating.get(session, run_id)


async def execute(
    sessions: Sessions, run_id: UUID, *, by: Responsible = ASKER, alone_max_pico: int = NO_LIMIT, now: datetime = NOW
) -> Run:
    async with transaction(sessions) as session:
        return await rerating.execute(session, run_id, by=by, alone_max_pico=alone_max_pico, now=now)


async def rerate(sessions: Sessions, what: Wanted, *, now: datetime = NOW) -> Run:
    """Ask, count, execute, to the end."""
    run = await ask(sessions, what)
    await drive(sessions, run.id, now=now)
    await execute(sessions, run.id, now=now)
    return await drive(sessions, run.id, now=now)
