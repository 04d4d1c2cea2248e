"""What a list of prices would have done to recorded usage: what each tenant paid, and what it would have paid.

Usage is rated where the list would have priced it: usage that a version of its own book priced; of a currency's list,
also usage of tenants to whom it gives own prices; of a plan's book, also usage of tenants who are on the plan today and
were priced by the list, as far as the book names model and tier. Other usage is not in the answer.

Event by event while events are kept, else from the sums by minute, where that is exact. What is neither is left out and
told: a minimum charge, a step or a price per request needs the events, and so does a call that its client left.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from billing import errors, price_book, price_preview_queries, price_queries
from billing.price_preview_queries import Offer
from billing.price_table import VersionPrices, resolve
from billing.types import PriceSchedule
from core.db import Sessions, transaction
from core.money import Currency
from core.tiers import Tier
from tenants import plans

DAYS_MAX = 400
GROUPS_MAX = 500_000  # by tenant, model, tier and version, of one answer
DAY = timedelta(days=1)

OnDay = Callable[[int, int], None]
"""Told after each day how many are done, of how many."""


class Sums(msgspec.Struct):
    """Of some usage. Pico. What is left out has a part of its own and is in no other figure."""

    by_event: int = 0  # requests
    by_minute: int = 0
    paid_pico: int = 0
    would_pico: int = 0
    left_out: int = 0  # the events are needed, and are no longer kept
    left_out_paid_pico: int = 0
    unpriced: int = 0  # the list has no price for it: such calls would have been refused
    unpriced_paid_pico: int = 0

    @property
    def difference_pico(self) -> int:
        return self.would_pico - self.paid_pico

    @property
    def requests(self) -> int:
        return self.by_event + self.by_minute + self.left_out + self.unpriced

    def add(self, other: "Sums") -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class TenantImpact(msgspec.Struct):
    """Of one tenant; `lines` by model and tier, the largest difference first."""

    tenant_id: UUID
    total: Sums
    lines: list[tuple[UUID, Tier, Sums]]


class Impact(msgspec.Struct):
    """The whole answer. `tenants` come by absolute difference, the largest first, then by id."""

    version_id: UUID
    currency: Currency
    start: date
    end: date
    total: Sums
    by_model: dict[UUID, Sums]
    by_tier: dict[Tier, Sums]
    tenants: list[TenantImpact]


class _List(msgspec.Struct):
    """The list to try, and what is needed to see which usage it would have priced."""

    prices: VersionPrices
    book_id: UUID
    for_plan: bool
    on_plan: frozenset[UUID]
    versions: dict[UUID, tuple[UUID, VersionPrices]]  # that priced the usage: their book and prices


async def requests_in(sessions: Sessions, start: date, end: date) -> int:
    """Return how many requests were recorded on these days: what a preview would look at, at most."""
    async with transaction(sessions) as session:
        return sum(row.requests for row in await price_preview_queries.offers(session, *_bounds(start, end)))


async def preview(
    sessions: Sessions, version_id: UUID, start: date, end: date, *, on_day: OnDay | None = None
) -> Impact:
    """Rate the usage of the days from `start` to `end` (UTC, both included) at a version's prices.

    Memory holds sums by tenant, model and tier. Each day is a transaction of its own.

    Raises:
        PlatformError: NOT_FOUND, INVALID_PRICE (the draft lacks a price), INVALID_RANGE.
    """
    if not 0 <= (end - start).days < DAYS_MAX:
        raise errors.invalid_range(f"The days go from one to the same or a later one, {DAYS_MAX} at most.")
    async with transaction(sessions) as session:
        offers = await price_preview_queries.offers(session, *_bounds(start, end))
        if len(offers) > GROUPS_MAX:
            raise errors.invalid_range("These days have too many tenants and models for one answer. Take fewer days.")
        tried = await _load(session, version_id, {row.price_version_id for row in offers})
    rated, unpriced = _sorted_out(
        tried, [(row.tenant_id, row.model_id, row.tier, row.price_version_id) for row in offers]
    )
    found: dict[tuple[UUID, UUID, Tier], Sums] = {}
    days = (end - start).days + 1
    for number in range(days):
        since, until = _bounds(start + number * DAY, start + number * DAY)
        async with transaction(sessions) as session:
            async for key, sums in _day(session, since, until, rated, unpriced):
                found.setdefault(key, Sums()).add(sums)
        if on_day is not None:
            on_day(number + 1, days)
    return _answer(tried.prices, (start, end), found)


def _bounds(start: date, end: date) -> tuple[datetime, datetime]:
    return datetime.combine(start, time(), UTC), datetime.combine(end + DAY, time(), UTC)


async def _load(session: AsyncSession, version_id: UUID, priced_by: set[UUID]) -> _List:
    row = await price_queries.version(session, version_id)
    book = None if row is None else await price_queries.book(session, row.book_id)
    if book is None:
        raise errors.no_version(version_id)
    items = resolve(await price_queries.items(session, version_id), await price_queries.discounts(session, version_id))
    prices = VersionPrices(version_id, Currency(book.currency), items)
    versions = {}
    for one in priced_by:
        known, at = await price_queries.version(session, one), await price_book.load_version(session, one)
        if known is not None and at is not None and at.currency is prices.currency:
            versions[one] = (known.book_id, at)
    on_plan = await plans.tenants_with_book(session, book.id) if book.for_plan else frozenset[UUID]()
    return _List(prices, book.id, book.for_plan, on_plan, versions)


def _sorted_out(tried: _List, offers: Sequence[Offer]) -> tuple[list[tuple[Offer, PriceSchedule]], list[Offer]]:
    """Return the offers with the prices to rate them at, and those that the list should price and does not."""
    rated, unpriced = [], []
    for offer in offers:
        tenant_id, model_id, tier, version_id = offer[0], offer[1], Tier(offer[2]), offer[3]
        if version_id not in tried.versions:
            continue
        book_id, prices = tried.versions[version_id]
        own_book = book_id == tried.book_id
        schedule = None
        if own_book:
            schedule = tried.prices.schedule(model_id, tier, tenant_id)
        elif not tried.for_plan:
            schedule = tried.prices.own(model_id, tier, tenant_id)
        elif tenant_id in tried.on_plan and prices.own(model_id, tier, tenant_id) is None:
            schedule = tried.prices.schedule(model_id, tier, tenant_id)
        if schedule is not None:
            rated.append((offer, schedule))
        elif own_book:
            unpriced.append(offer)
    return rated, unpriced


async def _day(
    session: AsyncSession,
    since: datetime,
    until: datetime,
    rated: Sequence[tuple[Offer, PriceSchedule]],
    unpriced: Sequence[Offer],
) -> AsyncIterator[tuple[tuple[UUID, UUID, Tier], Sums]]:
    if rated:
        async for row in price_preview_queries.day(session, since, until, rated):
            sums = Sums(
                int(row.by_event),
                int(row.by_minute),
                int(row.paid),
                int(row.would),
                int(row.left_out),
                int(row.left_out_paid),
            )
            yield (row.tenant_id, row.model_id, Tier(row.tier)), sums
    if unpriced:
        for row in await price_preview_queries.unpriced(session, since, until, unpriced):
            sums = Sums(unpriced=int(row.requests), unpriced_paid_pico=int(row.paid))
            yield (row.tenant_id, row.model_id, Tier(row.tier)), sums


def _answer(prices: VersionPrices, days: tuple[date, date], found: Mapping[tuple[UUID, UUID, Tier], Sums]) -> Impact:
    total = Sums()
    by_model: dict[UUID, Sums] = {}
    by_tier: dict[Tier, Sums] = {}
    tenants: dict[UUID, TenantImpact] = {}
    for (tenant_id, model_id, tier), sums in sorted(found.items()):
        tenant = tenants.setdefault(tenant_id, TenantImpact(tenant_id, Sums(), []))
        tenant.lines.append((model_id, tier, sums))
        for whole in (total, tenant.total, by_model.setdefault(model_id, Sums()), by_tier.setdefault(tier, Sums())):
            whole.add(sums)
    for tenant in tenants.values():
        tenant.lines.sort(key=lambda line: -abs(line[2].difference_pico))
    ordered = sorted(tenants.values(), key=lambda tenant: (-abs(tenant.total.difference_pico), tenant.tenant_id))
    return Impact(prices.version_id, prices.currency, *days, total, by_model, by_tier, ordered)


def rows(impact: Impact) -> Iterator[tuple[UUID, UUID, Tier, Sums]]:
    """Yield a row per tenant, model and tier, in the order of the answer."""
    for tenant in impact.tenants:
        for model_id, tier, sums in tenant.lines:
            yield tenant.tenant_id, model_id, tier, sums
