"""Rules of usage: calls that are held for, written, posted, kept in quarantine, and what a lost Valkey knows again."""

from dataclasses import replace
from itertools import pairwise
from uuid import UUID

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from billing import credit_figures, quarantine, reconcile
from billing.credit_figures import Settlement
from billing.types import Outcome
from core import db, keyspace
from core.credit_figure import LAYOUT, parse_figure
from core.errors import PlatformError
from core.ids import uuid7_time
from core.money import nano_up
from core.usage import TokenUsage
from scheduler.types import Grant as Admitted
from tests.factories import billing as make
from tests.factories import lots as credit
from tests.factories.scheduler import ask, money
from tests.property.billing.machine import MODELS, NANO, TIERS, Call, Made, Undo, places, tenants
from tests.property.billing.machine_time import Edge, TimeRules
from tests.property.billing.model import Event
from tests.property.billing.model_prices import Usage

HELD_MAX = 4
LEFT_AFTER = 2  # minutes after which a posted entry counts as left over
counts = st.sampled_from([0, 0, 1, 1, 2, 3])
edges = st.sampled_from([Usage(2, 1, 1, 1, 0), Usage(1, 3, 1, 0, 2), Usage(2, 0, 0, 0, 0), Usage(0, 0, 0, 0, 0)])
usages = st.one_of(st.builds(Usage, counts, counts, counts, counts, counts), edges)
outcomes = st.sampled_from(
    [*["completed"] * 4, "client_abort", "client_abort", "upstream_error", "timeout", "preempted"]
)
ENDINGS = ("completed", "client_abort", "upstream_error", "timeout", "preempted")
offers = st.tuples(st.integers(0, 1), st.integers(0, 1))
digests = st.sampled_from([None, None, 0, 0, 1])
apart = st.sampled_from([0, 0, 1439, 1440])  # minutes between two calls
afters = st.sampled_from([-1, 0, 9, 10])  # minutes after a lot's expiry; from 10 on it is taken back
agos = st.sampled_from([0, 0, 0, 1, 7, 1439, 1440, 3000])


def counted(usage: Usage) -> TokenUsage:
    return TokenUsage(usage.fresh, usage.cached, usage.written, usage.output, usage.reasoning)


