"""The audit trail is a chain: whoever alters it, be it the database's owner, is found out."""

import asyncio
import hashlib
import importlib.util
import io
import json
from pathlib import Path
from uuid import UUID

import msgspec
import psycopg
import pytest
from sqlalchemy import text

from core import db, logging
from core.clock import SystemClock
from core.settings import Database, Log, Settings
from core.tasks import TaskContext
from core.telemetry import TaskFigures, create_registry, render
from tenants import audit, audit_anchor, audit_chain, tasks
from tenants.audit_chain import Finding, Head
from tenants.types import SYSTEM, Actor, ActorKind, AuditFilter
from tests.conftest import PostgresService

ROOT = Path(__file__).resolve().parents[3]
ACTOR = Actor(ActorKind.OPERATOR, UUID(int=5), "req_1", "192.0.2.7")
ODD = {"name": 'tab\t "quote" \\ \x01 \x7f ü 🌊', "from": None, "to": [1, True, {"deep": "1.50"}]}


async def fill(sessions: db.Sessions, count: int = 3) -> None:
    """One transaction per record; every column of the second has a value."""
    for number in range(count):
        async with db.transaction(sessions) as session:
            if number == 1:
                audit.record(session, ACTOR, "key.revoke", tenant_id=UUID(int=6), target_id=UUID(int=7), details=ODD)
            else:
                audit.record(session, SYSTEM, f"act.{number}")


async def check(sessions: db.Sessions, *anchors: Head) -> tuple[Finding | None, Head]:
    async with db.transaction(sessions) as session:
        return await audit_chain.verify_whole(session, anchors)


def owner_of(settings: Database) -> psycopg.Connection:
    """A connection for which triggers do not fire."""
    assert settings.owner_url is not None
    owner = psycopg.connect(settings.owner_url.get_secret_value(), autocommit=True)
    owner.execute("SET session_replication_role = replica")
    return owner


async def test_each_hash_covers_the_record_before_it(sessions: db.Sessions) -> None:
    await fill(sessions)
    async with db.transaction(sessions) as session:
        newest = await audit.search(session, AuditFilter(), after=None, limit=9)
    assert [record.seq for record in newest] == [3, 2, 1]
    assert newest[-1].prev_hash == bytes(32)
    assert newest[0].prev_hash == newest[1].hash
    assert newest[1].details == ODD
    at = newest[1].recorded_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    first = newest[2].hash.hex()
    ids = [f"00000000-0000-0000-0000-00000000000{n}" for n in (5, 6, 7)]
    # written out by hand from the ADR, not by the code under test; jsonb orders members by length, then by bytes
    details = '{"to": [1, true, {"deep": "1.50"}], "from": null, "name": "tab\\t \\"quote\\" \\\\ \\u0001 \x7f ü 🌊"}'
    hashed = json.dumps(
        [
            2,
            first,
            str(newest[1].id),
            at,
            "operator",
            ids[0],
            "192.0.2.7",
            ids[1],
            "key.revoke",
            ids[2],
            "req_1",
            details,
        ],
        ensure_ascii=False,
    )
    assert newest[1].hash == hashlib.sha256(hashed.encode()).digest()
    assert await check(sessions) == (None, Head(3, newest[0].hash))


ALTERATIONS = (
    ("UPDATE audit_record SET id = gen_random_uuid() WHERE {second}", 2),
    ("UPDATE audit_record SET recorded_at = recorded_at + interval '1 microsecond' WHERE {second}", 2),
    ("UPDATE audit_record SET actor_kind = 'system' WHERE {second}", 2),
    ("UPDATE audit_record SET actor_id = NULL WHERE {second}", 2),
    ("UPDATE audit_record SET client_ip = '192.0.2.8' WHERE {second}", 2),
    ("UPDATE audit_record SET tenant_id = NULL WHERE {second}", 2),
    ("UPDATE audit_record SET action = 'key.revok' WHERE {second}", 2),
    ("UPDATE audit_record SET target_id = tenant_id WHERE {second}", 2),
    ("UPDATE audit_record SET request_id = 'req_2' WHERE {second}", 2),
    ("UPDATE audit_record SET details = details - 'from' WHERE {second}", 2),
    ("UPDATE audit_chain SET seq = 9 WHERE seq = 2", 2),
    ("UPDATE audit_chain SET record_id = gen_random_uuid() WHERE seq = 2", 2),
    ("UPDATE audit_chain SET prev_hash = hash WHERE seq = 2", 2),
    ("UPDATE audit_chain SET hash = sha256(hash) WHERE seq = 2", 2),
    ("DELETE FROM audit_record WHERE {second}", 2),
    ("DELETE FROM audit_record WHERE {first}", 1),
    ("DELETE FROM audit_record WHERE {third}", 3),
    ("DELETE FROM audit_chain WHERE seq = 2", 2),
    ("DELETE FROM audit_chain WHERE seq = 3", 0),
    ("INSERT INTO audit_record (id, actor_kind, action) VALUES (gen_random_uuid(), 'system', 'slipped.in')", 0),
)


