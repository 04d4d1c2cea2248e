"""The model registry over the API."""

import base64
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from api.services import Services
from catalog.registry import work
from core import db
from core.ids import IdKind, parse_id
from core.settings import Settings
from tenants.types import OperatorRole, Role
from tests.factories import registry as make
from tests.factories.people import member, operator_person
from tests.factories.tenants import customer
from tests.integration.control.conftest import Client

ADMIN = "/api/v1/admin"
GGUF = make.gguf(filling=b"\\u0000" * 500)  # what no text may have, bytes may
SHA256 = hashlib.sha256(GGUF).hexdigest()


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"registry": settings.registry.model_copy(update={"part_bytes": make.PART})})


async def _model(admin: Client, name: str = "tide") -> str:
    made = await admin.post(f"{ADMIN}/models", {"name": name})
    assert made.status_code == 201, made.text
    return str(made.json()["id"])


async def _open(admin: Client, model_id: str, **members: Any) -> dict[str, Any]:
    files = [{"path": "m.gguf", "size_bytes": len(GGUF), "sha256": SHA256}]
    made = await admin.post(f"{ADMIN}/registry/uploads", {"model_id": model_id, "files": files, **members})
    assert made.status_code == 201, made.text
    found: dict[str, Any] = made.json()
    return found


async def _send(admin: Client, upload: dict[str, Any]) -> None:
    path, step = f"{ADMIN}/registry/intakes/{upload['id']}/files/0", upload["part_bytes"]
    for start in range(0, len(GGUF), step):
        part = GGUF[start : start + step]
        headers = {"x-part-sha256": hashlib.sha256(part).hexdigest()}
        sent = await admin.call("PUT", path, content=part, params={"offset": start}, headers=headers)
        assert sent.status_code == 200, sent.text


async def _work(services: Services, intake_id: str) -> None:
    desk = work.open_desk(services.settings, services.sessions, services.clock)
    await make.worked(desk, parse_id(IdKind.MODEL_INTAKE, intake_id))


async def _registered(admin: Client, services: Services) -> dict[str, Any]:
    upload = await _open(admin, await _model(admin), make_current=True)
    await _send(admin, upload)
    assert (await admin.post(f"{ADMIN}/registry/intakes/{upload['id']}/complete")).status_code == 202
    await _work(services, upload["id"])
    done = (await admin.get(f"{ADMIN}/registry/intakes/{upload['id']}")).json()
    assert (done["state"], done["done_bytes"]) == ("done", len(GGUF)), done
    found: dict[str, Any] = (await admin.get(f"{ADMIN}/model-versions/{done['version_id']}")).json()
    return found


async def test_an_upload_becomes_a_version_that_a_deployment_pins(admin: Client, services: Services) -> None:
    version = await _registered(admin, services)
    assert version["reference"] == f"tide@1:{SHA256}"
    assert (version["facts"]["quantisation"], version["context_max"], version["licence"]) == ("Q4_K_M", 512, "mit")
    assert version["provenance"]["kind"] == "upload"
    assert version["provenance"]["by"].startswith("opr_")
    new = {"name": "tide", "kind": "local", "engine": "llama.cpp", "upstream_model": "tide"}
    wrong = await admin.post(f"{ADMIN}/deployments", {**new, "version": f"tide@1:{'ab' * 32}"})
    assert (wrong.status_code, wrong.json()["code"]) == (409, "HASH_WRONG")
    both = {"version": version["reference"], "version_id": version["id"]}
    assert (await admin.post(f"{ADMIN}/deployments", {**new, **both})).status_code == 400
    made = await admin.post(f"{ADMIN}/deployments", {**new, "version": version["reference"]})
    assert (made.status_code, made.json()["version_id"], made.json()["sha256"]) == (201, version["id"], SHA256)
    found = await admin.get(f"{ADMIN}/model-versions", params={"reference": version["reference"]})
    assert [item["id"] for item in found.json()["items"]] == [version["id"]]


