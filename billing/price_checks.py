"""What is worth a second look in a list of prices before it is published for good. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from uuid import UUID

import msgspec

from billing.errors import invalid_price
from billing.price_table import VersionPrices, price_text
from billing.types import PER_REQUEST, Meter, PriceDiscount, PriceItem, PriceSchedule, PriceStep
from core.ids import IdKind, format_id
from core.tiers import Tier

WARNINGS_MAX = 200
LARGE_CHANGE = 10  # times more, or a fraction less, than what is in force

Place = tuple[UUID, Tier, Meter, UUID | None, int]
Offered = tuple[UUID, Tier, UUID | None]  # model, tier, tenant or the list


class PriceWarning(msgspec.Struct, frozen=True):
    """Prices that may be meant, and often are not. Programs switch on `code`. Without a model: of the whole list."""

    code: str
    message: str
    model_id: UUID | None = None
    tier: Tier | None = None
    tenant_id: UUID | None = None


class PriceChange(msgspec.Struct, frozen=True):
    """One unit price before and after, in pico; None: there is none."""

    model_id: UUID
    tier: Tier
    meter: Meter
    tenant_id: UUID | None
    above_tokens: int
    before: int | None
    after: int | None


def place(item: PriceItem) -> Place:
    """Return what the price is of; a version has one for each."""
    return item.model_id, item.tier, item.meter, item.tenant_id, item.above_tokens


def check_given(items: Sequence[PriceItem], discounts: Sequence[PriceDiscount], currency: str) -> None:
    """Refuse a call that contradicts itself.

    Raises:
        PlatformError: INVALID_PRICE: a price twice, a step of a price per request, a discount out of range.
    """
    seen: set[Place] = set()
    for item in items:
        if item.above_tokens and item.meter in PER_REQUEST:
            raise invalid_price(f"The {item.meter.value} price is per request: it has no step above input tokens.")
        if item.above_tokens < 0:
            raise invalid_price("A step begins above a number of input tokens, from 1 on.")
        if place(item) in seen:
            raise invalid_price(f"This call names the {currency} {described(item)} twice.")
        seen.add(place(item))
    offers: set[Offered] = set()
    for off in discounts:
        offer = (off.model_id, off.tier, off.tenant_id)
        if offer in offers:
            raise invalid_price(f"This call names the discount of {_whose(offer)} twice.")
        offers.add(offer)


def described(item: PriceItem) -> str:
    """Return what the price is of, in words."""
    step = f" above {item.above_tokens:,} input tokens" if item.above_tokens else ""
    return f"{item.meter.value} price{step} of {_whose((item.model_id, item.tier, item.tenant_id))}"


def _whose(offer: Offered) -> str:
    model_id, tier, tenant_id = offer
    own = f" for {format_id(IdKind.TENANT, tenant_id)}" if tenant_id is not None else ""
    return f"model {format_id(IdKind.MODEL, model_id)} in tier {tier.label}{own}"


def changes(before: Iterable[PriceItem], after: Iterable[PriceItem]) -> list[PriceChange]:
    """Return every price that is new, gone or another, in the order of models, tiers, tenants, steps and meters."""
    was, now = ({place(item): item.unit_price_pico for item in items} for items in (before, after))
    return [
        PriceChange(*where, was.get(where), now.get(where))
        for where in sorted({**was, **now}, key=_in_order)
        if was.get(where) != now.get(where)
    ]


def _in_order(where: Place) -> tuple[object, ...]:
    model_id, tier, meter, tenant_id, above = where
    return model_id, tier, str(tenant_id or ""), above, list(Meter).index(meter)


def warnings(
    before: Sequence[PriceItem], after: Sequence[PriceItem], prices: VersionPrices, *, for_plan: bool = False
) -> list[PriceWarning]:
    """Return what is odd about the prices `after`, of which `prices` is made, beside those `before` in force.

    At most `WARNINGS_MAX`, in the order of models, tiers and tenants.
    """
    offers = {offer: _schedule(prices, offer) for offer in _offers(after)}
    found = [*_dropped(before, offers.keys(), for_plan), *_large(before, after)]
    for offer, s in offers.items():
        found += _within(offer, s)
        dearer = (offer[0], Tier(offer[1] + 1), offer[2]) if offer[1] < max(Tier) else None
        if dearer in offers and dearer is not None:
            found += _above(offer, s, offers[dearer], "TIER_ORDER", f"dearer than in tier {dearer[1].label}")
        listed = offers.get((offer[0], offer[1], None))
        if offer[2] is not None and listed is not None:
            found += _above(offer, s, listed, "OWN_ABOVE_LIST", "dearer than the list")
    found.sort(key=lambda one: (str(one.model_id), one.tier, str(one.tenant_id or ""), one.code, one.message))
    return found[:WARNINGS_MAX]


def _offers(items: Iterable[PriceItem]) -> dict[Offered, None]:
    return {(item.model_id, item.tier, item.tenant_id): None for item in items}


def _schedule(prices: VersionPrices, offer: Offered) -> PriceSchedule:
    model_id, tier, tenant_id = offer
    found = prices.listed(model_id, tier) if tenant_id is None else prices.own(model_id, tier, tenant_id)
    if found is None:
        raise LookupError("the prices are of other items")
    return found


def _dropped(before: Iterable[PriceItem], offers: Iterable[Offered], for_plan: bool) -> Iterator[PriceWarning]:
    left = set(offers)
    gone = "no price any more, so that " + ("the list's holds" if for_plan else "it is not served")
    for offer in _offers(before):
        if offer not in left:
            what = gone if offer[2] is None else "its own prices no more"
            yield PriceWarning("DROPPED", f"{_whose(offer)} has {what}.", *offer)


def _large(before: Iterable[PriceItem], after: Iterable[PriceItem]) -> Iterator[PriceWarning]:
    for change in changes(before, after):
        was, now = change.before, change.after
        if was and now and (now > was * LARGE_CHANGE or now * LARGE_CHANGE < was):
            item = PriceItem(change.model_id, change.tier, change.meter, now, change.tenant_id, change.above_tokens)
            old, new = (price_text(change.meter, pico) for pico in (was, now))
            yield PriceWarning(
                "LARGE_CHANGE", f"The {described(item)} goes from {old} to {new}.", item.model_id, item.tier,
                item.tenant_id,
            )  # fmt: skip


def _within(offer: Offered, s: PriceSchedule) -> Iterator[PriceWarning]:
    below: PriceSchedule | PriceStep = s
    units: list[PriceSchedule | PriceStep] = [s, *s.steps]
    for unit in units:
        where = f" above {unit.above:,} input tokens" if isinstance(unit, PriceStep) else ""
        if unit.cached_input > unit.input:
            yield PriceWarning(
                "CACHED_ABOVE_INPUT", f"{_whose(offer)}: cached input is dearer than input{where}.", *offer
            )
        cheaper = [name for name in _UNITS if getattr(unit, name) < getattr(below, name)]
        if cheaper:
            message = f"{_whose(offer)}: {', '.join(cheaper)} is cheaper{where} than below: more input may cost less."
            yield PriceWarning("STEP_CHEAPER", message, *offer)
        below = unit


_UNITS = ("input", "cached_input", "cache_write", "output", "reasoning")


def _above(offer: Offered, s: PriceSchedule, other: PriceSchedule, code: str, than: str) -> Iterator[PriceWarning]:
    prices: Mapping[str, tuple[int, int]] = {
        name: (getattr(s, name), getattr(other, name)) for name in (*_UNITS, "request", "minimum")
    }
    dearer = [name for name, (mine, theirs) in prices.items() if mine > theirs]
    if dearer:
        yield PriceWarning(code, f"{_whose(offer)}: {', '.join(dearer)} is {than}.", *offer)
