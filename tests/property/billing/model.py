"""What the ledger must come to, in plain integers: accounts, lots, holds, and who may do what. Knows no code of ours.

Amounts are pico, holds nano, instants minutes since the machine's beginning.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.property.billing.model_prices import Prices, Usage

ORDER = {"promo": 0, "goodwill": 1, "paid": 2}
GRACE = 10  # minutes from which an expired lot's rest is taken back
DAY = 1440
FAR = 10**7  # what expires later than this has not expired when the test runs
ALONE_MAX = 15_000  # pico that one person adjusts of a tenant in a day without another one

Move = tuple[str, str, int]  # debit, credit, amount


@dataclass(frozen=True)
class Event:
    """One call as it is billed; `digest` is of its idempotency key, `day` that of its id (an ordinal)."""

    key: str
    minute: int
    month: int
    day: int
    model: int
    tier: int
    usage: Usage
    outcome: str
    prices: Prices
    version: int
    digest: int | None = None
    released: bool = False  # out of quarantine: its id is younger than its admission

    @property
    def cost(self) -> tuple[int, int]:
        return self.prices.cost(self.usage, self.outcome)

    @property
    def period(self) -> tuple[int, int]:
        """Of what a transaction is: the day of its events' ids, and the month of their admission."""
        return self.day, self.month


@dataclass
class Billed:
    """What an event comes to after all that happened to it, and which posting of usage it is in."""

    event: Event
    tx: int
    cost: tuple[int, int]
    prices: Prices
    version: int
    repeat: bool


@dataclass
class Lot:
    """Credit of one origin; without models, tiers or expiry for all and for ever."""

    name: str
    source: str
    number: int
    expires: int | None = None
    models: frozenset[int] | None = None
    tiers: frozenset[int] | None = None

    @property
    def place(self) -> tuple[int, int, int]:
        """Where it stands among those that pay."""
        return ORDER[self.source], 10**12 if self.expires is None else self.expires, self.number

    def pays(self, event: Event) -> bool:
        return (
            (self.expires is None or event.minute < self.expires)
            and (self.models is None or event.model in self.models)
            and (self.tiers is None or event.tier in self.tiers)
        )


@dataclass
class UsagePosting:
    """The usage of one batch, day and month: what it moved, and what each account paid of it and did not get back."""

    moves: list[Move]
    paid: dict[str, int]
    rerated: bool = False
    reversed: bool = False


