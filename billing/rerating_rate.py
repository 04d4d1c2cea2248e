"""Pure: what an event comes to at other prices, and from where what it paid too much comes back."""

from collections.abc import Collection, Iterable, Sequence
from uuid import UUID

import msgspec

from billing import pricing
from billing.pricing import step_of
from billing.types import Meter, Outcome, PriceSchedule, PriceStep
from core.usage import TokenUsage

_UNITS = (Meter.INPUT, Meter.CACHED_INPUT, Meter.CACHE_WRITE, Meter.OUTPUT, Meter.REASONING)


class Amount(msgspec.Struct, frozen=True):
    """What an event comes to, and what of that lifts it to the minimum charge. Pico."""

    whole: int
    min_charge: int = 0


class Taken(msgspec.Struct):
    """What an account paid of the usage of one transaction, and did not get back. `open`: it can take it back."""

    account: UUID
    left: int
    open: bool = True
    unearned: UUID | None = None  # of given credit
    used: UUID | None = None


class Returned(msgspec.Struct, frozen=True):
    """A part that goes back to where it came from."""

    source: Taken
    amount: int


def patched(now: PriceSchedule, right: PriceSchedule, meters: Collection[Meter]) -> PriceSchedule:
    """Return the prices `now` with those of `right` for these meters, in every step of either; all when there are none.

    A meter that a list does not name has the price it stands for: cached input that of input.
    """
    if not meters:
        return right

    def mixed(above: int) -> PriceStep:
        ours, theirs = step_of(now, above + 1), step_of(right, above + 1)
        return PriceStep(above, *(getattr(theirs if meter in meters else ours, meter.value) for meter in _UNITS))

    base = mixed(-1)
    return PriceSchedule(
        now.price_version_id,
        now.currency,
        now.tier,
        base.input,
        base.cached_input,
        base.cache_write,
        base.output,
        base.reasoning,
        request=(right if Meter.REQUEST in meters else now).request,
        minimum=(right if Meter.MIN_CHARGE in meters else now).minimum,
        steps=tuple(mixed(above) for above in sorted({step.above for step in (*now.steps, *right.steps)})),
    )


def amount(usage: TokenUsage, s: PriceSchedule, outcome: Outcome) -> Amount:
    """Return what usage comes to at these prices.

    Raises:
        ValueError: as `pricing.charge`.
    """
    charged = pricing.charge(usage, s, outcome)
    return Amount(charged, pricing.min_charge(charged, usage, s))


def give_back(sources: Sequence[Taken], wanted: int) -> list[Returned]:
    """Take `wanted` out of what the sources paid, in their order, and lower what is left in them.

    Raises:
        LookupError: they paid less.
    """
    found = []
    for source in sources:
        part = min(wanted, source.left)
        if part:
            source.left -= part
            wanted -= part
            found.append(Returned(source, part))
    if wanted:
        raise LookupError("more is to go back than was paid")
    return found


def split(changes: Iterable[tuple[Amount, Amount]]) -> tuple[int, int]:
    """Return by how much the changes (before, after) move usage's own price, and the minimum charges."""
    usage = lifted = 0
    for before, after in changes:
        lifted += after.min_charge - before.min_charge
        usage += after.whole - after.min_charge - (before.whole - before.min_charge)
    return usage, lifted
