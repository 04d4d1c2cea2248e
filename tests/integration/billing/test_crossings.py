"""Crossings of budgets' thresholds: once each, in days and months of the tenant's zone, told to whom they concern."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import text

from billing import alert_settings, alert_tasks, crossings
from billing.alert_settings import AlertSettings
from billing.watch import Watch
from catalog import models
from core import mail, outbox
from core.clock import ManualClock
from core.db import Sessions, transaction
from core.money import parse_pico
from core.outbox import Outcome
from core.settings import Database, Settings
from core.tasks import Job, TaskContext
from tenants import api_keys, members
from tenants.types import LimitLevel, LimitMetric, LimitMode, LimitSlot, Role, Status
from tests.factories.limits import limited
from tests.factories.people import member
from tests.factories.spending import Spender, budget, event_of, spender, used
from tests.factories.tenants import PEPPER

JOBS = {task.name: task for task in (*alert_tasks.TASKS, *mail.TASKS) if isinstance(task, Job)}
MORNING = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)


def instant(text_: str) -> datetime:
    return datetime.fromisoformat(text_)


def context_of(sessions: Sessions, database: Database, home: Path, clock: ManualClock) -> TaskContext:
    settings = Settings.model_validate(
        {
            "home": home,
            "secrets": {"pepper": "00" * 32, "signing": "11" * 32, "sealing": "22" * 32},
            "database": database,
            "valkey": {"url": "unix:///none", "broker_url": "unix:///none"},
        }
    )
    return TaskContext(settings, sessions, clock)


async def spend(sessions: Sessions, who: Spender, at: str, amount: str) -> int:
    """Post usage and look, as the poster does; returns how many thresholds were crossed."""
    await used(sessions, who.tenant.id, at, amount, **who.whose)
    watch = Watch(sessions, ManualClock(instant(at)))
    watch.note([event_of(who, instant(at))])
    return await watch.look()


async def told(sessions: Sessions, who: Spender) -> list[tuple[str, str, int, str]]:
    """Return level, metric, threshold and spent units of each crossing, oldest first."""
    async with transaction(sessions) as session:
        found = await crossings.search(session, who.tenant.id, None, after=None, limit=100)
    return [(one.level, one.metric, one.threshold, f"{one.spent_pico // 10**12}") for one in reversed(found)]


async def test_each_threshold_is_crossed_once_a_day(sessions: Sessions) -> None:
    """$10 a day: 4.99, 5.00 (50 %), 8.50 (80 %), 9.99, 10.00 (100 %), more; the next day begins anew."""
    who = await spender(sessions)
    await budget(sessions, who, "10")
    new = [
        await spend(sessions, who, f"2026-11-30T0{hour}:00Z", amount)
        for hour, amount in enumerate(("4.99", "0.01", "3.50", "1.49", "0.01", "7"))
    ]
    assert new == [0, 1, 1, 0, 1, 0]
    assert await spend(sessions, who, "2026-12-01T00:00Z", "9") == 2
    assert [row[2:] for row in await told(sessions, who)] == [(50, "5"), (80, "8"), (100, "10"), (50, "9"), (80, "9")]


async def test_a_day_in_shanghai_begins_at_16_utc_and_has_24_hours(sessions: Sessions) -> None:
    """LiteLLM PR 40978: there, $100 per 24 hours lasted for 32. Reset is at 00:00 in Shanghai, 16:00 UTC."""
    who = await spender(sessions, "Asia/Shanghai")
    await budget(sessions, who, "100")
    assert await spend(sessions, who, "2026-11-29T15:59Z", "49") == 0
    assert await spend(sessions, who, "2026-11-29T16:00Z", "49") == 0  # another day
    assert await spend(sessions, who, "2026-11-30T15:59Z", "51") == 3
    assert await spend(sessions, who, "2026-11-30T16:00Z", "50") == 1
    async with transaction(sessions) as session:
        newest, *_, first = await crossings.search(session, who.tenant.id, None, after=None, limit=100)
    assert first.window == (instant("2026-11-29T16:00Z"), instant("2026-11-30T16:00Z"))
    assert newest.window == (instant("2026-11-30T16:00Z"), instant("2026-12-01T16:00Z"))


@pytest.mark.parametrize(
    ("first", "last", "next_", "hours"),
    [
        ("2026-03-28T23:00Z", "2026-03-29T21:59Z", "2026-03-29T22:00Z", 23),
        ("2026-10-24T22:00Z", "2026-10-25T22:59Z", "2026-10-25T23:00Z", 25),
    ],
)
async def test_days_of_23_and_25_hours(sessions: Sessions, first: str, last: str, next_: str, hours: int) -> None:
    who = await spender(sessions, "Europe/Berlin")
    await budget(sessions, who, "10")
    assert [await spend(sessions, who, at, "4") for at in (first, last, next_)] == [0, 2, 0]
    async with transaction(sessions) as session:
        (one, _) = await crossings.search(session, who.tenant.id, None, after=None, limit=100)
    assert one.window[0] == instant(first)
    assert one.window[1] == instant(next_)
    assert instant(next_) - instant(first) == timedelta(hours=hours)


async def test_usage_that_arrives_after_midnight_crosses_the_budget_of_its_own_day(sessions: Sessions) -> None:
    who = await spender(sessions)
    await budget(sessions, who, "10")
    await used(sessions, who.tenant.id, "2026-11-30T23:59Z", "10", **who.whose)
    watch = Watch(sessions, ManualClock(instant("2026-12-04T00:00Z")))
    watch.note([event_of(who, instant("2026-11-30T23:59Z"))])
    assert await watch.look() == 3


async def test_looking_at_once_from_many_places_crosses_once(sessions: Sessions) -> None:
    """Five posters and three workers."""
    who = await spender(sessions)
    await budget(sessions, who, "10")
    await used(sessions, who.tenant.id, "2026-11-30T09:00Z", "12", **who.whose)
    clock = ManualClock(MORNING)
    watches = [Watch(sessions, clock) for _ in range(5)]
    for watch in watches:
        watch.note([event_of(who, MORNING)])
    looks = [watch.look() for watch in watches] + [crossings.sweep(sessions, clock) for _ in range(3)]
    assert sum(await asyncio.gather(*looks)) == 3
    assert len(await told(sessions, who)) == 3
    async with transaction(sessions) as session:
        jobs = await session.scalars(text("SELECT count(*) FROM outbox WHERE task = 'billing.tell_crossings'"))
    assert jobs.one() <= 3


async def test_levels_models_and_modes_are_budgets_of_their_own(sessions: Sessions) -> None:
    who = await spender(sessions)
    async with transaction(sessions) as session:
        model = await models.create_model(session, name="small", now=MORNING)
        other, _ = await api_keys.create(session, who.tenant.id, who.project.id, name="other", pepper=PEPPER)
    await budget(sessions, who, "40", LimitMetric.SPEND_PER_MONTH, LimitLevel.PROJECT, mode=LimitMode.HARD)
    await budget(sessions, who, "10", LimitMetric.SPEND_TOTAL, LimitLevel.KEY, model="small")
    await budget(sessions, who, "1", mode=LimitMode.DARK)  # a trial: nobody is told
    await budget(sessions, who, "0", mode=LimitMode.HARD)  # allows nothing, so nothing can cross it
    watch = Watch(sessions, ManualClock(MORNING))
    for key, amount, of in ((who.key.id, "6", model), (other.id, "4", model), (who.key.id, "11", uuid4())):
        whose = {"project": who.project.id, "key": key, "model": of}
        await used(sessions, who.tenant.id, "2026-11-02T09:00Z", amount, **whose)
    watch.note([event_of(who, MORNING)])
    assert await watch.look() == 2
    assert await told(sessions, who) == [("key", "spend_total", 50, "6"), ("project", "spend_per_month", 50, "21")]
    async with transaction(sessions) as session:
        status = await crossings.status(session, who.tenant.id, None, MORNING)
        elsewhere = await crossings.status(session, who.tenant.id, {uuid4()}, MORNING)
    assert [(one.budget.level.value, one.budget.owner_id, one.spent_pico) for one in status] == [
        ("tenant", who.tenant.id, 0),
        ("key", who.key.id, parse_pico("6")),
        ("project", who.project.id, parse_pico("21")),
        ("key", other.id, parse_pico("4")),
    ]
    assert elsewhere == []


async def test_a_limit_set_below_what_is_spent_and_one_that_is_raised(sessions: Sessions) -> None:
    """The sweep sees it without any usage; a raised amount is another budget, put back it is the old one."""
    who = await spender(sessions)
    await used(sessions, who.tenant.id, "2026-11-30T08:00Z", "9", **who.whose)
    clock = ManualClock(MORNING)
    new = []
    for amount in ("10", "10", "15", "10", "100"):
        await budget(sessions, who, amount)
        new.append(await crossings.sweep(sessions, clock))
    assert new == [2, 0, 1, 0, 0]


async def test_what_a_killed_poster_did_not_look_at_is_swept_up_also_the_day_after(sessions: Sessions) -> None:
    who = await spender(sessions)
    await budget(sessions, who, "10")
    await used(sessions, who.tenant.id, "2026-11-30T23:59Z", "5", **who.whose)
    assert await crossings.sweep(sessions, ManualClock(instant("2026-12-01T23:58Z"))) == 1
    assert await crossings.sweep(sessions, ManualClock(instant("2026-12-01T23:58Z"))) == 0


async def test_thresholds_are_the_tenants_own(sessions: Sessions) -> None:
    who, silent = await spender(sessions), await spender(sessions)
    for one, thresholds in ((who, (200, 25)), (silent, ())):
        await budget(sessions, one, "10")
        async with transaction(sessions) as session:
            await alert_settings.put(session, one.tenant.id, AlertSettings(thresholds))
    assert await spend(sessions, who, "2026-11-30T09:00Z", "19.99") == 1
    assert await spend(sessions, who, "2026-11-30T09:00Z", "0.01") == 1
    assert [row[2] for row in await told(sessions, who)] == [25, 200]
    assert await spend(sessions, silent, "2026-11-30T09:00Z", "19.99") == 0


async def test_a_look_that_failed_is_made_again(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    who = await spender(sessions)
    await budget(sessions, who, "10")
    await used(sessions, who.tenant.id, "2026-11-30T09:00Z", "5", **who.whose)
    watch = Watch(sessions, ManualClock(MORNING))
    watch.note([event_of(who, MORNING)])

    async def away(*_: object) -> int:
        raise OSError("Postgres is away")

    with monkeypatch.context() as patch:
        patch.setattr(crossings, "look", away)
        with pytest.raises(OSError, match="away"):
            await watch.look()
    assert await watch.look() == 1


async def test_crossings_cannot_be_changed(sessions: Sessions, database_settings: Database) -> None:
    who = await spender(sessions)
    await budget(sessions, who, "10")
    await spend(sessions, who, "2026-11-30T09:00Z", "5")
    with (
        psycopg.connect(database_settings.url.get_secret_value()) as application,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        application.execute("DELETE FROM budget_crossing")


async def deliver(context: TaskContext) -> list[tuple[str, str, str]]:
    """Run the outbox until it is empty; return to whom which mails went, oldest first."""
    while rows := await outbox.claim(context):
        for row in rows:
            assert await outbox.execute(context, JOBS, row) is Outcome.DONE
    kept = mail.kept(context.settings.mail_dir, 100)
    return sorted((one.to, one.subject, one.text) for one in kept)


async def test_whom_it_concerns_is_told_by_mail(
    sessions: Sessions, database_settings: Database, tmp_path: Path
) -> None:
    who = await spender(sessions, "Asia/Shanghai")
    await budget(sessions, who, "10", mode=LimitMode.HARD)
    slot = LimitSlot(
        LimitLevel.PROJECT, LimitMetric.SPEND_PER_MONTH, mode=LimitMode.SOFT,
        tenant_id=who.tenant.id, project_id=who.project.id,
    )  # fmt: skip
    await limited(sessions, slot, parse_pico("20"))
    roles: Sequence[Role] = (Role.OWNER, Role.FINANCE, Role.DEVELOPER, Role.VIEWER)
    owner, finance, *_ = [(await member(sessions, who.tenant.id, role)).person.email for role in roles]
    inside = (await member(sessions, who.tenant.id, Role.ADMIN, project_id=who.project.id)).person.email
    gone = await member(sessions, who.tenant.id, Role.OWNER)
    async with transaction(sessions) as session:
        (found,) = [
            one
            for one, person in await members.list_members(session, who.tenant.id, projects_=None, after=None, limit=50)
            if person.id == gone.person.id
        ]
        rights = await members.rights_in(session, who.tenant.id, gone.person.id)
        await members.change(session, who.tenant.id, found.id, by=rights, now=MORNING, status=Status.SUSPENDED)
    context = context_of(sessions, database_settings, tmp_path, ManualClock(MORNING))
    assert await spend(sessions, who, "2026-11-30T09:00Z", "12.5") == 4
    mails = await deliver(context)
    assert {to for to, _, _ in mails} == {owner, finance, inside}
    by_person = {to: (subject, words) for to, subject, words in mails}
    assert len(mails) == 3
    subject, words = by_person[finance]
    assert subject == "100 % of a budget is used"
    assert (
        f'- 100 %: the organisation "{who.tenant.name}" used 12.50 USD of 10.00 USD, spend per day, '
        "2026-11-30 00:00 to 2026-12-01 00:00 Asia/Shanghai. Requests that do not fit into it are refused."
    ) in words
    assert "80 %" not in words
    subject, words = by_person[inside]
    assert subject == "50 % of a budget is used"
    assert '"main" used 12.50 USD of 20.00 USD, spend per month' in words
    assert await spend(sessions, who, "2026-11-30T10:00Z", "0.5") == 0
    assert len(await deliver(context)) == 3
