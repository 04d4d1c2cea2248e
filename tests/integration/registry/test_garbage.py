"""What nobody needs is taken out of the store; what a deployment, a name or an audit may need never is."""

from datetime import date, timedelta
from pathlib import Path
from uuid import UUID

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncSession

from billing.metrics import poster_metrics
from billing.posting import Posting
from billing.version_use import is_used
from catalog import deployments, models
from catalog.registry import garbage, intakes, versions, work
from catalog.types import DeploymentKind, EngineKind, NewDeployment
from core import db
from core.clock import SystemClock
from core.errors import PlatformError
from core.ids import new_uuid
from tests.factories import billing as make_events
from tests.factories import registry as make
from tests.factories.catalog import SEALING_KEY, know

LATER = timedelta(days=400)


@pytest.fixture
def desk(sessions: db.Sessions, tmp_path: Path) -> work.Desk:
    return make.desk_at(make.settings_at(tmp_path), sessions)


async def version(desk: work.Desk, name: str) -> UUID:
    content = make.gguf(filling=name.encode())
    return await make.uploaded(desk, await make.model(desk.sessions, name), {"m.gguf": content})


async def deployed(desk: work.Desk, version_id: UUID, name: str) -> UUID:
    new = NewDeployment(
        name=name,
        version_id=version_id,
        kind=DeploymentKind.LOCAL,
        engine=EngineKind.LLAMA_CPP,
        upstream_model="m",
        endpoints=frozenset({"chat"}),
    )
    async with db.transaction(desk.sessions) as session:
        return await deployments.create(session, new, sealing_key=SEALING_KEY, now=desk.clock.now())


async def retire(desk: work.Desk, deployment_id: UUID) -> None:
    async with db.transaction(desk.sessions) as session:
        await deployments.retire(session, deployment_id, now=desk.clock.now())


async def use(desk: work.Desk, version_id: UUID, *, quarantine: str = "") -> None:
    """Bill a request that this version served."""
    tenant_id = await make_events.tenant(desk.sessions, "5")
    await know(desk.sessions, make_events.MODEL)
    prices = await make_events.publish_prices(desk.sessions)
    event = make_events.event(tenant_id, make_events.schedule(prices, tenant_id), quarantine=quarantine)
    event = msgspec.structs.replace(event, version_id=version_id)
    posting = Posting(desk.sessions, SystemClock(), poster_metrics(CollectorRegistry()))
    (posted,) = await posting.post([event])
    assert posted.quarantined == bool(quarantine)


async def collected(desk: work.Desk, *, after: timedelta = LATER, weights_days: int = 0) -> list[UUID]:
    """Take out what may go, and check that the dry run said so, and that it touched nothing."""
    now = desk.clock.now() + after
    told = await garbage.plan(desk.sessions, desk.objects, is_used, now=now, weights_days=weights_days)
    again = await garbage.plan(desk.sessions, desk.objects, is_used, now=now, weights_days=weights_days)
    assert told == again
    done = await garbage.collect(desk.sessions, desk.objects, is_used, now=now, weights_days=weights_days)
    assert [found.id for found in done.remove] == [found.id for found in told.remove]
    return [found.id for found in done.remove]


async def test_what_is_needed_stays_and_the_rest_goes(desk: work.Desk, tmp_path: Path) -> None:
    names = ("nobody", "live", "named", "used", "stopped")
    made = {name: await version(desk, name) for name in names}
    await deployed(desk, made["live"], "live")
    async with db.transaction(desk.sessions) as session:
        await models.set_alias(session, "alias", made["named"], now=desk.clock.now())
    for name in ("used", "stopped"):
        await retire(desk, await deployed(desk, made[name], name))
    await use(desk, made["used"])
    assert set(await collected(desk)) == {made["nobody"], made["stopped"]}
    assert await collected(desk) == []
    models_folder = tmp_path / "objects/models"
    stored = {path.relative_to(models_folder).parts[0] for path in models_folder.rglob("m.gguf")}
    async with db.transaction(desk.sessions) as session:
        assert stored == {(await versions.get(session, made[name])).model_id.hex for name in ("live", "named", "used")}
        gone = await versions.get(session, made["nobody"])
    assert gone.removed_at is not None
    with pytest.raises(PlatformError, match="taken out of the store"):
        await deployed(desk, made["nobody"], "again")


async def test_usage_counts_for_the_retention_and_a_retired_models_names_do_not(desk: work.Desk) -> None:
    version_id = await version(desk, "tide")
    await retire(desk, await deployed(desk, version_id, "tide"))
    await use(desk, version_id)
    async with db.transaction(desk.sessions) as session:
        await models.set_alias(session, "tide", version_id, now=desk.clock.now())
    assert await collected(desk, weights_days=90) == []
    async with db.transaction(desk.sessions) as session:
        await models.retire_model(session, (await versions.get(session, version_id)).model_id, now=desk.clock.now())
    assert await collected(desk, after=timedelta(days=80), weights_days=90) == []
    assert await collected(desk) == []  # with no such rule as long as there are events
    assert await collected(desk, weights_days=90) == [version_id]


async def test_an_event_in_quarantine_may_name_any_version(desk: work.Desk) -> None:
    version_id = await version(desk, "tide")
    await retire(desk, await deployed(desk, version_id, "tide"))
    await use(desk, new_uuid(), quarantine="odd")
    assert await collected(desk) == []


async def test_the_young_and_the_running_stay(desk: work.Desk) -> None:
    version_id = await version(desk, "tide")
    assert await collected(desk, after=timedelta(days=6)) == []
    async with db.transaction(desk.sessions) as session:
        await intakes.create_check(session, version_id, by="", limits=desk.settings.registry, now=desk.clock.now())
    assert await collected(desk) == []


async def test_a_deployment_made_meanwhile_keeps_its_weights(desk: work.Desk) -> None:
    """Between the look and the deletion: what was shown is looked at again under a lock."""
    version_id, asked = await version(desk, "tide"), 0

    def racing(used: garbage.Used) -> garbage.Used:
        async def look(session: AsyncSession, wanted: UUID, first: date, last: date) -> bool:
            nonlocal asked
            asked += 1
            if asked == 1:
                await deployed(desk, version_id, "meanwhile")
            return await used(session, wanted, first, last)

        return look

    await retire(desk, await deployed(desk, version_id, "before"))
    now = desk.clock.now() + LATER
    done = await garbage.collect(desk.sessions, desk.objects, racing(is_used), now=now, weights_days=0)
    assert (asked, done.remove) == (1, [])


async def test_files_that_are_no_versions_go_after_a_day(desk: work.Desk, tmp_path: Path) -> None:
    await version(desk, "tide")
    open_id = await make.opened(desk, await make.model(desk.sessions, "ebb"), {"m.gguf": make.gguf()})
    await make.send(desk, open_id, {"m.gguf": make.gguf()})
    loose = tmp_path / "objects/models" / ("0" * 32) / "1" / ("a" * 64) / "m.gguf"
    loose.parent.mkdir(parents=True)
    loose.write_bytes(b"x" * 10)
    for after, left in ((timedelta(hours=23), True), (timedelta(hours=25), False)):
        await collected(desk, after=after)
        assert loose.exists() == left
    assert await make.finish(desk, open_id) == "done"


async def test_more_than_the_dry_run_showed_is_not_taken(desk: work.Desk) -> None:
    await version(desk, "tide")
    with pytest.raises(PlatformError, match="1 versions would go"):
        await garbage.collect(
            desk.sessions, desk.objects, is_used, now=desk.clock.now() + LATER, weights_days=0, versions_max=0
        )