async def test_every_altered_column_is_found(sessions: db.Sessions, database_settings: Database) -> None:
    await fill(sessions)
    where = {
        name: f"id = (SELECT record_id FROM kept_audit_chain WHERE seq = {seq})"
        for name, seq in (("first", 1), ("second", 2), ("third", 3))
    }
    with owner_of(database_settings) as owner:
        columns = {row[0] for row in owner.execute(
            "SELECT column_name FROM information_schema.columns WHERE table_name IN ('audit_record', 'audit_chain')"
        )}  # fmt: skip
        altered = {statement.split(" SET ")[1].split(" =")[0] for statement, _ in ALTERATIONS if " SET " in statement}
        assert altered == columns
        for table in ("audit_record", "audit_chain"):
            owner.execute(f"CREATE TABLE kept_{table} AS TABLE {table}")
        for statement, seq in ALTERATIONS:
            assert owner.execute(statement.format(**where)).rowcount == 1, statement
            finding, _ = await check(sessions)
            assert finding is not None, statement
            assert finding.seq == seq, (statement, finding)
            for table in ("audit_record", "audit_chain"):
                owner.execute(f"DELETE FROM {table}")
                owner.execute(f"INSERT INTO {table} TABLE kept_{table}")
        assert (await check(sessions))[0] is None


async def test_a_chain_made_anew_or_cut_short_is_found_by_its_anchor(
    sessions: db.Sessions, database_settings: Database
) -> None:
    await fill(sessions)
    _, anchored = await check(sessions)
    with owner_of(database_settings) as owner:
        owner.execute("DELETE FROM audit_record WHERE id = (SELECT record_id FROM audit_chain WHERE seq = 3)")
        owner.execute("DELETE FROM audit_chain WHERE seq = 3")
        assert (await check(sessions))[0] is None  # nothing inside the database tells
        assert await check(sessions, anchored) == (Finding(3, "", audit_chain.ANCHOR_LOST), Head())
        owner.execute("SET session_replication_role = DEFAULT")
        owner.execute(
            "INSERT INTO audit_record (id, actor_kind, action) VALUES (gen_random_uuid(), 'system', 'forged')"
        )
    assert (await check(sessions))[1].seq == 3
    assert (await check(sessions, anchored))[0] == Finding(3, "", audit_chain.ANCHOR_LOST)


async def test_the_application_cannot_write_the_chain(sessions: db.Sessions) -> None:
    await fill(sessions, 1)
    for statement in (
        "INSERT INTO audit_chain SELECT seq + 1, gen_random_uuid(), hash, sha256(hash) FROM audit_chain",
        "UPDATE audit_chain SET seq = 2",
        "DELETE FROM audit_chain",
        "SELECT chain_audit_record(r) FROM audit_record r",
        "ALTER TABLE audit_record DISABLE TRIGGER ALL",
    ):
        with pytest.raises(Exception, match=r"permission denied|must be owner"):
            async with db.transaction(sessions) as session:
                await session.execute(text(statement))


async def test_many_writers_make_one_chain_in_the_order_of_their_commits(sessions: db.Sessions) -> None:
    """Transactions that overlap, some rolled back: no gap, no fork, and nobody waits for another's open transaction."""
    async with db.transaction(sessions) as slow:
        audit.record(slow, SYSTEM, "slow")
        await slow.flush()  # its record is inserted first and commits last

        async def write(number: int) -> None:
            async with db.transaction(sessions) as session:
                audit.record(session, SYSTEM, f"act.{number}")
                await session.flush()
                if number % 5 == 0:
                    await session.rollback()

        await asyncio.gather(*(write(number) for number in range(40)))
    finding, head = await check(sessions)
    assert (finding, head.seq) == (None, 33)
    async with db.transaction(sessions) as session:
        [last] = await audit.search(session, AuditFilter(action="slow"), after=None, limit=9)
    assert last.seq == 33


@pytest.fixture
def context(sessions: db.Sessions, database_settings: Database, tmp_path: Path) -> TaskContext:
    settings = Settings.model_validate(
        {
            "home": tmp_path,
            "secrets": dict.fromkeys(("pepper", "signing", "sealing"), "00" * 32),
            "database": database_settings,
            "valkey": {"url": "unix:///nowhere", "broker_url": "unix:///nowhere"},
        }
    )
    return TaskContext(settings, sessions, SystemClock(), TaskFigures(create_registry()))


def figures_of(context: TaskContext) -> dict[str, float]:
    lines = render(context.figures._registry).decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("tidegate_audit")}


