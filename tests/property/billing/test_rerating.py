"""Rating again at B what was rated at A ends where rating at B from the start would have, however it is interrupted."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from uuid import UUID

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from billing import pricing, reconcile, rerating_post, verify
from billing.price_table import VersionPrices
from billing.rerating_rate import patched
from billing.types import Meter, Outcome, PriceItem, PriceSchedule, PriceStep
from core import db
from core.money import Currency
from core.settings import Database
from core.tiers import Tier
from core.usage import TokenUsage
from tests.factories import billing as make
from tests.factories import lots as credit
from tests.factories import rerating as again
from tests.integration.billing.test_price_preview import NOON, at, post

LISTS: tuple[dict[str, str], ...] = (
    {"input": "2.00", "cached_input": "0.20", "output": "6.00"},
    {"input": "3.00", "output": "5.00", "reasoning": "9.00"},
    {"input": "0.05", "output": "0.20", "min_charge": "0.0004"},
    {"input": "1.00", "cached_input": "2.50", "output": "6.00", "request": "0.0001", "min_charge": "0.0002"},
)
counts = st.integers(0, 300)
usages = st.builds(TokenUsage, counts, counts, counts, counts, counts)
endings = st.sampled_from((Outcome.COMPLETED, Outcome.COMPLETED, Outcome.CLIENT_ABORT, Outcome.TIMEOUT))
batches = st.lists(st.lists(st.tuples(usages, endings), min_size=1, max_size=4), min_size=1, max_size=4)
Batches = Sequence[Sequence[tuple[TokenUsage, Outcome]]]


def listed(number: int) -> list[PriceItem]:
    """A list of prices; that of an odd number has a step."""
    items = make.items(LISTS[number])
    if number % 2:
        above = [PriceItem(i.model_id, i.tier, i.meter, 2 * i.unit_price_pico, None, 200) for i in items]
        items += [item for item in above if item.meter not in (Meter.REQUEST, Meter.MIN_CHARGE)]
    return items


class World:
    """One database for all examples; versions 0 to 3 are published."""

    def __init__(self, runner: asyncio.Runner, database: Database) -> None:
        self.runner = runner
        self.engine = db.create_engine(database)
        self.sessions = db.create_sessions(self.engine)
        self.versions: list[VersionPrices] = []

    async def open(self) -> None:
        self.versions = [await make.publish_prices(self.sessions, listed(0))]
        self.versions += [await again.version(self.sessions, listed(number)) for number in (1, 2, 3)]

    async def used(self, at_version: int, paid: str, promo: str, made: Batches) -> UUID:
        tenant_id = await make.tenant(self.sessions, paid)
        await credit.give(self.sessions, tenant_id, promo, NOON - timedelta(days=1))
        s = make.schedule(self.versions[at_version], tenant_id)
        for number, batch in enumerate(made):
            when = NOON + timedelta(minutes=number)
            await post(self.sessions, *(at(make.event(tenant_id, s, u, outcome=o), when) for u, o in batch))
        return tenant_id

    async def accounts(self, tenant_id: UUID) -> dict[str, int]:
        async with db.transaction(self.sessions) as session:
            rows = await session.execute(
                text(
                    "SELECT a.code, sum(b.credit - b.debit) FROM ledger_account a JOIN ledger_balance b"
                    " ON b.account_id = a.id WHERE a.tenant_id = :t GROUP BY a.code"
                ),
                {"t": tenant_id},
            )
            return {row[0]: int(row[1]) for row in rows}

    async def interrupted(self, run_id: UUID, fail_at: set[int]) -> None:
        """Do the run; batches of these numbers die after they have written all, before they commit."""
        done = -1

        async def dies(_session: AsyncSession, _tenant_id: UUID) -> None:
            nonlocal done
            done += 1
            if done in fail_at:
                raise ConnectionResetError

        more = True
        while more:
            with suppress(ConnectionResetError):
                more = await rerating_post.step(
                    self.sessions, run_id, {}, alone_max_pico=again.NO_LIMIT, now=again.NOW, on_moved=dies
                )


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rerating_post, "EVENTS_MAX", 3)


@pytest.mark.usefixtures("small_batches")
def test_it_ends_where_the_right_price_would_have(database_settings: Database) -> None:
    with asyncio.Runner() as runner:
        world = World(runner, database_settings)
        runner.run(world.open())

        async def example(a: int, b: int, paid: str, made: Batches, fail_at: set[int]) -> None:
            rerated, right = [await world.used(number, paid, "0.001", made) for number in (a, b)]
            what = again.wanted(world.versions[a], world.versions[b], charge_more=True)
            run = await again.ask(world.sessions, what)
            await again.drive(world.sessions, run.id)
            await again.execute(world.sessions, run.id)
            await world.interrupted(run.id, fail_at)
            found, expected = await world.accounts(rerated), await world.accounts(right)
            for code in ("revenue.usage", "revenue.min_charge"):
                assert found[code] == expected[code], code
            ends = [sum(await credit.left(world.sessions, tenant_id)) for tenant_id in (rerated, right)]
            assert ends[0] >= ends[1]
            if not found["expense.overrun"] and not expected["expense.overrun"]:
                assert ends[0] == ends[1]
            repeated = await again.rerate(world.sessions, what)  # they stand at the right version now
            assert (repeated.events, await world.accounts(rerated)) == (0, found)

        @settings(
            max_examples=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.generate),
        )
        @given(
            st.permutations(range(4)),
            st.sampled_from(("0.002", "0.02", "5")),
            batches,
            st.sets(st.integers(0, 8), max_size=4),
        )
        def check(order: list[int], paid: str, made: Batches, fail_at: set[int]) -> None:
            runner.run(example(order[0], order[1], paid, made, fail_at))

        check()

        async def verified() -> None:
            async with db.transaction(world.sessions) as session:
                assert await verify.verify(session) is None
            assert (await reconcile.books(world.sessions))[1] == []
            await world.engine.dispose()

        runner.run(verified())


prices = st.integers(0, 50)


@st.composite
def schedules(draw: st.DrawFn) -> PriceSchedule:
    five = st.tuples(*(prices,) * 5)
    aboves = sorted(draw(st.sets(st.integers(1, 40), max_size=3)))
    return PriceSchedule(
        make.MODEL,
        Currency.USD,
        Tier.STANDARD,
        *draw(five),
        request=draw(prices),
        minimum=draw(prices),
        steps=tuple(PriceStep(above, *draw(five)) for above in aboves),
    )


@settings(max_examples=200, deadline=None)
@given(schedules(), schedules(), st.sets(st.sampled_from(Meter)), st.lists(st.integers(0, 30), min_size=5, max_size=5))
def test_a_part_of_the_meters_is_priced_anew_and_the_rest_is_not(
    now: PriceSchedule, right: PriceSchedule, meters: set[Meter], tokens: list[int]
) -> None:
    """The amount is that of each meter at its own list, in the step of that list."""
    usage = TokenUsage(*tokens)
    mixed = patched(now, right, meters)
    if not meters:
        assert mixed is right
        return
    parts = (Meter.INPUT, Meter.CACHED_INPUT, Meter.CACHE_WRITE, Meter.OUTPUT, Meter.REASONING)
    expected = 0
    for meter, count in zip(parts, tokens, strict=True):
        unit = pricing.step_of(right if meter in meters else now, usage.input_total)
        expected += count * int(getattr(unit, meter.value))
    if usage.input_total + usage.output_total:
        expected += (right if Meter.REQUEST in meters else now).request
    assert pricing.rate(usage, mixed) == expected
    assert mixed.minimum == (right if Meter.MIN_CHARGE in meters else now).minimum
