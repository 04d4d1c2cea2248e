"""What a re-rating must come to, in plain integers: page by page, what comes back and what is charged. No code of ours.

What comes back goes to who paid last; of an expired lot it is lost: given credit at once, paid credit with its next
expiry. What is charged is taken like usage.
"""

from collections import defaultdict
from dataclasses import astuple, dataclass

from tests.property.billing.model import Account, Billed, Event, Move
from tests.property.billing.model_prices import Prices


@dataclass(frozen=True)
class Wanted:
    """Which usage is rated again at which version; without models, tiers or meters all of them. `days` are of ids."""

    wrong: frozenset[int]
    right: int
    since: int
    until: int
    days: tuple[int, int]
    models: frozenset[int]
    tiers: frozenset[int]
    meters: frozenset[str]
    charge_more: bool

    def concerns(self, one: Billed, account: Account) -> bool:
        event = one.event
        return (
            one.version in self.wrong
            and self.since <= event.minute < self.until
            and (not self.models or event.model in self.models)
            and (not self.tiers or event.tier in self.tiers)
            and not account.postings[one.tx].reversed
        )

    def page_has(self, event: Event) -> bool:
        first, last = self.days
        return first <= event.day and (event.day <= last or event.released)


@dataclass
class Sums:
    """What a run counts, and what it did."""

    events: int = 0
    credit: int = 0
    charge: int = 0
    uncharged: int = 0
    uncharged_pico: int = 0
    given: int = 0
    overrun: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Change:
    """What an event costs from now on, and the prices that gives."""

    one: Billed
    cost: tuple[int, int]
    prices: Prices

    @property
    def pico(self) -> int:
        return sum(self.cost) - sum(self.one.cost)

    @property
    def parts(self) -> tuple[int, int]:
        """By how much the usage's own price moves, and the minimum."""
        return self.cost[0] - self.one.cost[0], self.cost[1] - self.one.cost[1]


class Rerating:
    """One run over the books of one tenant."""

    def __init__(self, account: Account, wanted: Wanted, now: int, page: int) -> None:
        self.account = account
        self.wanted = wanted
        self.now = now
        found = [one for _, one in sorted(account.posted.items()) if wanted.page_has(one.event)]
        self.pages = [found[at : at + page] for at in range(0, len(found), page)]
        self.sums = Sums()

    def changes(self, page: list[Billed], right: dict[tuple[int, int], Prices]) -> list[Change]:
        """Return what a page of events changes, and count what would cost more and is left."""
        found = []
        for one in page:
            if not self.wanted.concerns(one, self.account):
                continue
            prices = one.prices.with_meters(right[one.event.model, one.event.tier], self.wanted.meters)
            cost = (0, 0) if one.repeat else prices.cost(one.event.usage, one.event.outcome)
            change = Change(one, cost, prices)
            if change.pico > 0 and not self.wanted.charge_more:
                self.sums.uncharged += 1
                self.sums.uncharged_pico += change.pico
                continue
            self.sums.events += 1
            self.sums.credit += max(0, -change.pico)
            self.sums.charge += max(0, change.pico)
            found.append(change)
        return found

    def count(self, right: dict[tuple[int, int], Prices]) -> Sums:
        for page in self.pages:
            self.changes(page, right)
        return self.sums

    def execute(self, right: dict[tuple[int, int], Prices]) -> Sums:
        for page in self.pages:
            changes = self.changes(page, right)
            months = list(dict.fromkeys(change.one.event.month for change in changes))
            by_month = [[change for change in changes if change.one.event.month == month] for month in months]
            for mine in by_month:
                down = [change for change in mine if change.pico <= 0]
                if down:
                    self._give_back(down)
            for mine in by_month:
                up = [change for change in mine if change.pico > 0]
                if up:
                    self._charge(up)
            for change in changes:
                change.one.cost, change.one.prices = change.cost, change.prices
                if not self.wanted.meters:
                    change.one.version = self.wanted.right
        return self.sums

    def _give_back(self, changes: list[Change]) -> None:
        moves: list[Move] = []
        own = sum(change.parts[0] for change in changes)
        minimum = sum(change.parts[1] for change in changes)
        if own > 0:  # what one revenue gains, the other gives
            moves.append(("minimum", "revenue", own))
            own, minimum = 0, minimum + own
        if minimum > 0:
            moves.append(("revenue", "minimum", minimum))
            own, minimum = own + minimum, 0
        pots = {"revenue": -own, "minimum": -minimum}
        wanted: dict[int, int] = defaultdict(int)
        for change in changes:
            wanted[change.one.tx] -= change.pico
        for tx, pico in wanted.items():
            for source, part in self._payers(tx, pico):
                self.account.postings[tx].paid[source] -= part
                self.account.postings[tx].rerated = True
                moves += self._returned(source, part, pots)
        self.account.book(moves)

    def _payers(self, tx: int, pico: int) -> list[tuple[str, int]]:
        """Return who gets back how much: who paid last gets it first."""
        order = [lot.name for lot in sorted(self.account.lots, key=lambda lot: lot.place)]
        paid = self.account.postings[tx].paid
        parts = []
        for source in ("overrun", "unbilled", *reversed(order)):
            part = min(pico, paid.get(source, 0))
            if part:
                pico -= part
                parts.append((source, part))
        assert pico == 0
        return parts

    def _returned(self, source: str, part: int, pots: dict[str, int]) -> list[Move]:
        lot = next((lot for lot in self.account.lots if lot.name == source), None)
        expired = lot is not None and lot.expires is not None and lot.expires <= self.now
        moves, left = [], part
        for revenue, pot in list(pots.items()):
            piece = min(left, pot)
            pots[revenue] -= piece
            left -= piece
            if piece:
                moves.append((revenue, "used" if expired and source in self.account.given else source, piece))
        if source in self.account.given and not expired:
            moves.append(("unearned", "used", part))
        if not expired and source != "overrun":
            self.sums.given += part
        return moves

    def _charge(self, changes: list[Change]) -> None:
        moves: list[Move] = []
        spent: dict[str, int] = defaultdict(int)
        by_tx: dict[int, list[Change]] = defaultdict(list)
        for change in sorted(changes, key=lambda one: (one.one.event.minute, one.one.event.key)):
            by_tx[change.one.tx].append(change)
        for tx, mine in by_tx.items():
            taken: dict[tuple[str, str], int] = defaultdict(int)
            for change in mine:
                own, minimum = change.parts
                if own < 0:
                    moves.append(("revenue", "minimum", -own))
                    own, minimum = 0, own + minimum
                elif minimum < 0:
                    moves.append(("minimum", "revenue", -minimum))
                    own, minimum = own + minimum, 0
                for revenue, pico in (("revenue", own), ("minimum", minimum)):
                    for source, part in self.account.split(change.one.event, pico, spent):
                        taken[source, revenue] += part
            moves += self.account.paid_moves(taken)
            posting = self.account.postings[tx]
            posting.rerated = posting.rerated or bool(taken)
            for (source, _), part in taken.items():
                posting.paid[source] = posting.paid.get(source, 0) + part
                self.sums.overrun += part if source == "overrun" else 0
        self.account.book(moves)
