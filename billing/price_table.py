"""Prices in memory, pure: which unit prices hold for a model, tier and tenant at an instant."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from datetime import datetime
from hashlib import sha256
from uuid import UUID

import msgspec

from billing.errors import invalid_price
from billing.types import PER_REQUEST, Meter, PriceDiscount, PriceItem, PriceSchedule, PriceStep
from core.ids import IdKind, format_id
from core.money import Currency, parse_pico
from core.tiers import Tier

MAX_DECIMALS = 6
TOKENS_PER_PRICE = 1_000_000
PPM = 1_000_000
PICO_PER_PPM = 10**8  # of a percentage: 1 is 10,000 ppm
NEVER_US = 2**63 - 1
MAX_UNIT_PICO = 10**12  # the column's bound: 1,000,000 per million tokens, or 1 per request

Offer = tuple[UUID, Tier]
Prices = dict[tuple[int, Meter], int]  # by step (0: none) and meter, pico


def unit_price_pico(meter: Meter, price: str) -> int:
    """Return whole pico per token (or request) for a price per million tokens (or per request).

    Raises:
        PlatformError: not a plain decimal, negative, too large, or with more than six decimals per million tokens:
            such a price is no whole number of pico per token, so that amounts would need rounding.
    """
    pico = parse_pico(price, param="items")
    if meter not in PER_REQUEST:
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
    if meter in PER_REQUEST:
        return f"{unit_pico // 10**12}.{unit_pico % 10**12:012d}"
    return f"{unit_pico // 10**6}.{unit_pico % 10**6:06d}"


def off_ppm(percent: str) -> int:
    """Return the millionths in a percentage such as ``"12.5"``.

    Raises:
        PlatformError: INVALID_PRICE, it is not more than 0 and at most 100, with at most four decimals.
    """
    whole, rest = divmod(parse_pico(percent, param="discounts"), PICO_PER_PPM)
    if rest or not 0 < whole <= PPM:
        raise invalid_price(f"A discount is more than 0 and at most 100 percent, with at most 4 decimals: {percent!r}.")
    return whole


def percent_text(ppm: int) -> str:
    """Return the percentage as people write it, with four decimals."""
    return f"{ppm // 10**4}.{ppm % 10**4:04d}"


class PublishedVersion(msgspec.Struct, frozen=True):
    """The facts that are hashed at publication."""

    id: UUID
    book_id: UUID
    currency: Currency
    effective_at: datetime
    items: tuple[PriceItem, ...]
    discounts: tuple[PriceDiscount, ...] = ()


def content_sha256(version: PublishedVersion) -> bytes:
    """Return the hash over every fact of a version; the order of items does not matter."""
    head = f"{version.id.hex}|{version.book_id.hex}|{version.currency.value}|{instant_us(version.effective_at)}"
    lines = [
        f"{item.model_id.hex}|{int(item.tier)}|{item.meter.value}|"
        f"{item.tenant_id.hex if item.tenant_id else '-'}|{item.unit_price_pico}"
        f"{f'|above {item.above_tokens}' if item.above_tokens else ''}"
        for item in version.items
    ]
    lines += [
        f"discount|{off.tenant_id.hex}|{off.model_id.hex}|{int(off.tier)}|{off.off_ppm}" for off in version.discounts
    ]
    return sha256("\n".join((head, *sorted(lines))).encode()).digest()


def instant_us(instant: datetime) -> int:
    """Return microseconds since the epoch, exactly."""
    whole = int(instant.replace(microsecond=0).timestamp())
    return whole * 1_000_000 + instant.microsecond


def resolve(items: Sequence[PriceItem], discounts: Iterable[PriceDiscount]) -> list[PriceItem]:
    """Return the items with the contract prices that the discounts make of the list, rounded half to even.

    A discount is off every unit price of its model and tier, per token and per request; the minimum charge stays the
    list's. A price that the tenant has of its own stays what it is.

    Raises:
        PlatformError: INVALID_PRICE, a discount is off a model and tier that have no price.
    """
    listed: dict[Offer, list[PriceItem]] = {}
    for item in items:
        if item.tenant_id is None:
            listed.setdefault((item.model_id, item.tier), []).append(item)
    own = {_place(item) for item in items if item.tenant_id is not None}
    found = list(items)
    for off in discounts:
        offer = (off.model_id, off.tier)
        if offer not in listed:
            raise invalid_price(
                f"The discount of {format_id(IdKind.TENANT, off.tenant_id)} is off the list of model "
                f"{format_id(IdKind.MODEL, off.model_id)} in tier {off.tier.label}, which has no price there."
            )
        for item in listed[offer]:
            contract = msgspec.structs.replace(
                item, tenant_id=off.tenant_id, unit_price_pico=discounted(item.unit_price_pico, off.off_ppm)
            )
            if item.meter is not Meter.MIN_CHARGE and _place(contract) not in own:
                found.append(contract)
    return found


def discounted(unit_pico: int, off_ppm: int) -> int:
    """Return the price less so many millionths of it, rounded half to even: 37,500 less 12.5 % is 32,812."""
    whole, rest = divmod(unit_pico * (PPM - off_ppm), PPM)
    return whole + (2 * rest > PPM or (2 * rest == PPM and whole % 2 == 1))


def _place(item: PriceItem) -> tuple[UUID, Tier, Meter, UUID | None, int]:
    return item.model_id, item.tier, item.meter, item.tenant_id, item.above_tokens


class VersionParts(msgspec.Struct, frozen=True):
    """A version's schedules as data, by model and tier, and those of tenants of their own."""

    version_id: UUID
    currency: Currency
    plan_book: UUID | None
    closed: frozenset[UUID]
    listed: list[tuple[UUID, Tier, PriceSchedule]]
    own: list[tuple[UUID, UUID, Tier, PriceSchedule]]


