"""The ground the integration tests stand on."""

from pathlib import Path
from uuid import UUID

import redis
from sqlalchemy import text

from core import db


async def test_config_changes_are_numbered_in_commit_order(sessions: db.Sessions) -> None:
    entity = UUID(int=7)
    async with db.transaction(sessions) as session:
        await db.record_config_change(session, "api_key", entity)
    async with db.transaction(sessions) as session:
        await db.record_config_change(session, "catalog", None)
    async with db.transaction(sessions) as session:
        rows = (await session.execute(text("SELECT revision, kind, entity_id FROM config_change ORDER BY 1"))).all()
    assert [tuple(row) for row in rows] == [(1, "api_key", entity), (2, "catalog", None)]


def test_valkey_is_version_nine_and_empty(valkey: Path) -> None:
    with redis.Redis(unix_socket_path=str(valkey), decode_responses=True) as client:
        assert client.info("server")["valkey_version"].startswith("9.")
        assert client.dbsize() == 0
