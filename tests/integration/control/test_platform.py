"""Health, description, faults and the process itself."""

import asyncio
import os
import signal
import stat
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from api import app as control
from api.app import create_app
from api.openapi import describe
from api.services import Services
from core import db
from core.resp import RespClient
from core.settings import Database, Settings
from tenants import api_keys, operators
from tenants.types import KeyLimits, Scope
from tests.factories.tenants import customer
from tests.integration.control.conftest import Client

TENANTS = "/api/v1/admin/tenants"


async def test_health_asks_both_dependencies(anonymous: Client) -> None:
    answer = await anonymous.get("/api/health")
    assert (answer.status_code, answer.json()) == (
        200,
        {"status": "ok", "dependencies": {"postgres": "ok", "valkey": "ok"}},
    )


@pytest.fixture
def nowhere(settings: Settings) -> Database:
    return Database.model_validate({"url": "postgresql://tidegate_app:secretword@127.0.0.1:1/none"})


async def _without_postgres(services: Services, nowhere: Database) -> httpx.AsyncClient:
    sessions = db.create_sessions(db.create_engine(nowhere))
    app = create_app(Services(**{**_fields(services), "sessions": sessions}))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://c")


def _fields(services: Services) -> dict[str, Any]:
    return {name: getattr(services, name) for name in Services.__dataclass_fields__}


async def test_without_postgres_credentials_are_503_and_never_401(services: Services, nowhere: Database) -> None:
    async with await _without_postgres(services, nowhere) as http:
        for credential in (operators.mint(), api_keys.mint()):
            answer = await http.get(TENANTS, headers={"authorization": f"Bearer {credential}"})
            assert (answer.status_code, answer.json()["code"]) == (503, "SERVICE_UNAVAILABLE")
            assert int(answer.headers["retry-after"]) >= 1
            assert "secretword" not in answer.text
        health = await http.get("/api/health")
        assert health.status_code == 503
        assert health.json()["dependencies"] == {"postgres": "OperationalError", "valkey": "ok"}
        assert (await http.get("/api/health/live")).status_code == 200


async def test_connections_that_postgres_ended_are_replaced(admin: Client, database_settings: Database) -> None:
    assert (await admin.get(TENANTS)).status_code == 200
    assert database_settings.owner_url is not None
    owner = db.create_engine(Database(url=database_settings.owner_url))
    async with db.transaction(db.create_sessions(owner)) as session:
        ended = await session.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND usename = 'tidegate_app'"
            )
        )
        assert len(ended.all()) >= 1
    await owner.dispose()
    assert (await admin.get(TENANTS)).status_code == 200


