"""The catalog against real Postgres: what is created is served, changed, and hidden as it should be."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import text

from catalog import deployments, models, observed
from catalog.deployments import unseal_credential
from catalog.types import DeploymentChange, DeploymentKind, EngineKind, NewDeployment, NewVersion, ObservedReplica
from core import db
from core.errors import ErrorKind, PlatformError
from core.ids import new_uuid

NOW = datetime(2026, 11, 30, tzinfo=UTC)
KEY = bytes(range(32))
LOCAL = NewDeployment(
    name="smol",
    version_id=UUID(int=0),
    kind=DeploymentKind.LOCAL,
    engine=EngineKind.SIMULATOR,
    upstream_model="sim",
    endpoints=frozenset({"chat", "tokenize"}),
)
EXTERNAL = msgspec.structs.replace(
    LOCAL,
    name="far",
    kind=DeploymentKind.EXTERNAL,
    engine=EngineKind.OPENAI,
    base_url="https://models.example/openai/v1/",
    credential="sk-upstream",
)


async def add(sessions: db.Sessions, name: str, new: NewDeployment) -> tuple[UUID, UUID, UUID]:
    """Create a model with one version and one deployment; returns their ids."""
    async with db.transaction(sessions) as session:
        model_id = await models.create_model(session, name=name, now=NOW)
        version = NewVersion(context_max=2048, template_tokens=31, licence="Apache-2.0", sha256="ab" * 32)
        version_id = await models.add_version(session, model_id, version, now=NOW)
        new = msgspec.structs.replace(new, version_id=version_id)
        return model_id, version_id, await deployments.create(session, new, sealing_key=KEY, now=NOW)


async def revisions(sessions: db.Sessions) -> list[str]:
    async with db.transaction(sessions) as session:
        return list((await session.scalars(text("SELECT kind FROM config_change ORDER BY revision"))).all())


async def test_a_model_is_served_under_its_name_once_it_has_a_deployment(sessions: db.Sessions) -> None:
    async with db.transaction(sessions) as session:
        model_id = await models.create_model(session, name="org/tide-1b", now=NOW)
        version_id = await models.add_version(session, model_id, NewVersion(context_max=4096), now=NOW)
        assert await models.load_served(session) == {}
        new = msgspec.structs.replace(LOCAL, version_id=version_id, inflight_max=4)
        deployment_id = await deployments.create(session, new, sealing_key=KEY, now=NOW)
        served = (await models.load_served(session))["org/tide-1b"]
    assert (served.model_id, served.version_id, served.deployment_id) == (model_id, version_id, deployment_id)
    assert (served.kind, served.engine, served.upstream_model) == (DeploymentKind.LOCAL, EngineKind.SIMULATOR, "sim")
    assert (served.context_max, served.inflight_max, served.endpoints) == (4096, 4, frozenset({"chat", "tokenize"}))
    assert await revisions(sessions) == ["catalog", "catalog"]


async def test_an_alias_switches_versions_and_back(sessions: db.Sessions) -> None:
    model_id, first, first_deployment = await add(sessions, "tide", LOCAL)
    async with db.transaction(sessions) as session:
        second = await models.add_version(session, model_id, NewVersion(context_max=9000), now=NOW, make_current=False)
        later = NOW + timedelta(days=1)
        new = msgspec.structs.replace(LOCAL, name="smol-2", version_id=second)
        for name in ("smol-3", "smol-4"):  # younger deployments of the same version do not answer
            other = msgspec.structs.replace(new, name=name)
            await deployments.create(session, other, sealing_key=KEY, now=later)
        second_deployment = await deployments.create(session, new, sealing_key=KEY, now=NOW)
        await models.set_alias(session, "tide-latest", second, now=NOW)
        served = await models.load_served(session)
        assert {name: model.deployment_id for name, model in served.items()} == {
            "tide": first_deployment,
            "tide-latest": second_deployment,
        }
        await models.set_alias(session, "tide", second, now=NOW)
        assert (await models.load_served(session))["tide"].context_max == 9000
        await models.set_alias(session, "tide", first, now=NOW)
        assert (await models.load_served(session))["tide"].context_max == 2048
        assert [version.number for version in await models.list_versions(session, model_id)] == [1, 2]


async def test_a_credential_is_sealed_and_never_shown(sessions: db.Sessions) -> None:
    _, _, deployment_id = await add(sessions, "far", EXTERNAL)
    async with db.transaction(sessions) as session:
        served = (await models.load_served(session))["far"]
        shown = await deployments.get(session, deployment_id)
    assert served.base_url == "https://models.example/openai"
    assert b"sk-upstream" not in served.sealed_credential
    assert unseal_credential(KEY, deployment_id, served.sealed_credential) == "sk-upstream"
    assert shown.has_credential
    assert b"sk-upstream" not in msgspec.json.encode(shown)
    with pytest.raises(PlatformError):
        unseal_credential(KEY, UUID(int=5), served.sealed_credential)


async def test_a_change_of_scale_gets_a_new_epoch_and_other_changes_do_not(sessions: db.Sessions) -> None:
    _, _, deployment_id = await add(sessions, "tide", LOCAL)
    async with db.transaction(sessions) as session:
        change = DeploymentChange(max_wait_s=7)
        shown = await deployments.update(session, deployment_id, change, sealing_key=KEY, now=NOW)
        assert (shown.max_wait_s, shown.epoch, shown.temperature) == (7, 1, "cold")
        change = DeploymentChange(min_scale=1)
        shown = await deployments.update(session, deployment_id, change, sealing_key=KEY, now=NOW)
        assert (shown.min_scale, shown.epoch, shown.temperature) == (1, 2, "hot")


async def test_a_retired_deployment_is_gone_and_its_name_is_free(sessions: db.Sessions) -> None:
    _, version_id, deployment_id = await add(sessions, "tide", EXTERNAL)
    async with db.transaction(sessions) as session:
        await deployments.retire(session, deployment_id, now=NOW)
        assert await models.load_served(session) == {}
        assert await deployments.list_all(session) == []
        again = msgspec.structs.replace(EXTERNAL, version_id=version_id)
        await deployments.create(session, again, sealing_key=KEY, now=NOW)


async def test_names_are_taken_once(sessions: db.Sessions) -> None:
    _, version_id, _ = await add(sessions, "tide", LOCAL)
    async with db.transaction(sessions) as session:
        with pytest.raises(PlatformError) as model_taken:
            await models.create_model(session, name="tide", now=NOW)
        await models.create_model(session, name="ebb", now=NOW)
        with pytest.raises(PlatformError) as alias_taken:
            await models.set_alias(session, "ebb", version_id, now=NOW)
        new = msgspec.structs.replace(LOCAL, version_id=version_id)
        with pytest.raises(PlatformError) as deployment_taken:
            await deployments.create(session, new, sealing_key=KEY, now=NOW)
        assert [model.name for model in await models.list_models(session)] == ["ebb", "tide"]
    caught = (model_taken.value, alias_taken.value, deployment_taken.value)
    assert {problem.kind for problem in caught} == {ErrorKind.CONFLICT}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"name": "Smol"}, "name"),
        ({"name": "-smol"}, "name"),
        ({"name": ""}, "name"),
        ({"endpoints": frozenset({"chat", "images"})}, "endpoints"),
        ({"endpoints": frozenset()}, "endpoints"),
        ({"upstream_model": ""}, "upstream_model"),
        ({"base_url": "http://x"}, "base_url"),
        ({"engine": EngineKind.VLLM}, "engine"),
        ({"kind": DeploymentKind.KNATIVE}, "kind"),
        ({"kind": DeploymentKind.EXTERNAL}, "base_url"),
        ({"kind": DeploymentKind.EXTERNAL, "base_url": "ftp://x"}, "base_url"),
        ({"kind": DeploymentKind.EXTERNAL, "base_url": "http://[::1"}, "base_url"),
        ({"kind": DeploymentKind.EXTERNAL, "base_url": "http://x:99999"}, "base_url"),
        ({"kind": DeploymentKind.EXTERNAL, "base_url": "http://user:secret@x"}, "base_url"),
        ({"min_scale": 2}, "min_scale"),
        ({"max_scale": 17}, "max_scale"),
        ({"max_wait_s": 601}, "max_wait_s"),
        ({"default_max_tokens": 0}, "default_max_tokens"),
        ({"waiting_max": -1}, "inflight_max"),
    ],
)
def test_a_deployment_that_could_not_work_is_refused_naming_the_field(changes: dict[str, object], param: str) -> None:
    with pytest.raises(PlatformError) as caught:
        deployments.check_deployment(msgspec.structs.replace(LOCAL, **changes))
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, param)


async def test_an_older_leader_cannot_overwrite_or_remove_a_replica(sessions: db.Sessions) -> None:
    _, _, deployment_id = await add(sessions, "tide", LOCAL)
    seen = ObservedReplica(
        id=new_uuid(),
        deployment_id=deployment_id,
        index=0,
        state="ready",
        host="a",
        pid=4711,
        pid_started_ms=17,
        url="unix:/x",
        reason="",
        term=2,
        epoch=5,
        state_since=NOW,
    )
    async with db.transaction(sessions) as session:
        assert await observed.begin_term(session, "one") == 1
        assert await observed.begin_term(session, "two") == 2
        await observed.record_replica(session, seen)
        await observed.record_replica(session, msgspec.structs.replace(seen, term=1, epoch=9, state="absent"))
        await observed.record_replica(session, msgspec.structs.replace(seen, epoch=4, state="failed"))
        await observed.remove_replica(session, seen.id, term=1)
        assert await observed.list_replicas(session, deployment_id) == [seen]
        await observed.record_replica(session, msgspec.structs.replace(seen, epoch=6, state="idle"))
        assert [replica.state for replica in await observed.list_replicas(session)] == ["idle"]
        await observed.remove_replica(session, seen.id, term=2)
        assert await observed.list_replicas(session) == []
        assert await observed.current_term(session) == 2


async def test_only_the_last_loads_are_kept(sessions: db.Sessions) -> None:
    _, _, deployment_id = await add(sessions, "tide", LOCAL)
    async with db.transaction(sessions) as session:
        for load_ms in range(observed.LOADS_KEPT + 3):
            await observed.record_load(session, deployment_id, load_ms, now=NOW)
        assert (await observed.load_history(session))[deployment_id] == tuple(range(3, observed.LOADS_KEPT + 3))


async def test_a_fallback_is_another_model_that_is_named(sessions: db.Sessions) -> None:
    _, _, deployment_id = await add(sessions, "tide", LOCAL)
    _, other_version, _ = await add(sessions, "smaller", EXTERNAL)
    async with db.transaction(sessions) as session:
        for name, words in (("gone", "No model is served"), ("tide", "its own fallback")):
            change = DeploymentChange(fallback_model=name)
            with pytest.raises(PlatformError, match=words) as caught:
                await deployments.update(session, deployment_id, change, sealing_key=KEY, now=NOW)
            assert caught.value.param == "fallback_model"
        new = msgspec.structs.replace(LOCAL, name="new", version_id=other_version, fallback_model="gone")
        with pytest.raises(PlatformError, match="No model is served"):
            await deployments.create(session, new, sealing_key=KEY, now=NOW)
        for name in ("smaller", ""):
            change = DeploymentChange(fallback_model=name)
            await deployments.update(session, deployment_id, change, sealing_key=KEY, now=NOW)
            assert (await models.load_served(session))["tide"].fallback_model == name
