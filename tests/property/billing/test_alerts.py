"""Property P22: each (budget, period, threshold) fires at most once, and once if it is crossed; and credit alerts.

On a real Postgres, with any order of arrival, posters that die before they look, several that look at once, and days of
the tenant's own zone, also where clocks change.
"""

import asyncio
from collections.abc import Coroutine
from datetime import UTC, date, datetime, timedelta
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from billing import alert_settings, credit_alerts, crossings
from billing.alert_settings import AlertSettings
from billing.watch import Watch
from core import db
from core.clock import ManualClock
from core.money import PICO_PER_UNIT
from core.settings import Database
from tests.factories import billing as make
from tests.factories.spending import Spender, budget, event_of, spender, used
from tests.integration.billing.test_credit_alerts import spend

T = TypeVar("T")
Plan = list[tuple[int, int, str]]
BUDGET = 10
THRESHOLDS = (50, 80, 100)
# Around each of these midnights or changes of clocks, in a zone with whole, half and quarter hours.
MOMENTS = (
    ("UTC", datetime(2026, 11, 30, tzinfo=UTC)),
    ("Asia/Shanghai", datetime(2026, 11, 29, 16, tzinfo=UTC)),
    ("Europe/Berlin", datetime(2026, 3, 29, 1, tzinfo=UTC)),
    ("Europe/Berlin", datetime(2026, 10, 25, 1, tzinfo=UTC)),
    ("America/St_Johns", datetime(2026, 3, 8, 5, 30, tzinfo=UTC)),
    ("Australia/Lord_Howe", datetime(2026, 4, 4, 15, tzinfo=UTC)),  # by half an hour
    ("Asia/Kathmandu", datetime(2026, 11, 29, 18, 15, tzinfo=UTC)),
)


def limits(examples: int) -> settings:
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,)
    )


class World:
    """One database and loop for all examples; each example has a tenant of its own."""

    def __init__(self, settings_: Database) -> None:
        self.runner = asyncio.Runner()
        self.sessions = db.create_sessions(db.create_engine(settings_))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def close(self) -> None:
        self.run(self.sessions.kw["bind"].dispose())
        self.runner.close()


# An hour before or after the moment, units, and what happens then: nothing, a look, looks at once, a poster that dies.
steps = st.lists(
    st.tuples(st.integers(-40 * 4, 40 * 4), st.integers(1, 7), st.sampled_from(["", "look", "looks", "dies"])),
    min_size=1,
    max_size=8,
)


async def post_and_look(sessions: db.Sessions, who: Spender, moment: datetime, plan: Plan) -> None:
    watch = Watch(sessions, ManualClock(moment))
    for quarters, units, then in plan:
        at = moment + timedelta(minutes=15 * quarters)
        await used(sessions, who.tenant.id, at.isoformat(), str(units), **who.whose)
        watch.note([event_of(who, at)])
        if then == "look":
            await watch.look()
        elif then == "looks":
            other = Watch(sessions, ManualClock(moment))
            other.note([event_of(who, at)])
            await asyncio.gather(
                watch.look(), other.look(), crossings.sweep_these(sessions, [who.tenant.id], ManualClock(at))
            )
        elif then == "dies":
            watch = Watch(sessions, ManualClock(moment))
    for day in range(-2, 4):  # what the dead ones did not look at is swept up, every day
        await crossings.sweep_these(sessions, [who.tenant.id], ManualClock(moment + timedelta(days=day)))


def expected(zone: ZoneInfo, moment: datetime, plan: Plan) -> set[tuple[date, int]]:
    """The model: add up by the date on a wall there."""
    sums: dict[date, int] = {}
    for quarters, units, _ in plan:
        day = (moment + timedelta(minutes=15 * quarters)).astimezone(zone).date()
        sums[day] = sums.get(day, 0) + units
    return {(day, percent) for day, units in sums.items() for percent in THRESHOLDS if 100 * units >= percent * BUDGET}


def test_each_threshold_of_each_day_fires_exactly_once_if_it_is_crossed(database_settings: Database) -> None:
    world = World(database_settings)

    @limits(20)
    @given(where=st.sampled_from(MOMENTS), plan=steps)
    def run(where: tuple[str, datetime], plan: Plan) -> None:
        tz, moment = where
        zone = ZoneInfo(tz)

        async def work() -> list[tuple[date, int]]:
            who = await spender(world.sessions, tz)
            await budget(world.sessions, who, str(BUDGET))
            await post_and_look(world.sessions, who, moment, plan)
            async with db.transaction(world.sessions) as session:
                found = await crossings.search(session, who.tenant.id, None, after=None, limit=200)
            starts = [(one.window[0], one.threshold) for one in found]
            return [(start.astimezone(zone).date(), threshold) for start, threshold in starts if start is not None]

        fired = world.run(work())
        assert len(fired) == len(set(fired))
        assert set(fired) == expected(zone, moment, plan)

    try:
        run()
    finally:
        world.close()


def test_an_alert_on_credit_fires_once_each_time_the_balance_was_above_and_is_not(database_settings: Database) -> None:
    """Payments, usage and looks in any order against a model of three lines."""
    world = World(database_settings)
    acts = st.lists(st.tuples(st.sampled_from(["pay", "use", "look", "look at once"]), st.integers(1, 9)), max_size=12)

    @limits(20)
    @given(start=st.integers(1, 20), threshold=st.integers(1, 20), plan=acts)
    def run(start: int, threshold: int, plan: list[tuple[str, int]]) -> None:
        async def work() -> None:
            who = await spender(world.sessions, credit=str(start))
            async with db.transaction(world.sessions) as session:
                wanted = AlertSettings(low_balance_pico=threshold * PICO_PER_UNIT, days_left=None)
                await alert_settings.put(session, who.tenant.id, wanted)
            left, is_open, fired = start, False, 0
            for number, (act, units) in enumerate(plan):
                if act == "pay":
                    await make.add_credit(world.sessions, who.tenant.id, str(units), f"k{number}")
                    left += units
                    is_open = is_open and left <= threshold
                elif act == "use":
                    await spend(world.sessions, who, str(min(units, left)))
                    left -= min(units, left)
                else:
                    clock = ManualClock()
                    clock.advance(number)
                    times = 3 if act == "look at once" else 1
                    looks = [credit_alerts.look(world.sessions, [who.tenant.id], clock) for _ in range(times)]
                    new = sum(await asyncio.gather(*looks))
                    assert new == int(left <= threshold and not is_open), (act, left, is_open)
                    fired += new
                    is_open = left <= threshold
            async with db.transaction(world.sessions) as session:
                found = await credit_alerts.search(session, who.tenant.id, after=None, limit=50)
            assert len(found) == fired
            assert [one.cleared_at is None for one in found[:1]] == ([is_open] if found else [])

        world.run(work())

    try:
        run()
    finally:
        world.close()
