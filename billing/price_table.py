"""Prices in memory, pure: which unit prices hold for a model, tier and tenant at an instant."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from datetime import datetime
from hashlib import sha256
from uuid import UUID

import msgspec

from billing.errors import invalid_price
from billing.types import Meter, PriceItem, PriceSchedule
from core.money import Currency, parse_pico
from core.tiers import Tier

MAX_DECIMALS = 6
TOKENS_PER_PRICE = 1_000_000
NEVER_US = 2**63 - 1
MAX_UNIT_PICO = 10**12  # the column's bound: 1,000,000 per million tokens, or 1 per request

Offer = tuple[UUID, Tier]


def unit_price_pico(meter: Meter, price: str) -> int:
    """Return whole pico per token (or request) for a price per million tokens (or per request).

    Raises:
        PlatformError: not a plain decimal, negative, too large, or with more than six decimals per million tokens:
            such a price is no whole number of pico per token, so that amounts would need rounding.
    """
    pico = parse_pico(price, param="items")
    if meter is not Meter.REQUEST:
        pico, rest = divmod(pico, TOKENS_PER_PRICE)
        if rest:
            raise invalid_price(
                f"The {meter.value} price {price!r} has more than {MAX_DECIMALS} decimals per million tokens."
            )
    if not 0 <= pico <= MAX_UNIT_PICO:
        raise invalid_price(f"The {meter.value} price {price!r} is negative or too large.")
    return pico


def price_text(meter: Meter, unit_pico: int) -> str:
    """Return the price as people write it: per million tokens with six decimals, per request with twelve."""
    if meter is Meter.REQUEST:
        return f"{unit_pico // 10**12}.{unit_pico % 10**12:012d}"
    return f"{unit_pico // 10**6}.{unit_pico % 10**6:06d}"


class PublishedVersion(msgspec.Struct, frozen=True):
    """The facts that are hashed at publication."""

    id: UUID
    book_id: UUID
    currency: Currency
    effective_at: datetime
    items: tuple[PriceItem, ...]


def content_sha256(version: PublishedVersion) -> bytes:
    """Return the hash over every fact of a version; the order of items does not matter."""
    head = f"{version.id.hex}|{version.book_id.hex}|{version.currency.value}|{instant_us(version.effective_at)}"
    lines = sorted(
        f"{item.model_id.hex}|{int(item.tier)}|{item.meter.value}|"
        f"{item.tenant_id.hex if item.tenant_id else '-'}|{item.unit_price_pico}"
        for item in version.items
    )
    return sha256("\n".join((head, *lines)).encode()).digest()


def instant_us(instant: datetime) -> int:
    """Return microseconds since the epoch, exactly."""
    whole = int(instant.replace(microsecond=0).timestamp())
    return whole * 1_000_000 + instant.microsecond


class VersionPrices:
    """All schedules of one version. Never changed once made."""

    def __init__(
        self, version_id: UUID, currency: Currency, items: Iterable[PriceItem], *, plan_book: UUID | None = None
    ) -> None:
        list_meters: dict[Offer, dict[Meter, int]] = {}
        own_meters: dict[tuple[UUID, Offer], dict[Meter, int]] = {}
        for item in items:
            offer = (item.model_id, item.tier)
            if item.tenant_id is None:
                list_meters.setdefault(offer, {})[item.meter] = item.unit_price_pico
            else:
                own_meters.setdefault((item.tenant_id, offer), {})[item.meter] = item.unit_price_pico
        self.version_id = version_id
        self.currency = currency
        self.plan_book = plan_book  # None: the list of the currency
        self._list = {offer: self._schedule(offer, meters) for offer, meters in list_meters.items()}
        self._own = {
            (tenant_id, *offer): self._schedule(offer, {**list_meters.get(offer, {}), **meters})
            for (tenant_id, offer), meters in own_meters.items()
        }

    def schedule(self, model_id: UUID, tier: Tier, tenant_id: UUID) -> PriceSchedule | None:
        """Return the tenant's own prices where it has some, else the list's, else None."""
        return self.own(model_id, tier, tenant_id) or self._list.get((model_id, tier))

    def own(self, model_id: UUID, tier: Tier, tenant_id: UUID) -> PriceSchedule | None:
        """Return the tenant's own prices, else None."""
        return self._own.get((tenant_id, model_id, tier)) if self._own else None

    def _schedule(self, offer: Offer, meters: dict[Meter, int]) -> PriceSchedule:
        model_id, tier = offer
        missing = [meter.value for meter in (Meter.INPUT, Meter.OUTPUT) if meter not in meters]
        if missing:
            raise invalid_price(f"Model {model_id} in tier {tier.label} has no {' and no '.join(missing)} price.")
        return PriceSchedule(
            self.version_id,
            self.currency,
            tier,
            input=meters[Meter.INPUT],
            cached_input=meters.get(Meter.CACHED_INPUT, meters[Meter.INPUT]),
            cache_write=meters.get(Meter.CACHE_WRITE, meters[Meter.INPUT]),
            output=meters[Meter.OUTPUT],
            reasoning=meters.get(Meter.REASONING, meters[Meter.OUTPUT]),
            request=meters.get(Meter.REQUEST, 0),
        )