async def test_a_cut_upload_is_told_where_to_go_on(admin: Client, services: Services) -> None:
    upload = await _open(admin, await _model(admin))
    path = f"{ADMIN}/registry/intakes/{upload['id']}/files/0"
    first = await admin.call("PUT", path, content=GGUF[: make.PART], params={"offset": 0})
    assert first.json()["received_bytes"] == make.PART
    for offset, content in ((0, GGUF[: make.PART]), (2 * make.PART, b"x")):
        again = await admin.call("PUT", path, content=content, params={"offset": offset})
        assert (again.status_code, again.json()["code"]) == (409, "OFFSET_WRONG")
        assert again.json()["received_bytes"] == make.PART
    cut = await admin.call("PUT", path, content=GGUF[make.PART : make.PART + 100], params={"offset": make.PART})
    assert (cut.status_code, cut.json()["code"]) == (400, "PART_WRONG")
    read = await admin.get(f"{ADMIN}/registry/intakes/{upload['id']}")
    assert [file["received_bytes"] for file in read.json()["files"]] == [make.PART]
    incomplete = await admin.post(f"{ADMIN}/registry/intakes/{upload['id']}/complete")
    assert (incomplete.status_code, incomplete.json()["received_bytes"]) == (409, make.PART)
    cancelled = await admin.post(f"{ADMIN}/registry/intakes/{upload['id']}/cancel")
    assert cancelled.json()["state"] == "cancelled"
    late = await admin.call("PUT", path, content=b"x", params={"offset": make.PART})
    assert (late.status_code, late.json()["code"]) == (409, "NOT_RECEIVING")


async def test_a_part_that_is_too_large_or_altered_is_refused(admin: Client) -> None:
    upload = await _open(admin, await _model(admin))
    path = f"{ADMIN}/registry/intakes/{upload['id']}/files/0"
    large = await admin.call("PUT", path, content=bytes(8_388_609), params={"offset": 0})
    assert large.status_code == 413
    part = {"content": GGUF[: make.PART], "params": {"offset": 0}}
    altered = await admin.call("PUT", path, **part, headers={"x-part-sha256": "ab" * 32})
    assert (altered.status_code, altered.json()["code"]) == (400, "PART_WRONG")
    assert (await admin.call("PUT", f"{path[:-1]}7", **part)).status_code == 404


async def test_a_manifest_is_checked_by_anybody(admin: Client, services: Services) -> None:
    version = await _registered(admin, services)
    found = (await admin.get(f"{ADMIN}/model-versions/{version['id']}/manifest")).json()
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(found["public_key"]))
    signed = b"tidegate model manifest\n" + found["manifest"].encode()
    key.verify(base64.b64decode(found["signature"]), signed)
    assert found["authentic"]
    assert found["signed_by"] == hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16] == version["signed_by"]
    assert json.loads(found["manifest"])["files"] == [{"path": "m.gguf", "sha256": SHA256, "size": len(GGUF)}]


async def test_damaged_weights_are_found_and_not_deployed(admin: Client, services: Services) -> None:
    version = await _registered(admin, services)
    asked = await admin.post(f"{ADMIN}/model-versions/{version['id']}/verify")
    assert (asked.status_code, asked.json()["kind"]) == (202, "check")
    await _work(services, asked.json()["id"])
    assert (await admin.get(f"{ADMIN}/model-versions/{version['id']}")).json()["damage"] == ""
    (stored,) = services.settings.objects_dir.rglob("m.gguf")
    stored.write_bytes(GGUF[:-1] + b"!")
    asked = await admin.post(f"{ADMIN}/model-versions/{version['id']}/verify")
    await _work(services, asked.json()["id"])
    assert "another SHA-256" in (await admin.get(f"{ADMIN}/model-versions/{version['id']}")).json()["damage"]
    new = {"name": "tide", "kind": "local", "engine": "llama.cpp", "upstream_model": "tide"}
    refused = await admin.post(f"{ADMIN}/deployments", {**new, "version_id": version["id"]})
    assert (refused.status_code, refused.json()["code"]) == (409, "VERSION_DAMAGED")


