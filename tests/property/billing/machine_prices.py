"""Rules of prices: what is published, and usage rated again when that was wrong."""

from datetime import timedelta
from typing import Any
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from sqlalchemy.ext.asyncio import AsyncSession

from billing import rerating, rerating_post
from billing.rerating import Run
from billing.types import Meter
from core import db
from tests.factories import rerating as again
from tests.property.billing.machine import DISCOUNTS, MODELS, STEPPED, TIERS, listed, places, units
from tests.property.billing.machine_usage import UsageRules
from tests.property.billing.model_prices import METERS, Items
from tests.property.billing.model_rerating import Rerating, Sums, Wanted

PAGE = 4  # events of one batch
ALWAYS = 10**6  # minutes
chosen_meters = st.sets(st.sampled_from([*METERS, "request", "min_charge"]), min_size=1, max_size=3)
some = st.sampled_from([frozenset[int](), frozenset[int](), frozenset({0}), frozenset({1})])
cuts = st.sampled_from(DISCOUNTS)


async def _alone(_session: AsyncSession, _tenant_id: UUID) -> None:
    """Nothing else hangs on the tenant's money here."""


class PriceRules(UsageRules):
    """What operators do to prices."""

    @property
    def priced_lately(self) -> bool:
        """Whether something was used at the newest prices; until then others teach nothing."""
        return any(event.version == len(self.versions) - 1 for _, _, event in self.made[-6:])

    @precondition(lambda self: self.priced_lately)
    @rule(model=st.integers(0, 1), tier=st.integers(0, 1), items=listed())
    def publish_list(self, model: int, tier: int, items: Items) -> None:
        """Another price of the list; own prices beside it are gone. What was admitted before keeps its price."""
        kept = {place: given for place, given in self.versions[-1].offers.items() if place[1:] != (model, tier)}
        self.publish({**kept, (None, model, tier): items}, {})

    @precondition(lambda self: self.priced_lately)
    @rule(
        who=st.sampled_from([0, 0, 1, 2]),
        model=st.integers(0, 1),
        tier=st.integers(0, 1),
        off=st.one_of(st.none(), cuts),
        data=st.data(),
    )
    def publish_own(self, who: int, model: int, tier: int, off: int | None, data: st.DataObject) -> None:
        """A tenant's own price of some meters, a discount off the rest, or both."""
        offers = dict(self.versions[-1].offers)
        offers.pop((who, model, tier), None)
        named = sorted({meter for _, meter in offers[None, model, tier]})
        mine = data.draw(st.sets(st.sampled_from(named), min_size=off is None))
        if mine:
            places_of = [place for place in offers[None, model, tier] if place[1] in mine]
            offers[who, model, tier] = {place: data.draw(units) for place in places_of}
        self.publish(offers, {} if off is None else {(who, model, tier): off})

    @precondition(lambda self: len(self.versions) > 1 and any(account.posted for account in self.accounts))
    @rule(
        right=places,
        since=st.sampled_from([-ALWAYS, -ALWAYS, -5, 0]),
        until=st.sampled_from([ALWAYS, ALWAYS, -5, -4, 60]),
        only=st.tuples(some, some),
        meters=st.one_of(st.just(frozenset[str]()), chosen_meters),
        charge_more=st.booleans(),
        done=st.sampled_from([True, True, True, False]),
    )
    def rerate(
        self,
        right: int,
        since: int,
        until: int,
        *,
        only: tuple[frozenset[int], frozenset[int]],
        meters: frozenset[str],
        charge_more: bool,
        done: bool,
    ) -> None:
        """All other versions were wrong: counted without effect, executed, and the same again finds nothing to do."""
        if until <= since:
            until = ALWAYS
        self.do_rerate(
            right % len(self.versions), (since, until), only, frozenset(meters), charge_more=charge_more, done=done
        )

    @precondition(lambda self: any(account.posted for account in self.accounts))
    @rule(right=places, undone=st.sampled_from([True, True, False]))
    def rerate_all(self, right: int, *, undone: bool) -> None:
        """All usage of the example at one version, then at another one; what was reversed before stays reversed."""
        if undone:
            self.reverse_usage()
        if len(self.versions) == 1:
            self.publish(dict.fromkeys(self.versions[0].offers, STEPPED), {})
        for number in (right % len(self.versions), (right + 1) % len(self.versions)):
            self.rerate_once(number, done=True)

    def end(self) -> None:
        """Usage that is reversed is nothing to a re-rating of all."""
        super().end()
        undone = self.reverse_usage()
        if undone is not None:
            posted = self.accounts[undone.who].posted.values()
            version = next(one.version for one in posted if one.tx == undone.tx)
            if len(self.versions) == 1:
                self.publish(dict.fromkeys(self.versions[0].offers, STEPPED), {})
            self.rerate_once((version + 1) % len(self.versions), done=False)

    def rerate_once(self, number: int, *, done: bool) -> None:
        nothing: frozenset[int] = frozenset()
        self.do_rerate(number, (-ALWAYS, ALWAYS), (nothing, nothing), frozenset(), charge_more=True, done=done)

    def do_rerate(
        self,
        number: int,
        time: tuple[int, int],
        only: tuple[frozenset[int], frozenset[int]],
        meters: frozenset[str],
        *,
        charge_more: bool,
        done: bool,
    ) -> None:
        since, until = time
        days = ((self.instant(since) - timedelta(days=1)).toordinal(), self.instant(until).toordinal())
        wrong = frozenset(range(len(self.versions))) - {number}
        wanted = Wanted(wrong, number, since, until, days, *only, meters, charge_more)
        run = self.run(self._ask(wanted))
        assert self.sums(run) == self.total(wanted, done=False)
        if done:
            run = self.run(self._execute(run.id))
            expected = self.total(wanted, done=True)
            moved = (run.done_events, run.credited_pico, run.charged_pico, run.given_pico, run.overrun_pico)
            assert moved == (expected.events, expected.credit, expected.charge, expected.given, expected.overrun)
            self.touched |= set(range(len(self.accounts)))
        else:
            self.run(self._cancel(run.id))

    def total(self, wanted: Wanted, *, done: bool) -> Sums:
        found = Sums()
        for who, account in enumerate(self.accounts):
            right = {
                (model, tier): self.versions[wanted.right].prices(who, model, tier)
                for model in range(2)
                for tier in range(2)
            }
            mine = Rerating(account, wanted, self.now, PAGE)
            found += mine.execute(right) if done else mine.count(right)
        return found

    def sums(self, run: Run) -> Sums:
        return Sums(run.events, run.credit_pico, run.charge_pico, run.uncharged, run.uncharged_pico)

    async def _ask(self, wanted: Wanted) -> Run:
        asked = rerating.Wanted(
            tuple(self.published[version].version_id for version in sorted(wanted.wrong)),
            self.published[wanted.right].version_id,
            self.instant(wanted.since),
            self.instant(wanted.until),
            tuple(MODELS[n] for n in wanted.models),
            tuple(TIERS[n] for n in wanted.tiers),
            tuple(Meter(meter) for meter in sorted(wanted.meters)),
            wanted.charge_more,
        )
        return await self._drive(await again.ask(self.books.sessions, asked))

    async def _drive(self, run: Run) -> Run:
        prices: dict[UUID, Any] = {}
        limits: dict[str, Any] = {"alone_max_pico": again.NO_LIMIT, "now": self.clock.now(), "on_moved": _alone}
        while await rerating_post.step(self.books.sessions, run.id, prices, **limits):
            pass
        async with db.transaction(self.books.sessions) as session:
            return await rerating.get(session, run.id)

    async def _execute(self, run_id: UUID) -> Run:
        done = await self._drive(await again.execute(self.books.sessions, run_id))
        assert done.state == "done"
        await self.refresh(range(len(self.tenants)))
        return done

    async def _cancel(self, run_id: UUID) -> None:
        async with db.transaction(self.books.sessions) as session:
            await rerating.cancel(session, run_id, now=self.clock.now())


class BooksMachine(PriceRules):
    """All rules."""