async def test_the_worker_anchors_the_newest_hash_outside_the_database(
    sessions: db.Sessions, context: TaskContext
) -> None:
    await fill(sessions, 2)
    stream = io.StringIO()
    logging.configure(Log(), "test", stream=stream)
    await tasks.verify_audit(context)
    await fill(sessions, 2)
    await tasks.verify_audit(context)
    _, head = await check(sessions)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["seq"] for line in lines if line["event"] == "audit.head_anchored"] == [2, 4]
    assert lines[-1]["hash"] == head.hash.hex()
    assert audit_anchor.load(context.settings.home).head == head
    assert figures_of(context) == {"tidegate_audit_wrong": 0, "tidegate_audit_verified_seq": 4}


async def test_the_worker_finds_old_and_new_alterations(
    sessions: db.Sessions, context: TaskContext, database_settings: Database
) -> None:
    await fill(sessions)
    await tasks.verify_audit(context)
    for statement in (
        "UPDATE audit_record SET client_ip = '::1' WHERE id = (SELECT record_id FROM audit_chain WHERE seq = 1)",
        "DELETE FROM audit_chain WHERE seq = 3",
    ):
        with owner_of(database_settings) as owner:
            owner.execute("CREATE TABLE kept_record AS TABLE audit_record")
            owner.execute("CREATE TABLE kept_chain AS TABLE audit_chain")
            owner.execute(statement)
            with pytest.raises(tasks.AuditWrongError):
                await tasks.verify_audit(context)
            assert figures_of(context)["tidegate_audit_wrong"] == 1
            owner.execute("DELETE FROM audit_record; DELETE FROM audit_chain")
            owner.execute("INSERT INTO audit_record TABLE kept_record; INSERT INTO audit_chain TABLE kept_chain")
            owner.execute("DROP TABLE kept_record, kept_chain")
        await tasks.verify_audit(context)
        assert figures_of(context)["tidegate_audit_wrong"] == 0


async def test_older_records_are_looked_at_in_turns(
    sessions: db.Sessions, context: TaskContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run looks at a bounded part of what is old, the next run goes on there, and at the end it begins anew."""
    monkeypatch.setattr(tasks, "AGAIN_MAX", 2)
    await fill(sessions, 5)
    again = []
    for _ in range(4):
        await tasks.verify_audit(context)
        again.append(audit_anchor.load(context.settings.home).again)
    assert again == [2, 4, 5, 2]


def test_a_damaged_anchor_is_not_taken_for_none(tmp_path: Path) -> None:
    audit_anchor.save(tmp_path, audit_anchor.Anchor(3, "ab" * 32, 1))
    assert audit_anchor.load(tmp_path).head == Head(3, b"\xab" * 32)
    audit_anchor.save(tmp_path, audit_anchor.Anchor(2, "cd" * 32, 1))
    with pytest.raises(ValueError, match="another record 3"):
        audit_anchor.save(tmp_path, audit_anchor.Anchor(3, "cd" * 32, 1))
    assert audit_anchor.load(tmp_path) == audit_anchor.Anchor(3, "ab" * 32, 1)  # neither back nor to another chain
    audit_anchor.path_of(tmp_path).write_text("{}x")
    with pytest.raises(msgspec.DecodeError):
        audit_anchor.load(tmp_path)


async def test_records_of_before_are_chained_by_the_migration(postgres: PostgresService, database: str) -> None:
    """The migration's own statements, on a trail that has records and no chain."""
    [path] = (ROOT / "migrations/versions").glob("*_chain_audit.py")
    spec = importlib.util.spec_from_file_location("chain_audit", path)
    assert spec is not None
    assert spec.loader is not None
    migration = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(migration)
    url = postgres.url("owner", database)
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute("DROP TRIGGER audit_record_chained ON audit_record")
        owner.execute("DROP TABLE audit_chain")
        owner.execute("DROP FUNCTION chain_new_audit_record, chain_audit_record, audit_text")
        owner.execute("ALTER TABLE audit_record DROP client_ip")
        owner.execute("DROP INDEX audit_record_by_actor, audit_record_by_target, audit_record_by_time")
        for number in (2, 1, 3):  # inserted out of order
            owner.execute(
                "INSERT INTO audit_record (id, recorded_at, actor_kind, action)"
                " VALUES (gen_random_uuid(), timestamptz '2026-01-01 00:00Z' + %s * interval '1 day', 'system', %s)",
                (number, f"act.{number}"),
            )
        for statement in migration.STATEMENTS:
            owner.execute(statement)
        rows = owner.execute(
            "SELECT c.seq, r.action FROM audit_chain c JOIN audit_record r ON r.id = c.record_id ORDER BY c.seq"
        ).fetchall()
    assert rows == [(1, "act.1"), (2, "act.2"), (3, "act.3")]
    engine = db.create_engine(Database.model_validate({"url": url}))
    assert (await check(db.create_sessions(engine)))[0] is None
    await engine.dispose()
