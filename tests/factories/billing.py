"""Money for tests: a tenant with credit, published prices, usage events."""

from datetime import UTC, datetime
from uuid import UUID

from billing import ledger, price_book, pricing
from billing.credits import balance, top_up
from billing.price_table import VersionPrices, unit_price_pico
from billing.types import BillingMode, CountSource, Meter, Outcome, PriceItem, PriceSchedule, UsageEvent
from core.clock import SystemClock
from core.db import Sessions, transaction
from core.ids import new_uuid
from core.money import Currency, parse_pico
from core.tiers import Tier
from core.usage import TokenUsage

MODEL = UUID("01890000-0000-7000-8000-00000000aaaa")
PROJECT = UUID("01890000-0000-7000-8000-00000000bbbb")
KEY = UUID("01890000-0000-7000-8000-00000000cccc")
USAGE = TokenUsage(2105, 10240, 0, 360, 640)
PRICES = {"input": "2.00", "cached_input": "0.20", "output": "6.00"}  # USAGE costs exactly 0.012258


def items(
    prices: dict[str, str], model_id: UUID = MODEL, tier: Tier = Tier.STANDARD, tenant_id: UUID | None = None
) -> list[PriceItem]:
    """Price items from what people write, per million tokens."""
    return [
        PriceItem(model_id, tier, Meter(meter), unit_price_pico(Meter(meter), price), tenant_id)
        for meter, price in prices.items()
    ]


async def publish_prices(
    sessions: Sessions, price_items: list[PriceItem] | None = None, currency: Currency = Currency.USD
) -> VersionPrices:
    """A book with one version in force now."""
    async with transaction(sessions) as session:
        book = await price_book.create_book(session, "list", currency)
        draft = await price_book.create_draft(session, book, price_items or items(PRICES))
        await price_book.publish(session, draft, now=datetime.now(UTC))
    async with transaction(sessions) as session:
        version = await price_book.load_version(session, draft)
    assert version is not None
    return version


async def tenant(
    sessions: Sessions, credit: str = "0", *, currency: Currency = Currency.USD, limit: str | None = None
) -> UUID:
    """A prepaid tenant with that much credit, or with `limit` a postpaid one."""
    tenant_id = new_uuid()
    async with transaction(sessions) as session:
        if limit is None:
            await ledger.open_tenant(session, tenant_id, currency)
        else:
            await ledger.open_tenant(session, tenant_id, currency, BillingMode.POSTPAID, parse_pico(limit))
        if parse_pico(credit):
            await top_up(session, tenant_id, parse_pico(credit), idempotency_key="first", actor="test")
    return tenant_id


def uuid7_at(seconds: int, number: int = 0) -> UUID:
    """A UUIDv7 made that many seconds after 1970."""
    return UUID(int=(seconds * 1000) << 80 | 7 << 76 | 2 << 62 | number)


async def add_credit(sessions: Sessions, tenant_id: UUID, amount: str, key: str) -> None:
    async with transaction(sessions) as session:
        await top_up(session, tenant_id, parse_pico(amount), idempotency_key=key, actor="test")


async def available(sessions: Sessions, tenant_id: UUID) -> int:
    async with transaction(sessions) as session:
        return (await balance(session, tenant_id)).available_pico


def a_version() -> VersionPrices:
    """Prices that nobody published."""
    return VersionPrices(new_uuid(), Currency.USD, items(PRICES))


def schedule(version: VersionPrices, tenant_id: UUID, tier: Tier = Tier.STANDARD) -> PriceSchedule:
    found = version.schedule(MODEL, tier, tenant_id)
    assert found is not None
    return found


def event(
    tenant_id: UUID,
    s: PriceSchedule,
    usage: TokenUsage = USAGE,
    *,
    outcome: Outcome = Outcome.COMPLETED,
    event_id: UUID | None = None,
    amount_pico: int | None = None,
    model: str = "demo",
    upstream_id: str = "",
    quarantine: str = "",
    count_source: CountSource = CountSource.ENGINE,
) -> UsageEvent:
    """An event as the gateway would write it now, rated at `s`."""
    now_us = SystemClock().now_us()
    return UsageEvent(
        event_id or new_uuid(),
        tenant_id,
        PROJECT,
        KEY,
        MODEL,
        MODEL,
        MODEL,
        model,
        "chat",
        s.tier,
        s.currency,
        s.price_version_id,
        outcome,
        200,
        pricing.charge(usage, s, outcome) if amount_pico is None else amount_pico,
        now_us - 1_000_000,
        now_us,
        usage,
        count_source,
        upstream_id=upstream_id,
        quarantine=quarantine,
    )