@dataclass
class Account:
    """One tenant's books."""

    limit: int | None  # how far usage may go unbilled; None: it has no such account
    prepaid: bool
    prepaid_since: int | None = None  # usage admitted before may still go unbilled
    debit: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    credit: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    lots: list[Lot] = field(default_factory=list)
    posted: dict[str, Billed] = field(default_factory=dict)
    postings: list[UsagePosting] = field(default_factory=list)
    bills: list[tuple[int, int]] = field(default_factory=list)  # digest, minute of what was billed under a key
    keys: dict[str, int] = field(default_factory=dict)
    alone: list[tuple[int, int, int]] = field(default_factory=list)  # person, minute, pico
    out: dict[str, int] = field(default_factory=dict)  # request → nano held, or used and not posted
    version: int = 1
    # by minute of admission, model and tier: requests, pico, pico by minimums; as first billed
    billed: dict[tuple[int, int, int], tuple[int, int, int]] = field(default_factory=dict)

    def left(self, lot: Lot) -> int:
        return self.credit[lot.name] - self.debit[lot.name]

    @property
    def owed(self) -> int:
        return self.debit["unbilled"] - self.credit["unbilled"]

    @property
    def room(self) -> int:
        """What may still go unbilled."""
        return 0 if self.limit is None else self.limit - self.owed

    @property
    def figure(self) -> int:
        """What admission may count on: credit for any call, as of the day the test runs."""
        free = (lot for lot in self.lots if lot.models is None and lot.tiers is None)
        credit = sum(self.left(lot) for lot in free if lot.expires is None or lot.expires > FAR)
        return credit + (0 if self.prepaid else self.room)

    def book(self, moves: list[Move]) -> list[Move]:
        """Post one transaction."""
        for debit, credit, amount in moves:
            assert amount > 0
            self.debit[debit] += amount
            self.credit[credit] += amount
        self.version += 1
        assert all(self.left(lot) >= 0 for lot in self.lots)
        assert self.room >= 0
        return moves

    # credit and terms

    def top_up(self, key: str, amount: int) -> str | None:
        """Return why it is refused; a key that came before with the same amount changes nothing."""
        if amount <= 0:
            return "INVALID_AMOUNT"
        if not self.prepaid:
            return "NOT_PREPAID"
        if self.keys.get(key, amount) != amount:
            return "IDEMPOTENCY_KEY_REUSED"
        if key not in self.keys:
            self.keys[key] = amount
            self.book([("cash", "paid", amount)])
        return None

    def change_terms(self, limit: int | None, now: int) -> str | None:
        """Go postpaid up to a limit, or prepaid (None); return why it is refused."""
        if limit is not None and limit < self.owed:
            return "CREDIT_LIMIT_TOO_LOW"
        if limit is None and not self.prepaid:
            self.prepaid, self.prepaid_since = True, now
            if all(lot.source != "paid" or lot.expires is not None for lot in self.lots):
                self.lots.append(Lot("paid", "paid", -1))
        if limit is not None:
            self.limit, self.prepaid, self.prepaid_since = limit, False, None
        return None

    def may_alone(self, by: int, amount: int, now: int) -> bool:
        """Whether a person adjusts so much without another one; what others approved does not count."""
        return self.alone_pico(by, now) + amount <= ALONE_MAX

    def alone_pico(self, by: int, now: int) -> int:
        """Return what a person adjusted alone in the last day."""
        return sum(pico for who, at, pico in self.alone if who == by and at > now - DAY)

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

    def buy(self, lot: Lot, amount: int) -> list[Move]:
        """Sell credit that expires: a lot of its own."""
        self.lots.append(lot)
        return self.book([("cash", lot.name, amount)])

    def expire(self, now: int, *, with_paid: bool) -> list[list[Move]]:
        """Take what is left in each lot that expired long enough ago: of paid credit it is the platform's."""
        over = [
            lot
            for lot in self.lots
            if lot.expires is not None
            and lot.expires <= now - GRACE
            and self.left(lot)
            and (with_paid or lot.source != "paid")
        ]
        to = {"paid": "breakage"}
        return [self.book([(lot.name, to.get(lot.source, "unearned"), self.left(lot))]) for lot in over]

    # usage

    def repeats(self, event: Event) -> bool:
        """Whether a call with the same key was billed within a day of it."""
        near = any(digest == event.digest and abs(at - event.minute) < DAY for digest, at in self.bills)
        return event.digest is not None and any(event.cost) and near

    def use(self, batch: Iterable[Event]) -> bool:
        """Post what is new of a batch: a transaction per day and month, in the order of minutes, models and tiers."""
        posting: dict[tuple[int, int], int] = {}
        new: list[Billed] = []
        seen: list[tuple[int, int]] = []
        for event in batch:
            if event.period not in seen:
                seen.append(event.period)
            if event.key not in self.posted:
                repeat = self.repeats(event)
                cost = (0, 0) if repeat else event.cost
                if event.digest is not None and cost != (0, 0):
                    self.bills.append((event.digest, event.minute))
                new.append(Billed(event, 0, cost, event.prices, event.version, repeat))
                self.posted[event.key] = new[-1]
        for period in seen:  # the ids of transactions are in this order
            if any(one.event.period == period for one in new):
                posting[period] = len(self.postings)
                self.postings.append(UsagePosting([], {}))
        for one in new:
            one.tx = posting[one.event.period]
        self._spend(new)
        for number in posting.values():
            self.book(self.postings[number].moves)
        return bool(new)

    def _spend(self, new: list[Billed]) -> None:
        groups: dict[tuple[int, int, int], list[Billed]] = defaultdict(list)
        for one in new:
            groups[one.event.minute, one.event.model, one.event.tier].append(one)
        spent: dict[str, int] = defaultdict(int)
        by_posting: dict[int, dict[tuple[str, str], int]] = defaultdict(lambda: defaultdict(int))
        for place in sorted(groups):
            group = groups[place]
            own, minimum = (sum(one.cost[n] for one in group) for n in (0, 1))
            requests, pico, by_minimum = self.billed.get(place, (0, 0, 0))
            self.billed[place] = requests + len(group), pico + own + minimum, by_minimum + minimum
            for revenue, amount in (("revenue", own), ("minimum", minimum)):
                for source, part in self.split(group[0].event, amount, spent):
                    by_posting[group[0].tx][source, revenue] += part
        for number, taken in by_posting.items():
            posting = self.postings[number]
            posting.moves += self.paid_moves(taken)
            for (source, _), amount in taken.items():
                posting.paid[source] = posting.paid.get(source, 0) + amount

    def split(self, event: Event, amount: int, spent: dict[str, int]) -> list[tuple[str, int]]:
        """Return who pays what of an amount; `spent` is what is taken already and not booked."""
        parts = []
        for lot in sorted(self.lots, key=lambda lot: lot.place):
            part = min(amount, self.left(lot) - spent[lot.name]) if lot.pays(event) else 0
            if part:
                spent[lot.name] += part
                amount -= part
                parts.append((lot.name, part))
        late = self.prepaid_since is not None and event.minute >= self.prepaid_since
        part = 0 if late else min(amount, self.room - spent["unbilled"])
        if part:
            spent["unbilled"] += part
            amount -= part
            parts.append(("unbilled", part))
        return [*parts, ("overrun", amount)] if amount else parts

    def paid_moves(self, taken: dict[tuple[str, str], int]) -> list[Move]:
        """Return what is moved when these sources pay to these revenues."""
        contra = sum(amount for (source, _), amount in taken.items() if source in self.given)
        moves = [(source, revenue, amount) for (source, revenue), amount in taken.items()]
        return [*moves, ("used", "unearned", contra)] if contra else moves

    @property
    def given(self) -> set[str]:
        """Lots that nobody paid for."""
        return {lot.name for lot in self.lots if lot.source != "paid"}
