"""Operators see what is on disks and not in the books, on whatever host."""

from datetime import UTC, datetime
from pathlib import Path

from billing import spools
from core import db, keyspace
from core.resp import RespClient
from tenants.types import OperatorRole
from tests.factories import billing as make
from tests.factories.billing_world import write
from tests.factories.people import operator_person
from tests.factories.tenants import customer
from tests.integration.control.conftest import Client


async def test_finance_sees_unposted_usage_and_what_is_held_for_it(
    anonymous: Client, sessions: db.Sessions, valkey: Path, tmp_path: Path
) -> None:
    made = await customer(sessions)
    s = make.schedule(await make.publish_prices(sessions), made.tenant.id)
    await write(tmp_path / "gateway-1", [make.event(made.tenant.id, s) for _ in range(2)])
    await spools.report(sessions, tmp_path, datetime(2026, 11, 1, tzinfo=UTC))
    client = await RespClient.connect(f"unix://{valkey}")
    await client.call("HSET", keyspace.owed("gateway-1"), "aa", made.tenant.id.hex)
    await client.close()
    finance = anonymous.visited_by(await operator_person(sessions, OperatorRole.FINANCE))
    (found,) = (await finance.get("/api/v1/admin/spools")).json()["items"]
    assert (found["name"], found["replica"], found["live"]) == ("gateway-1", "gateway-1", False)
    assert (found["events"], found["tenants"], found["owed_requests"]) == (2, 1, 1)
    assert found["reported_at"] == "2026-11-01T00:00:00Z"