class UsageRules(TimeRules):
    """What gateways and posters do."""

    def event(
        self, who: int, call: tuple[int, int], usage: Usage, outcome: str, *, ago: int = 0, digest: int | None = None
    ) -> Made:
        """A call as the gateway writes it, priced by the model and by hand there."""
        model, tier = call
        minute = self.now - ago
        schedule = self.published[-1].schedule(MODELS[model], TIERS[tier], self.tenants[who])
        assert schedule is not None
        prices = self.versions[-1].prices(who, model, tier)
        us = int(self.instant(minute).timestamp()) * 1_000_000
        made = make.event(
            self.tenants[who],
            schedule,
            counted(usage),
            outcome=Outcome(outcome),
            event_id=self.new_id(minute),
            amount_pico=sum(prices.cost(usage, outcome)),
        )
        made = msgspec.structs.replace(
            made,
            admitted_at_us=us,
            ended_at_us=us + 7,
            model_id=MODELS[model],
            idempotency=b"" if digest is None else bytes([digest]) * 16,
        )
        at = self.instant(minute)
        where = (minute, at.year * 12 + at.month, at.toordinal(), model, tier)
        return who, made, Event(made.id.hex, *where, usage, outcome, prices, len(self.versions) - 1, digest)

    @rule(
        who=tenants,
        call=offers,
        usage=usages,
        outcome=outcomes,
        ago=agos,
        edge=st.tuples(places, st.sampled_from([None, 0, 0, 1])),
        digest=digests,
        more=apart,
    )
    def use(
        self,
        who: int,
        call: tuple[int, int],
        usage: Usage,
        outcome: str,
        *,
        ago: int,
        edge: Edge,
        digest: int | None,
        more: int,
    ) -> None:
        """Two like calls that some gateway served, now or a while ago, some at a lot's expiry; two batches or one."""
        lot, before = self.expiring(who, edge[0]), edge[1]
        if lot is not None and before is not None:
            ago = max(0, self.now - lot + before)
        made = [self.event(who, call, usage, outcome, ago=one, digest=digest) for one in (ago + more, ago)]
        self.made += made
        for batch in [made] if ago else [made[:1], made[1:]]:
            self.post(batch)

    @rule(
        whose=st.lists(tenants, min_size=1, max_size=5),
        call=offers,
        usage=usages,
        outcome=outcomes,
        agos=st.lists(agos, min_size=1, max_size=3),
        digest=digests,
        posted=st.booleans(),
    )
    def use_much(
        self,
        whose: list[int],
        call: tuple[int, int],
        usage: Usage,
        outcome: str,
        *,
        agos: list[int],
        digest: int | None,
        posted: bool,
    ) -> None:
        """Calls of several tenants, months and models, posted as one batch or waiting in the spools."""
        for number, who in enumerate(whose):
            model, tier = (call[0] + number) % 2, call[1]
            ago = agos[number % len(agos)]
            self.made.append(self.event(who, (model, tier), usage, outcome, ago=ago, digest=digest))
        if posted:
            self.post(self.made[-len(whose) :])

    @precondition(lambda self: any(self.expiring(who, 0) is not None for who in range(3)))
    @rule(who=tenants, pick=places, call=offers, usages=st.lists(usages, min_size=2, max_size=3), after=afters)
    def use_about_expiry(self, who: int, pick: int, call: tuple[int, int], usages: list[Usage], after: int) -> None:
        """Calls of the last minute of a lot and of the first without it, posted before or after that."""
        lot = self.expiring(who, pick)
        if lot is None:
            return
        if lot + after > self.now:
            self.go_on(lot + after - self.now)
        minutes = [min(self.now, lot + number - 1) for number in range(len(usages))]
        made = [
            self.event(who, call, usage, "completed", ago=self.now - minute)
            for usage, minute in zip(usages, minutes, strict=True)
        ]
        self.made += made
        self.post(made)

    @rule(who=tenants, call=offers, usage=usages)
    def use_in_every_way(self, who: int, call: tuple[int, int], usage: Usage) -> None:
        """The same call with each ending, with and without anything that was generated; one batch."""
        unheard = replace(usage, output=0, reasoning=0)
        made = [self.event(who, call, one, outcome) for one in (usage, unheard) for outcome in ENDINGS]
        self.made += made
        self.post(made)

    @precondition(lambda self: self.made)
    @rule(
        picks=st.lists(places, min_size=1, max_size=12),
        newest=st.integers(0, 6),
        splits=st.lists(places, max_size=2),
        crashes=st.integers(0, 1),
        late=st.booleans(),
    )
    def deliver(self, picks: list[int], newest: int, splits: list[int], *, crashes: int, late: bool) -> None:
        """Any events made so far, in any order, again and again, in up to three batches.

        A poster that crashes has committed and told Valkey nothing; the next one gets the same batch. What it tells
        may come late, after what the next batch came to.
        """
        chosen = [*self.made[len(self.made) - newest :], *(self.made[pick % len(self.made)] for pick in picks)]
        cuts = sorted({0, len(chosen), *(split % len(chosen) for split in splits)})
        for start, end in pairwise(cuts):
            self.post(chosen[start:end], crashes, late=late)

    def post(self, batch: list[Made], crashes: int = 0, *, late: bool = False) -> None:
        events = [event for _, event, _ in batch]
        for _ in range(crashes):
            self.run(self.posting.post(events))
        posted = self.run(self.posting.post(events))
        assert sum(one.quarantined for one in posted) == 0
        for who in range(len(self.accounts)):
            self.book_usage(who, [event for owner, _, event in batch if owner == who])
        settlements: list[Settlement] = [settlement for one in posted for settlement in one.settlements]
        self.late.append((settlements, batch))
        while self.late and not late:
            self.tell(len(self.late) - 1)

    def book_usage(self, who: int, batch: list[Event]) -> None:
        account = self.accounts[who]
        before = len(account.postings)
        if account.use(batch):
            self.touched.add(who)
        for number in range(before, len(account.postings)):
            if account.postings[number].moves:
                self.reversible.append(Undo(who, number, account.postings[number].moves))

    def tell(self, number: int) -> None:
        """Let Valkey know what a poster posted."""
        settlements, batch = self.late.pop(number)
        self.run(credit_figures.settle_all(self.fleet.client, settlements))
        for who, _, event in batch:
            self.accounts[who].out.pop(event.key, None)

    @precondition(lambda self: self.late)
    @rule(pick=places)
    def arrive_late(self, pick: int) -> None:
        self.tell(pick % len(self.late))

    # quarantine

    @precondition(lambda self: len(self.held) < HELD_MAX)
    @rule(who=tenants, call=offers, usage=usages, wrong=st.sampled_from([1, -1, 1000]), digest=digests)
    def use_wrongly(self, who: int, call: tuple[int, int], usage: Usage, wrong: int, digest: int | None) -> None:
        """An amount that the prices do not give."""
        self.quarantine(self.event(who, call, usage, "completed", digest=digest), wrong)

    def quarantine(self, made: Made, wrong: int) -> None:
        """It is kept, what was held for it goes back, and nothing beside it is held up."""
        who, event, right = made
        event = msgspec.structs.replace(event, amount_pico=abs(event.amount_pico + wrong))
        if event.amount_pico == sum(right.cost):
            return
        self.held.append((who, event, right))
        self.offer_again(self.held[-1])

    def offer_again(self, held: Made) -> None:
        batch = [held, *self.made[-1:]]
        posted = self.run(self.posting.post([event for _, event, _ in batch]))
        assert sum(one.quarantined for one in posted) == 1
        for who, _, event in batch[1:]:
            self.book_usage(who, [event])
        self.run(credit_figures.settle_all(self.fleet.client, [one for p in posted for one in p.settlements]))
        for who, offered, _ in batch:
            self.accounts[who].out.pop(offered.id.hex, None)

    @precondition(lambda self: self.held)
    @rule(pick=places, usage=usages, bill=st.sampled_from([True, True, False]), again=st.booleans())
    def decide_quarantine(self, pick: int, usage: Usage, *, bill: bool, again: bool) -> None:
        """An operator bills it with counts of their own at its old prices, or dismisses it; once, for good."""
        who, event, right = held = self.held.pop(pick % len(self.held))
        refused = bill and self.accounts[who].repeats(replace(right, usage=usage))

        async def work() -> tuple[str | None, UUID | None]:
            tenant_id, at = self.tenants[who], self.clock.now()
            try:
                async with db.transaction(self.books.sessions) as session:
                    if bill:
                        item = await quarantine.bill(
                            session,
                            tenant_id,
                            event.id,
                            counted(usage),
                            reason="why",
                            by=credit.ASKER.operator_id,
                            now=at,
                        )
                    else:
                        item = await quarantine.dismiss(
                            session, tenant_id, event.id, reason="why", by=credit.ASKER.operator_id, now=at
                        )
            except PlatformError as error:
                return error.code, None
            await self.refresh([who])
            assert item.decision is not None
            return None, item.decision.event_id

        said, billed_as = self.run(work())
        assert (said, billed_as is None) == (("NOT_BILLABLE", True) if refused else (None, not bill))
        self.touched.add(who)
        if refused:
            self.held.append(held)
            return
        if billed_as is not None:
            day = uuid7_time(billed_as).toordinal()
            self.book_usage(who, [replace(right, key=billed_as.hex, usage=usage, day=day, released=True)])
        assert self.run(work())[0] == "ALREADY_DECIDED"
        if again:
            self.offer_again(held)

    # holds

    @rule(who=st.integers(0, 2), hold=st.one_of(st.integers(0, 12), st.none()))
    def admit(self, who: int, hold: int | None) -> None:
        """A hold is taken when the credit that nothing else claims covers it: all of it, and not one nano more."""
        tenant_id, account = self.tenants[who], self.accounts[who]
        free = account.figure // NANO - sum(account.out.values())
        wanted = max(0, free) if hold is None else hold

        async def work(nano: int) -> Admitted | str:
            if self.late:
                await self.refresh([who])
            try:
                return await ask(self.door, self.model, money=money(tenant_id, nano), request_id=self.new_id(self.now))
            except PlatformError as error:
                return error.code

        if hold is None:
            assert self.run(work(wanted + 1)) == "INSUFFICIENT_CREDIT"
        said = self.run(work(wanted))
        if free < wanted:
            assert said == "INSUFFICIENT_CREDIT"
            return
        assert isinstance(said, Admitted)
        account.out[said.request_id.hex] = wanted
        self.calls.append(Call(who, wanted, said))

    def running(self, pick: int) -> Call:
        return self.calls.pop(pick % len(self.calls))

    @precondition(lambda self: self.calls)
    @rule(
        pick=places,
        usage=usages,
        outcome=st.sampled_from(["completed", "client_abort", "timeout"]),
        wrong=st.sampled_from([0, 0, 1]),
    )
    def settle_call(self, pick: int, usage: Usage, outcome: str, wrong: int) -> None:
        """The hold sinks to the charge; what is not spent of it is free at once, twice settled is settled once."""
        call = self.running(pick)
        who, made, event = self.event(call.who, (0, 0), usage, outcome)
        request = call.admitted.request_id
        made, event = msgspec.structs.replace(made, id=request), replace(event, key=request.hex)
        charge = min(call.hold, nano_up(made.amount_pico))
        self.door.release(call.admitted, charge)
        self.door.release(call.admitted, 0)
        self.run(self.door.heartbeat())
        self.accounts[who].out[request.hex] = charge
        if wrong:
            self.quarantine((who, made, event), wrong)
        else:
            self.made.append((who, made, event))

    @precondition(lambda self: self.calls)
    @rule(pick=places)
    def abort_call(self, pick: int) -> None:
        """A call that never got to an engine leaves no hold and no event."""
        call = self.running(pick)
        self.door.release(call.admitted, None)
        self.run(self.door.heartbeat())
        self.accounts[call.who].out.pop(call.admitted.request_id.hex)

    @precondition(lambda self: self.calls)
    @rule(pick=places)
    def write_off(self, pick: int) -> None:
        """What a lost replica held is given back."""
        call = self.running(pick)
        request, tenant_id = call.admitted.request_id, self.tenants[call.who]

        async def work() -> None:
            await self.fleet.client.call("HSET", keyspace.owed("gone"), request.hex, tenant_id.hex)
            assert await reconcile.write_off(self.fleet.client, "gone") == {tenant_id: [request]}
            assert await reconcile.write_off(self.fleet.client, "gone") == {}
            self.door.release(call.admitted, None)  # it was not lost after all
            await self.door.heartbeat()

        self.run(work())
        self.accounts[call.who].out.pop(request.hex)

    # what is lost, and put right

    @precondition(lambda self: [account.out for account in self.accounts] != self.lost)
    @rule()
    def lose_valkey(self) -> None:
        """All its data is gone: figures come from the ledger, charges from the spools, holds from the replica."""
        self.run(self._lose_valkey())
        self.lost = [dict(account.out) for account in self.accounts]

    async def _lose_valkey(self) -> None:
        await self.fleet.client.call("FLUSHALL")
        await self.refresh(range(len(self.tenants)))
        charges = []
        for who, made, event in self.made:
            nano = self.accounts[who].out.get(event.key)
            if nano is not None:
                charges.append(msgspec.structs.replace(made, amount_pico=nano * NANO))
        await credit_figures.register(self.fleet.client, charges)
        await self.door.resync()
        await self.fleet.advance(5.1)
        await self.door.heartbeat()
        await self.door.tick()

    @precondition(lambda self: self.moved > self.looked_at)
    @rule(who=tenants, off=st.sampled_from([0, 1, -1, 10**6]))
    def repair(self, who: int, off: int) -> None:
        """A figure is not the ledger's; the poster's look of every minute puts it right, and drops what is posted."""
        stale, self.looked_at = bool(self.late), self.moved

        async def work() -> credit_figures.Drift:
            client, key = self.fleet.client, keyspace.credit(self.tenants[who])
            await self.refresh(range(len(self.tenants)))
            right = parse_figure(await client.call("GET", key))
            assert right is not None
            await client.call("SET", key, LAYOUT.pack(right.available + off, right.version, right.outstanding + off))
            return await credit_figures.reconcile(self.books.sessions, client, self.clock)

        drift = self.run(work())
        assert (drift.figures, drift.figures_nano) == (int(off != 0), abs(off))
        assert (drift.sums, drift.sums_nano) == (int(off != 0), abs(off))
        for account in self.accounts:
            for event in [one.event for key, one in account.posted.items() if key in account.out]:
                assert stale
                if event.minute < self.now - LEFT_AFTER:
                    account.out.pop(event.key)

    def end(self) -> None:
        while self.late:
            self.tell(0)
        for start in range(0, len(self.made), 50):
            self.post(self.made[start : start + 50])