class VersionPrices:
    """All schedules of one version. Never changed once made."""

    def __init__(
        self,
        version_id: UUID,
        currency: Currency,
        items: Iterable[PriceItem],
        *,
        plan_book: UUID | None = None,
        closed: frozenset[UUID] = frozenset(),
    ) -> None:
        """Make the schedules. `closed` are models that have none here, and none of another book instead.

        Raises:
            PlatformError: INVALID_PRICE, an offer lacks a price that it needs.
        """
        listed: dict[Offer, Prices] = {}
        own: dict[tuple[UUID, Offer], Prices] = {}
        for item in items:
            offer, priced = (item.model_id, item.tier), (item.above_tokens, item.meter)
            if item.tenant_id is None:
                listed.setdefault(offer, {})[priced] = item.unit_price_pico
            else:
                own.setdefault((item.tenant_id, offer), {})[priced] = item.unit_price_pico
        self.version_id = version_id
        self.currency = currency
        self.plan_book = plan_book  # None: the list of the currency
        self.closed = closed
        self._list = {offer: self._schedule(offer, prices) for offer, prices in listed.items()}
        self._own = {
            (tenant_id, *offer): self._schedule(offer, {**listed.get(offer, {}), **prices})
            for (tenant_id, offer), prices in own.items()
        }

    def parts(self) -> "VersionParts":
        """Return all of it as data."""
        listed = [(*offer, schedule) for offer, schedule in self._list.items()]
        own = [(*whose, schedule) for whose, schedule in self._own.items()]
        return VersionParts(self.version_id, self.currency, self.plan_book, self.closed, listed, own)

    @classmethod
    def of(cls, parts: "VersionParts") -> "VersionPrices":
        """Return the version that these are the parts of."""
        made = cls(parts.version_id, parts.currency, (), plan_book=parts.plan_book, closed=parts.closed)
        made._list = {(model_id, tier): schedule for model_id, tier, schedule in parts.listed}
        made._own = {(tenant_id, model_id, tier): schedule for tenant_id, model_id, tier, schedule in parts.own}
        return made

    def schedule(self, model_id: UUID, tier: Tier, tenant_id: UUID) -> PriceSchedule | None:
        """Return the tenant's own prices where it has some, else the list's, else None."""
        return self.own(model_id, tier, tenant_id) or self._list.get((model_id, tier))

    def listed(self, model_id: UUID, tier: Tier) -> PriceSchedule | None:
        """Return the list's prices, else None."""
        return self._list.get((model_id, tier))

    def own(self, model_id: UUID, tier: Tier, tenant_id: UUID) -> PriceSchedule | None:
        """Return the tenant's own prices, else None."""
        return self._own.get((tenant_id, model_id, tier)) if self._own else None

    def _schedule(self, offer: Offer, prices: Prices) -> PriceSchedule:
        tier = offer[1]
        named = {meter for above, meter in prices if not above and meter not in PER_REQUEST}
        steps = tuple(
            PriceStep(above, *_unit_prices(offer, prices, above, named))
            for above in sorted({above for above, _ in prices if above})
        )
        return PriceSchedule(
            self.version_id,
            self.currency,
            tier,
            *_unit_prices(offer, prices, 0, named),
            request=prices.get((0, Meter.REQUEST), 0),
            minimum=prices.get((0, Meter.MIN_CHARGE), 0),
            steps=steps,
        )


def _unit_prices(offer: Offer, prices: Prices, above: int, named: set[Meter]) -> tuple[int, int, int, int, int]:
    """Return the prices of input, cached input, cache write, output and reasoning, of one step or without one.

    A step is a whole set: it prices each meter that is priced without it, so that no old price slips into it.
    """
    needed = {Meter.INPUT, Meter.OUTPUT} | named
    missing = [meter.value for meter in Meter if meter in needed and (above, meter) not in prices]
    if missing:
        where = f" above {above:,} input tokens" if above else ""
        raise invalid_price(
            f"Model {format_id(IdKind.MODEL, offer[0])} in tier {offer[1].label} has no {' and no '.join(missing)} "
            f"price{where}."
        )
    one, result = prices[above, Meter.INPUT], prices[above, Meter.OUTPUT]
    return (
        one,
        prices.get((above, Meter.CACHED_INPUT), one),
        prices.get((above, Meter.CACHE_WRITE), one),
        result,
        prices.get((above, Meter.REASONING), result),
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
        if any(version is not None and model_id in version.closed for version in (listed, planned)):
            return None
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

    def parts(self) -> list[tuple[int, VersionParts]]:
        """Return the versions with their effective instants (µs), as data."""
        timelines = self._timelines.values()
        return [
            (at, version.parts())
            for starts, versions in timelines
            for at, version in zip(starts, versions, strict=True)
        ]

    def _in_force(self, book: Currency | UUID, at_us: int | None) -> VersionPrices | None:
        starts, versions = self._timelines.get(book, ((), ()))
        place = bisect_right(starts, self.as_of_us if at_us is None else at_us)
        return versions[place - 1] if place else None

    def _next_us(self, book: Currency | UUID, at_us: int) -> int:
        starts, _ = self._timelines.get(book, ((), ()))
        place = bisect_right(starts, at_us)
        return starts[place] if place < len(starts) else NEVER_US


EMPTY_TABLE = PriceTable((), as_of_us=0)
