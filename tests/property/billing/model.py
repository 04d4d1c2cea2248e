"""What the ledger must come to, in plain integers: accounts, lots, prices, holds. Knows no code of ours.

Amounts are pico, holds nano, instants minutes since the machine's beginning.
"""

from collections import defaultdict
from dataclasses import dataclass, field

BILLED = {"completed", "client_abort"}
ORDER = {"promo": 0, "goodwill": 1, "paid": 2}
GRACE = 10  # minutes from which an expired lot's rest is taken back

Move = tuple[str, str, int]  # debit, credit, amount


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
    """Pico per token of one model and tier; from `above` input tokens on all tokens cost `times` as much."""

    fresh: int
    cached: int
    output: int
    request: int
    minimum: int
    above: int
    times: int

    def cost(self, usage: Usage, outcome: str) -> tuple[int, int]:
        """Return what it costs by its tokens, and what a minimum adds."""
        tokens = (usage.fresh, usage.cached, usage.written, usage.output, usage.reasoning)
        if outcome not in BILLED or not any(tokens):
            return 0, 0
        if outcome == "client_abort" and usage.output + usage.reasoning == 0:
            return 0, 0
        factor = self.times if usage.fresh + usage.cached + usage.written > self.above else 1
        unit = (self.fresh, self.cached, self.fresh, self.output, self.output)
        own = factor * sum(count * price for count, price in zip(tokens, unit, strict=True)) + self.request
        return own, max(0, self.minimum - own)


@dataclass(frozen=True)
class Event:
    """One call as it is billed."""

    key: str
    minute: int
    model: int
    tier: int
    cost: tuple[int, int]


@dataclass
class Lot:
    """Credit of one origin; without models, tiers or expiry for all and for ever."""

    name: str
    source: str
    number: int
    expires: int | None = None
    models: frozenset[int] | None = None
    tiers: frozenset[int] | None = None

    def pays(self, event: Event) -> bool:
        return (
            (self.expires is None or event.minute < self.expires)
            and (self.models is None or event.model in self.models)
            and (self.tiers is None or event.tier in self.tiers)
        )


@dataclass
class Account:
    """One tenant's books."""

    limit: int | None  # postpaid: how far it may go
    debit: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    credit: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    lots: list[Lot] = field(default_factory=list)
    posted: set[str] = field(default_factory=set)
    keys: dict[str, int] = field(default_factory=dict)
    out: dict[str, int] = field(default_factory=dict)  # request → nano held, or used and not posted
    version: int = 1
    requests: int = 0
    billed: int = 0

    def left(self, lot: Lot) -> int:
        return self.credit[lot.name] - self.debit[lot.name]

    @property
    def room(self) -> int:
        """What a postpaid tenant may still use."""
        return 0 if self.limit is None else self.limit + self.credit["unbilled"] - self.debit["unbilled"]

    @property
    def figure(self) -> int:
        """What admission may count on: credit for any call, at any time."""
        free = (lot for lot in self.lots if lot.expires is None and lot.models is None and lot.tiers is None)
        return self.room + sum(self.left(lot) for lot in free)

    def book(self, moves: list[Move]) -> list[Move]:
        """Post one transaction."""
        for debit, credit, amount in moves:
            assert amount > 0
            self.debit[debit] += amount
            self.credit[credit] += amount
        self.version += 1
        assert all(self.left(lot) >= 0 for lot in self.lots)
        assert self.limit is None or self.room >= 0
        return moves

    def top_up(self, key: str, amount: int) -> str | None:
        """Return why it is refused; a key that came before with the same amount changes nothing."""
        if amount <= 0:
            return "INVALID_AMOUNT"
        if self.limit is not None:
            return "NOT_PREPAID"
        if self.keys.get(key, amount) != amount:
            return "IDEMPOTENCY_KEY_REUSED"
        if key not in self.keys:
            self.keys[key] = amount
            self.book([("cash", "paid", amount)])
        return None

    def give(self, lot: Lot, amount: int) -> list[Move]:
        self.lots.append(lot)
        return self.book([("unearned", lot.name, amount)])

    def reverse(self, moves: list[Move]) -> bool:
        """Move the same back; False where the credit to be taken back is spent."""
        taken: dict[str, int] = defaultdict(int)
        for _, credit, amount in moves:
            taken[credit] += amount
        if any(taken[lot.name] > self.left(lot) for lot in self.lots):
            return False
        self.book([(credit, debit, amount) for debit, credit, amount in moves])
        return True

    def use(self, events: list[Event], month: dict[int, int]) -> dict[int, list[Move]]:
        """Post what is new of a batch: a transaction per month, in the order of minutes, models and tiers."""
        new = {event.key: event for event in events if event.key not in self.posted}
        self.posted |= new.keys()
        self.requests += len(new)
        groups: dict[tuple[int, int, int], list[Event]] = defaultdict(list)
        for event in new.values():
            groups[event.minute, event.model, event.tier].append(event)
        by_month: dict[int, dict[tuple[str, str], int]] = defaultdict(lambda: defaultdict(int))
        spent: dict[str, int] = defaultdict(int)
        for place in sorted(groups):
            group = groups[place]
            moves = by_month[month[place[0]]]
            for revenue, amount in (
                ("revenue", sum(e.cost[0] for e in group)),
                ("minimum", sum(e.cost[1] for e in group)),
            ):
                self.billed += amount
                for source, part in self._split(group[0], amount, spent):
                    moves[source, revenue] += part
        return {at: self.book(self._moves(moves)) for at, moves in by_month.items()}

    def _split(self, event: Event, amount: int, spent: dict[str, int]) -> list[tuple[str, int]]:
        parts = []
        for lot in sorted(self.lots, key=lambda lot: (ORDER[lot.source], lot.expires or 10**9, lot.number)):
            part = min(amount, self.left(lot) - spent[lot.name]) if lot.pays(event) else 0
            if part:
                spent[lot.name] += part
                amount -= part
                parts.append((lot.name, part))
        part = min(amount, self.room - spent["unbilled"]) if self.limit is not None else 0
        if part:
            spent["unbilled"] += part
            amount -= part
            parts.append(("unbilled", part))
        return [*parts, ("overrun", amount)] if amount else parts

    def _moves(self, moves: dict[tuple[str, str], int]) -> list[Move]:
        given = {lot.name for lot in self.lots if lot.source != "paid"}
        contra = sum(amount for (source, _), amount in moves.items() if source in given)
        taken = [(source, revenue, amount) for (source, revenue), amount in moves.items()]
        return [*taken, ("used", "unearned", contra)] if contra else taken

    def expire(self, now: int) -> list[list[Move]]:
        """Take back what is left in each lot that expired long enough ago."""
        over = [lot for lot in self.lots if lot.expires is not None and lot.expires <= now - GRACE and self.left(lot)]
        return [self.book([(lot.name, "unearned", self.left(lot))]) for lot in over]