class PriceTable:
    """The versions in force and those to come, by list and plan's book. Immutable: a change is a new table."""

    def __init__(self, versions: Sequence[tuple[int, VersionPrices]], *, as_of_us: int) -> None:
        """`versions` are pairs of effective instant (µs) and prices; `as_of_us` is for lookups that name no instant."""
        self.as_of_us = as_of_us
        self._timelines: dict[Currency | UUID, tuple[tuple[int, ...], tuple[VersionPrices, ...]]] = {}
        books: dict[Currency | UUID, list[tuple[int, VersionPrices]]] = {}
        for at, version in versions:
            books.setdefault(version.plan_book or version.currency, []).append((at, version))
        for book, pairs in books.items():
            mine = sorted(pairs, key=lambda pair: pair[0])
            self._timelines[book] = (tuple(at for at, _ in mine), tuple(version for _, version in mine))

    def schedule(
        self,
        model_id: UUID,
        tier: Tier,
        currency: Currency,
        tenant_id: UUID,
        at_us: int | None = None,
        *,
        plan_book: UUID | None = None,
    ) -> PriceSchedule | None:
        """Return the prices in force at `at_us` (a version starts at exactly its effective instant), else None.

        The tenant's own prices go before its plan's, and those before the list's; a plan's book in another currency has
        none. Callers give the admission instant, so that a version published ahead takes effect without a reload.
        """
        listed = self._in_force(currency, at_us)
        planned = None if plan_book is None else self._in_force(plan_book, at_us)
        if planned is not None and planned.currency is currency:
            own = None if listed is None else listed.own(model_id, tier, tenant_id)
            found = own or planned.schedule(model_id, tier, tenant_id)
            if found is not None:
                return found
        return None if listed is None else listed.schedule(model_id, tier, tenant_id)

    def next_change_us(self, currency: Currency, at_us: int, plan_book: UUID | None = None) -> int:
        """Return the instant after `at_us` at which other prices take effect; `NEVER_US` when none are published."""
        coming = self._next_us(currency, at_us)
        return coming if plan_book is None else min(coming, self._next_us(plan_book, at_us))

    def _in_force(self, book: Currency | UUID, at_us: int | None) -> VersionPrices | None:
        starts, versions = self._timelines.get(book, ((), ()))
        place = bisect_right(starts, self.as_of_us if at_us is None else at_us)
        return versions[place - 1] if place else None

    def _next_us(self, book: Currency | UUID, at_us: int) -> int:
        starts, _ = self._timelines.get(book, ((), ()))
        place = bisect_right(starts, at_us)
        return starts[place] if place < len(starts) else NEVER_US


EMPTY_TABLE = PriceTable((), as_of_us=0)