async def test_without_valkey_health_says_so(services: Services, tmp_path: Path) -> None:
    client = await RespClient.connect(f"unix://{tmp_path}/none.sock", required=False)
    app = create_app(Services(**{**_fields(services), "valkey": client}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://c") as http:
        answer = await http.get("/api/health")
    await client.close()
    assert answer.status_code == 503
    assert answer.json()["dependencies"] == {"postgres": "ok", "valkey": "RespUnavailable"}


async def test_a_failed_commit_is_never_a_201(
    admin: Client, database_settings: Database, sessions: db.Sessions
) -> None:
    assert database_settings.owner_url is not None
    owner = db.create_engine(Database(url=database_settings.owner_url))
    async with db.transaction(db.create_sessions(owner)) as session:
        await session.execute(
            text(
                "CREATE FUNCTION fail_late() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN RAISE EXCEPTION 'late' USING ERRCODE = '57P01'; END $$"
            )
        )
        await session.execute(
            text(
                "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON tenant DEFERRABLE INITIALLY DEFERRED "
                "FOR EACH ROW EXECUTE FUNCTION fail_late()"
            )
        )
    await owner.dispose()
    answer = await admin.post(TENANTS, {"name": "Acme", "currency": "USD"})
    assert (answer.status_code, answer.json()["code"]) == (503, "SERVICE_UNAVAILABLE")
    assert (await admin.get(TENANTS)).json()["items"] == []


async def test_what_nobody_foresaw_is_a_500_without_details(admin: Client, database_settings: Database) -> None:
    assert database_settings.owner_url is not None
    owner = db.create_engine(Database(url=database_settings.owner_url))
    async with db.transaction(db.create_sessions(owner)) as session:
        await session.execute(text("ALTER TABLE tenant RENAME COLUMN tz TO elsewhere"))
    await owner.dispose()
    answer = await admin.get(TENANTS)
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (500, "INTERNAL_ERROR")
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert "tenant" not in problem["detail"]


async def test_reads_cannot_write(services: Services, sessions: db.Sessions) -> None:
    async with db.transaction(sessions) as session:
        await session.connection(execution_options={"postgresql_readonly": True})
        with pytest.raises(Exception, match="read-only transaction"):
            await session.execute(text("INSERT INTO outbox (task, arguments) VALUES ('x', '{}')"))
        await session.rollback()


async def test_unknown_paths_and_methods_are_problems(anonymous: Client) -> None:
    missing = await anonymous.get("/api/v1/nothing")
    assert (missing.status_code, missing.json()["code"]) == (404, "NOT_FOUND")
    wrong = await anonymous.call("DELETE", TENANTS)
    assert (wrong.status_code, wrong.json()["code"]) == (405, "METHOD_NOT_ALLOWED")
    assert wrong.headers["content-type"] == "application/problem+json"


async def test_the_request_id_of_the_front_is_kept_when_it_is_one(anonymous: Client) -> None:
    given = await anonymous.get("/api/health", headers={"x-request-id": "gen_0123456789"})
    assert given.headers["x-request-id"] == "gen_0123456789"
    for text_ in ("x", "a b c d e f g h", "x" * 65, "<script>alert(1)</script>"):
        made = await anonymous.get("/api/health", headers={"x-request-id": text_})
        assert made.headers["x-request-id"].startswith("req_")


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield f"{method.upper()} {path}", operation


async def test_generators_of_clients_find_plain_names_and_the_csrf_token(anonymous: Client) -> None:
    document = (await anonymous.get("/api/openapi.json")).json()
    assert [name for name in document["components"]["schemas"] if "__" in name] == []  # two classes of one name
    choices = document["paths"]["/api/v1/tenants/{tenant_id}/projects"]
    assert {"session": [], "csrfToken": []} in choices["post"]["security"]
    assert {"session": []} in choices["get"]["security"]


async def test_a_path_that_leads_nowhere_says_where_to_look(anonymous: Client) -> None:
    answer = await anonymous.get("/api/v1/nowhere")
    assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND")
    assert "/api/openapi.json" in answer.json()["detail"]


async def test_the_description_is_complete(anonymous: Client) -> None:
    document = (await anonymous.get("/api/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    seen = set()
    for name, operation in _operations(document):
        assert operation["summary"], name
        assert operation["tags"], name
        assert operation["operationId"] not in seen, name
        seen.add(operation["operationId"])
        assert "security" in operation, name
        responses = operation["responses"]
        assert any(status[0] in "23" for status in responses), name
        if operation["security"]:
            named = {scheme for choice in operation["security"] for scheme in choice}
            assert named <= set(document["components"]["securitySchemes"])
            assert {"401", "403", "503"} <= set(responses), name
        if "{" in name:
            assert "404" in responses, name
        if "requestBody" in operation:
            assert {"413", "422"} <= set(responses), name
        for status, response in responses.items():
            assert response["description"], (name, status)
            if status.startswith("4"):
                assert "application/problem+json" in response["content"], (name, status)


async def test_the_description_refers_to_nothing_missing(services: Services) -> None:
    document = describe(create_app(services))
    schemas = set(document["components"]["schemas"])
    references: set[str] = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                references.add(node["$ref"].rpartition("/")[2])
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(document)
    assert references <= schemas
    assert "HTTPValidationError" not in references


async def test_figures_are_for_operators_and_name_route_templates(admin: Client, services: Services) -> None:
    await admin.get(f"{TENANTS}/ten_{'0' * 32}")
    figures = await admin.get("/api/metrics")
    assert 'route="/api/v1/admin/tenants/{tenant_id}",status="404"' in figures.text
    assert "0" * 32 not in figures.text
    assert (await admin.get("/api/metrics/poster")).status_code == 404
    folder = services.settings.home / "metrics"
    folder.mkdir()
    (folder / "poster.prom").write_text("tidegate_x 1\n")
    assert (await admin.get("/api/metrics/poster")).text == "tidegate_x 1\n"
    old = services.clock.now_us() / 1_000_000 - 61
    os.utime(folder / "poster.prom", (old, old))
    assert (await admin.get("/api/metrics/poster")).status_code == 404
    assert (await admin.get("/api/metrics/..%2fposter")).status_code == 404


def _serve(settings: Settings, pipe: Any) -> None:
    control.run(settings, lambda: pipe.send("ready"))
    pipe.send("ended")


async def test_the_process_serves_a_private_socket_and_ends_cleanly(
    settings: Settings, sessions: db.Sessions, service_folder: Path
) -> None:
    made = await customer(
        sessions, KeyLimits(scopes=frozenset(Scope) - {Scope.MANAGE}, allowed_networks=("10.0.0.0/8",))
    )
    path = service_folder / "control.sock"
    path.write_text("stale")
    changed = settings.model_copy(update={"control": settings.control.model_copy(update={"socket": path})})
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve, args=(changed, theirs))
    process.start()
    try:
        assert await asyncio.to_thread(ours.poll, 30)
        assert ours.recv() == "ready"
        mode = path.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://c") as http:
            assert (await http.get("/api/health")).json()["status"] == "ok"
            key = {"authorization": f"Bearer {made.secret}"}
            seen = [
                (await http.get("/api/v1/balance", headers={**key, "x-forwarded-for": address})).json()["code"]
                for address in ("11.0.0.1", "10.1.2.3")  # what the gateway says of its callers
            ]
            assert seen == ["NETWORK_NOT_ALLOWED", "NOT_FOUND"]  # the second may call, and has no account here
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        await asyncio.to_thread(process.join, 20)
    assert process.exitcode == 0
    assert ours.poll(1)
    assert ours.recv() == "ended"
    assert not path.exists()
