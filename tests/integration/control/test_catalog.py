"""Models, versions, names and deployments over the API."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import text

from api.services import Services
from catalog import models as catalog_models
from catalog import observed
from catalog.types import Wake, WakeCause, WakeOutcome
from cli.wakes import table
from core import db
from core.ids import IdKind, new_uuid, parse_id
from core.sealing import unseal
from knative import publisher
from knative.types import DeploymentState, ReplicaState
from tests.integration.control.conftest import Client

ADMIN = "/api/v1/admin"
CREDENTIAL = "sk-upstream-secret-1234567890"


async def _version(admin: Client, name: str = "smol") -> dict[str, Any]:
    model = await admin.post(f"{ADMIN}/models", {"name": name})
    assert model.status_code == 201, model.text
    answer = await admin.post(f"{ADMIN}/models/{model.json()['id']}/versions", {"context_max": 8192})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def _external(version_id: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": "ext",
        "version_id": version_id,
        "kind": "external",
        "engine": "openai",
        "upstream_model": "gpt",
        "base_url": "https://upstream.example/v1",
        "credential": CREDENTIAL,
        **fields,
    }


async def test_a_model_gets_a_version_a_deployment_and_is_served(admin: Client, sessions: db.Sessions) -> None:
    version = await _version(admin)
    assert (version["number"], version["context_max"]) == (1, 8192)
    answer = await admin.post(f"{ADMIN}/deployments", _external(version["id"], endpoints=["chat", "embeddings"]))
    assert answer.status_code == 201, answer.text
    async with db.transaction(sessions) as session:
        served = (await catalog_models.load_served(session))["smol"]
    assert served.version_id == parse_id(IdKind.MODEL_VERSION, version["id"])
    assert (served.base_url, served.upstream_model) == ("https://upstream.example", "gpt")
    assert served.endpoints == {"chat", "embeddings"}
    models = (await admin.get(f"{ADMIN}/models")).json()["items"]
    assert [model["name"] for model in models] == ["smol"]
    versions = (await admin.get(f"{ADMIN}/models/{version['model_id']}/versions")).json()["items"]
    assert versions == [version]
    assert (await admin.post(f"{ADMIN}/models/{version['model_id']}/retire")).status_code == 204
    async with db.transaction(sessions) as session:
        assert await catalog_models.load_served(session) == {}


async def test_a_credential_goes_in_and_never_comes_out(
    admin: Client, services: Services, sessions: db.Sessions
) -> None:
    version = await _version(admin)
    made = await admin.post(f"{ADMIN}/deployments", _external(version["id"]))
    path = f"{ADMIN}/deployments/{made.json()['id']}"
    changed = await admin.patch(path, {"credential": CREDENTIAL + "2", "max_wait_s": 5})
    read, listed = await admin.get(path), await admin.get(f"{ADMIN}/deployments")
    audit = await admin.get(f"{ADMIN}/audit")
    for answer in (made, changed, read, listed, audit):
        assert answer.status_code in {200, 201}, answer.text
        assert CREDENTIAL not in answer.text
    assert (read.json()["has_credential"], read.json()["max_wait_s"]) == (True, 5)
    async with db.transaction(sessions) as session:
        row = (await session.execute(text("SELECT id, sealed_credential FROM deployment"))).one()
    assert CREDENTIAL.encode() not in row.sealed_credential
    opened = unseal(services.sealing_key, row.sealed_credential, context=row.id.bytes)
    assert opened.decode() == CREDENTIAL + "2"
    await admin.patch(path, {"credential": ""})
    assert (await admin.get(path)).json()["has_credential"] is False


async def test_what_the_controller_saw_is_shown(admin: Client, services: Services) -> None:
    version = await _version(admin)
    made = (await admin.post(f"{ADMIN}/deployments", _external(version["id"]))).json()
    path = f"{ADMIN}/deployments/{made['id']}"
    assert (await admin.get(path)).json()["state"] == "unknown"
    hexadecimal = parse_id(IdKind.DEPLOYMENT, made["id"]).hex
    await publisher.publish(services.valkey, DeploymentState(hexadecimal, ReplicaState.LOADING, eta_s=7, epoch=1))
    shown = (await admin.get(path)).json()
    assert (shown["state"], shown["eta_s"]) == ("loading", 7)
    await services.valkey.close()
    assert (await admin.get(path)).json()["state"] == "unknown"


async def test_the_starts_of_its_engines_are_listed_newest_first_by_phase(admin: Client, sessions: db.Sessions) -> None:
    version = await _version(admin)
    times = {"keep_alive_s": 60, "load_timeout_s": 3600}
    made = (await admin.post(f"{ADMIN}/deployments", _external(version["id"], **times))).json()
    assert (made["keep_alive_s"], made["load_timeout_s"]) == (60, 3600)
    path = f"{ADMIN}/deployments/{made['id']}"
    assert (await admin.patch(path, {"keep_alive_s": 0})).json()["keep_alive_s"] == 0
    assert (await admin.patch(path, {"load_timeout_s": 604_801})).status_code == 422
    one = Wake(
        id=new_uuid(),
        deployment_id=parse_id(IdKind.DEPLOYMENT, made["id"]),
        index=1,
        cause=WakeCause.CALL,
        outcome=WakeOutcome.READY,
        woken_at=datetime(2026, 12, 1, tzinfo=UTC),
        decide_ms=3,
        fetch_ms=40,
        schedule_ms=2,
        load_ms=900,
        first_token_ms=None,
        held=7,
        attempts=1,
        reason="",
    )
    other = msgspec.structs.replace(one, id=new_uuid(), outcome=WakeOutcome.FAILED, load_ms=None, reason="no file")
    async with db.transaction(sessions) as session:
        for wake in (one, other, msgspec.structs.replace(one, first_token_ms=61)):
            await observed.record_wake(session, wake)
    failed, ready = (await admin.get(f"{path}/wakes")).json()["items"]
    assert (ready["replica"], ready["ready_ms"], ready["first_token_ms"], ready["held"]) == (1, 945, 61, 7)
    assert (failed["outcome"], failed["ready_ms"], failed["reason"]) == ("failed", None, "no file")
    page = (await admin.get(f"{path}/wakes?limit=1")).json()
    assert (len(page["items"]), page["next_after"]) == (1, failed["id"])
    assert (await admin.get(f"{ADMIN}/deployments/dep_{'0' * 32}/wakes")).status_code == 404
    head, *lines = table([other, one])
    assert head.split()[-3:] == ["token", "ready", "(ms)"]
    assert lines[0].split()[-3:] == ["-", "no", "file"]
    assert lines[1].split() == [
        "2026-12-01T00:00:00.000",
        "1",
        "call",
        "ready",
        "1",
        "7",
        "3",
        "40",
        "2",
        "900",
        "-",
        "945",
    ]


async def test_deployments_that_cannot_work_are_named(admin: Client) -> None:
    version = await _version(admin)
    for wrong, param in (
        ({"base_url": "ftp://x"}, "base_url"),
        ({"base_url": "https://user:pw@x"}, "base_url"),
        ({"name": "Not A Label"}, "name"),
        ({"endpoints": ["chat", "dance"]}, "endpoints"),
        ({"kind": "knative", "base_url": "", "credential": None}, "kind"),
        ({"min_scale": 3, "max_scale": 1}, "min_scale"),
        ({"gpu_memory_mb": 80_000}, "kv_request_mb"),
        ({"kv_request_mb": 1_200}, "gpu_memory_mb"),
        ({"gpu_memory_mb": 1_200, "kv_request_mb": 80_000}, "kv_request_mb"),
    ):
        answer = await admin.post(f"{ADMIN}/deployments", _external(version["id"], **wrong))
        assert (answer.status_code, answer.json().get("param")) == (400, param), wrong
    for unknown in ("mver_" + "0" * 32, "nonsense"):
        assert (await admin.post(f"{ADMIN}/deployments", _external(unknown))).status_code == 404
    secret_with_break = await admin.post(
        f"{ADMIN}/deployments", _external(version["id"], credential="sk-abcdef\r\nX-Evil: 1")
    )
    assert secret_with_break.status_code == 422
    assert "sk-abcdef" not in secret_with_break.text
    for _ in range(2):
        last = await admin.post(f"{ADMIN}/deployments", _external(version["id"]))
    assert (last.status_code, last.json()["code"]) == (409, "NAME_TAKEN")


async def test_memory_that_is_stated_gives_the_batch_bound(admin: Client) -> None:
    """80 GB x 0.8 over 1.2 GB x 2 is 26.67. Both are stated or none, also by a change."""
    version = await _version(admin)
    plain = (await admin.post(f"{ADMIN}/deployments", _external(version["id"], name="plain"))).json()
    assert (plain["gpu_memory_mb"], plain["kv_request_mb"], plain["batch_bound"]) == (0, 0, 0)
    stated = {"gpu_memory_mb": 80_000, "kv_request_mb": 1_200}
    made = (await admin.post(f"{ADMIN}/deployments", _external(version["id"], **stated))).json()
    assert made["batch_bound"] == 26
    path = f"{ADMIN}/deployments/{made['id']}"
    half = await admin.patch(path, {"gpu_memory_mb": 0})
    assert (half.status_code, half.json()["param"]) == (400, "gpu_memory_mb")
    assert (await admin.patch(path, {"kv_request_mb": -1})).status_code == 422
    assert (await admin.patch(path, {"kv_request_mb": 1_600})).json()["batch_bound"] == 20
    assert (await admin.patch(path, {"gpu_memory_mb": 0, "kv_request_mb": 0})).json()["batch_bound"] == 0
    assert (await admin.get(f"{ADMIN}/deployments/{plain['id']}")).json()["batch_bound"] == 0


async def test_names_lead_to_versions_and_back(admin: Client, sessions: db.Sessions) -> None:
    first = await _version(admin)
    await admin.post(f"{ADMIN}/deployments", _external(first["id"]))
    answer = await admin.post(f"{ADMIN}/aliases", {"name": "smol/latest", "version_id": first["id"]})
    assert answer.json() == {"name": "smol/latest", "version_id": first["id"]}
    async with db.transaction(sessions) as session:
        assert set(await catalog_models.load_served(session)) == {"smol", "smol/latest"}
    other = await _version(admin, "other")
    taken = await admin.post(f"{ADMIN}/aliases", {"name": "smol", "version_id": other["id"]})
    assert (taken.status_code, taken.json()["code"]) == (409, "NAME_TAKEN")
    for unknown in ("mver_" + "0" * 32, "x"):
        assert (await admin.post(f"{ADMIN}/aliases", {"name": "n", "version_id": unknown})).status_code == 404
    bad = await admin.post(f"{ADMIN}/aliases", {"name": "../x", "version_id": first["id"]})
    assert (bad.status_code, bad.json()["code"]) == (400, "INVALID_NAME")


async def test_a_retired_deployment_is_gone_and_its_name_free(admin: Client) -> None:
    version = await _version(admin)
    made = (await admin.post(f"{ADMIN}/deployments", _external(version["id"]))).json()
    assert (await admin.post(f"{ADMIN}/deployments/{made['id']}/retire")).status_code == 204
    assert (await admin.get(f"{ADMIN}/deployments")).json()["items"] == []
    assert (await admin.post(f"{ADMIN}/deployments", _external(version["id"]))).status_code == 201
