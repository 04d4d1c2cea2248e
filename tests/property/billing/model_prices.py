"""What usage costs, in plain integers. Knows no code of ours."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

METERS = ("input", "cached_input", "cache_write", "output", "reasoning")
STANDS_FOR = {"cached_input": "input", "cache_write": "input", "reasoning": "output"}  # where a list does not name it
BILLED = {"completed", "client_abort"}
MILLION = 1_000_000

Items = Mapping[tuple[int, str], int]  # pico by step (0: none) and meter
Offer = tuple[int | None, int, int]  # whose own price (None: the list's), of which model and tier


@dataclass(frozen=True)
class Usage:
    """Tokens of a call: fresh, cached and written input, output, reasoning."""

    fresh: int
    cached: int
    written: int
    output: int
    reasoning: int


@dataclass(frozen=True)
class Prices:
    """Pico per token in the order of METERS, of each step; the first step holds for all."""

    steps: tuple[tuple[int, tuple[int, ...]], ...]
    request: int
    minimum: int

    def units(self, tokens: int) -> tuple[int, ...]:
        """Return what holds for a call with so many input tokens: the last step that it exceeds."""
        return [units for above, units in self.steps if tokens > above][-1]

    def cost(self, usage: Usage, outcome: str) -> tuple[int, int]:
        """Return what it costs by its tokens, and what a minimum adds."""
        tokens = (usage.fresh, usage.cached, usage.written, usage.output, usage.reasoning)
        if outcome not in BILLED or not any(tokens):
            return 0, 0
        if outcome == "client_abort" and usage.output + usage.reasoning == 0:
            return 0, 0
        unit = self.units(usage.fresh + usage.cached + usage.written)
        own = sum(count * price for count, price in zip(tokens, unit, strict=True)) + self.request
        return own, max(0, self.minimum - own)

    def with_meters(self, right: "Prices", meters: Iterable[str]) -> "Prices":
        """Return these prices with those of `right` for some meters, in every step of either; for none named, all."""
        chosen = set(meters)
        if not chosen:
            return right
        steps = tuple(
            (
                above,
                tuple(
                    theirs if meter in chosen else ours
                    for meter, ours, theirs in zip(METERS, self.units(above + 1), right.units(above + 1), strict=True)
                ),
            )
            for above in sorted({above for above, _ in (*self.steps, *right.steps)})
        )
        request = (right if "request" in chosen else self).request
        return Prices(steps, request, (right if "min_charge" in chosen else self).minimum)


def priced(items: Items) -> Prices:
    """Return the prices that a list's items come to."""
    steps = []
    for above in sorted({above for above, _ in items}):
        given = {meter: pico for (at, meter), pico in items.items() if at == above}
        units = tuple(given[m] if m in given else given[STANDS_FOR[m]] for m in METERS)
        steps.append((above or -1, units))
    return Prices(tuple(steps), items.get((0, "request"), 0), items.get((0, "min_charge"), 0))


def discounted(items: Items, millionths: int) -> Items:
    """Return the contract prices that so much off a list makes, rounded half to even; a minimum has no discount."""
    found = {}
    for (above, meter), pico in items.items():
        if meter != "min_charge":
            whole, rest = divmod(pico * (MILLION - millionths), MILLION)
            up = rest * 2 > MILLION or (rest * 2 == MILLION and whole % 2 == 1)
            found[above, meter] = whole + up
    return found


@dataclass(frozen=True)
class Version:
    """A published list with the tenants' own prices. Never changes."""

    offers: dict[Offer, Items] = field(default_factory=dict)

    def prices(self, who: int, model: int, tier: int) -> Prices:
        """Return what a tenant pays: its own prices over the list's, meter by meter."""
        return priced({**self.offers[None, model, tier], **self.offers.get((who, model, tier), {})})
