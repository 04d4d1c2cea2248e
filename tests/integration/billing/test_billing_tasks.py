"""What the worker does each minute, hour and day for the books, and what it shows of that."""

from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from sqlalchemy import text

from billing import credit_figures, tasks
from core.clock import Clock, ManualClock, SystemClock
from core.db import Sessions, transaction
from core.settings import Database, Retention, Secrets, Settings, Valkey
from core.tasks import TaskContext
from core.telemetry import TaskFigures, create_registry
from tests.factories.billing_world import World
from tests.factories.credit_figures import figure_of, set_figure
from tests.integration.billing.test_quarantine import dismiss, held
from tests.integration.billing.test_usage_days import LATER, books, closed
from tests.integration.billing.test_verify import owner_of


class Worker:
    """A task's context, and the figures it shows."""

    def __init__(self, sessions: Sessions, database: Database, valkey: Path, clock: Clock, usage_days: int = 0) -> None:
        self._registry = create_registry()
        settings = Settings(
            secrets=Secrets.model_validate(dict.fromkeys(("pepper", "signing", "sealing"), "00")),
            database=database,
            valkey=Valkey.model_validate({"url": f"unix://{valkey}", "broker_url": f"unix://{valkey}"}),
            retention=Retention(usage_days=usage_days),
        )
        self.context = TaskContext(settings, sessions, clock, TaskFigures(self._registry))

    def figure(self, name: str) -> int:
        lines = generate_latest(self._registry).decode().splitlines()
        (value,) = [line.split()[1] for line in lines if line.startswith(f"tidegate_{name} ")]
        return int(float(value))


async def test_differences_are_figures(world: World, database_settings: Database, valkey: Path) -> None:
    tenant_id, _ = await held(world)
    await credit_figures.refresh(world.client, world.sessions, tenant_id, correct=True)
    worker = Worker(world.sessions, database_settings, valkey, SystemClock())
    await tasks.reconcile_books(worker.context)
    assert (worker.figure("reconcile_books_wrong"), worker.figure("reconcile_figures_wrong")) == (0, 0)
    available = (await figure_of(world.client, tenant_id)).available
    await set_figure(world.client, tenant_id, available=available + 2)
    with owner_of(database_settings) as owner:
        owner.execute("UPDATE usage_rollup SET amount_pico = amount_pico + 1")
    await tasks.reconcile_books(worker.context)
    assert (worker.figure("reconcile_books_wrong"), worker.figure("reconcile_figures_wrong")) == (1, 1)


async def test_a_wrong_row_fails_the_verification_and_shows(
    world: World, database_settings: Database, valkey: Path
) -> None:
    await held(world)
    worker = Worker(world.sessions, database_settings, valkey, SystemClock())
    await tasks.verify_ledger(worker.context)
    assert worker.figure("ledger_wrong") == 0
    with owner_of(database_settings) as owner:
        owner.execute("UPDATE usage_rollup SET amount_pico = amount_pico + 1")
    with pytest.raises(tasks.LedgerWrongError, match="usage_rollup"):
        await tasks.verify_ledger(worker.context)
    assert worker.figure("ledger_wrong") == 1


async def test_count_and_age_of_what_waits_in_quarantine_are_figures(
    world: World, database_settings: Database, valkey: Path
) -> None:
    worker = Worker(world.sessions, database_settings, valkey, ManualClock(SystemClock().now() + timedelta(hours=2)))
    await tasks.watch_quarantine(worker.context)
    assert (worker.figure("quarantine_waiting"), worker.figure("quarantine_oldest_seconds")) == (0, 0)
    tenant_id, ids = await held(world, 2)
    await dismiss(world, tenant_id, ids[0])
    await tasks.watch_quarantine(worker.context)
    assert worker.figure("quarantine_waiting") == 1
    assert 7_000 <= worker.figure("quarantine_oldest_seconds") <= 7_200  # less what the test takes on a busy machine


async def test_the_policy_drops_days(sessions: Sessions, database_settings: Database, valkey: Path) -> None:
    await books(sessions)
    await closed(sessions)
    for keep, left in ((0, 5), (100, 5), (30, 1)):
        await tasks.drop_usage_days(Worker(sessions, database_settings, valkey, ManualClock(LATER), keep).context)
        async with transaction(sessions) as session:
            assert (await session.execute(text("SELECT count(*) FROM usage_event"))).scalar_one() == left, keep