async def test_a_deprecated_version_says_so_and_its_date_passes(admin: Client, services: Services) -> None:
    version = await _registered(admin, services)
    path = f"{ADMIN}/model-versions/{version['id']}/deprecate"
    later = await admin.post(path, {"at": "2999-01-01T00:00:00Z", "note": "use tide-2"})
    assert (later.json()["deprecated"], later.json()["deprecation_note"]) == (False, "use tide-2")
    past = await admin.post(path, {"at": "2020-01-01T00:00:00Z"})
    assert (past.json()["deprecated"], past.json()["deprecation_note"]) == (True, "")
    assert (await admin.post(path, {"at": None})).json()["deprecated_at"] is None


async def _lines(answer: Any) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        yield line


async def test_progress_is_followed_as_events(admin: Client, services: Services) -> None:
    upload = await _open(admin, await _model(admin))
    await _send(admin, upload)
    await admin.post(f"{ADMIN}/registry/intakes/{upload['id']}/complete")
    await _work(services, upload["id"])
    answer = await admin.get(f"{ADMIN}/registry/intakes/{upload['id']}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    (data,) = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert (json.loads(data)["state"], "event: done" in answer.text) == ("done", True)


async def test_a_source_on_disk_needs_its_hash_and_the_registry_names_its_own(admin: Client) -> None:
    model_id = await _model(admin)
    for source, param in (("file:/etc/passwd", "sha256"), ("registry:x/1/y/z", "source")):
        refused = await admin.post(f"{ADMIN}/models/{model_id}/versions", {"context_max": 10, "source": source})
        assert (refused.status_code, refused.json()["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"kind": "folder", "location": "/etc"}, "not one that imports may read"),
        ({"kind": "folder", "location": "etc"}, "no such folder"),
        ({"kind": "hub", "location": "a/b"}, "No hub is set"),
        ({"kind": "s3", "location": "http://169.254.169.254/latest"}, "s3://bucket/prefix"),
        ({"kind": "s3", "location": "s3://bucket"}, "s3://bucket/prefix"),
    ],
)
async def test_an_import_reads_only_what_the_settings_allow(admin: Client, body: dict[str, str], why: str) -> None:
    refused = await admin.post(f"{ADMIN}/registry/imports", {"model_id": await _model(admin), **body})
    assert (refused.status_code, why in refused.json()["detail"]) == (400, True), refused.text


async def test_tenants_see_nothing_of_the_registry(anonymous: Client, admin: Client, sessions: db.Sessions) -> None:
    upload = await _open(admin, await _model(admin))
    made = await customer(sessions)
    owner = anonymous.visited_by(await member(sessions, made.tenant.id, Role.OWNER))
    path = f"{ADMIN}/registry/intakes/{upload['id']}"
    for client in (owner, anonymous.acting_as(made.secret)):
        for method, route in (("GET", path), ("GET", f"{path}/events"), ("GET", f"{ADMIN}/model-versions")):
            assert (await client.call(method, route)).status_code == 403
        sent = await client.call("PUT", f"{path}/files/0", content=GGUF[: make.PART], params={"offset": 0})
        assert sent.status_code == 403
    support = anonymous.visited_by(await operator_person(sessions, OperatorRole.SUPPORT))
    assert (await support.get(path)).status_code == 200
    assert (await support.post(f"{path}/cancel")).status_code == 403


async def test_the_trail_has_the_upload_and_not_its_parts(admin: Client, services: Services) -> None:
    version = await _registered(admin, services)
    trail = (await admin.get(f"{ADMIN}/audit")).json()["items"]
    assert [item["action"] for item in trail] == ["model_intake.complete", "model_intake.open_upload", "model.create"]
    assert trail[1]["target_id"].startswith("itk_")
    assert trail[1]["details"]["sha256"] == version["sha256"]
