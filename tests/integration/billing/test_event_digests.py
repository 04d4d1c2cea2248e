"""A usage event is what was posted, in every column, and its transaction's events are those that it posted."""

import hashlib
import struct
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pytest

from billing import verify
from billing.types import Outcome
from core.db import transaction
from core.settings import Database
from core.waits import Wait
from tests.factories import billing as make
from tests.factories.billing_world import World, write
from tests.integration.billing.test_verify import owner_of

# As `billing/posting_queries.py` has them; what is asserted here holds for as long as there are books.
COLUMNS = (
    *("id", "tenant_id", "day", "tx_id", "project_id", "key_id", "model_id", "version_id", "deployment_id"),
    *("price_version_id", "model", "endpoint", "tier", "currency", "outcome", "count_source", "stream", "http_status"),
    *("input_uncached", "input_cached", "input_cache_write", "output", "reasoning", "amount_pico", "min_charge_pico"),
    *("admitted_at", "ended_at", "queue_us", "ttft_us", "upstream_id", "posted_at"),
)
LATER = ("preemptions", "waste_tokens", "waste_us")  # of those that were preempted
LAST = ("wait",)  # of those that waited
SMALL = {"tier", "http_status", "preemptions"}
WAIT = Wait(4, 64, 2_000_000, 7, 0, 1, 3)
ONE_OF_THEM = "id = (SELECT id FROM usage_event WHERE outcome = 'timeout' ORDER BY id LIMIT 1)"
OIDS = {UUID: 2950, date: 1082, str: 25, bool: 16, datetime: 1184}


def binary(column: str, value: Any) -> tuple[int, bytes]:
    """The type's number in Postgres' catalog, and the value in its wire format."""
    if isinstance(value, bool):
        return OIDS[bool], bytes([value])
    if isinstance(value, int):
        return (21, struct.pack("!h", value)) if column in SMALL else (20, struct.pack("!q", value))
    if isinstance(value, list):  # of bigint, in one dimension from 1, without nulls
        head = struct.pack("!iiiii", 1, 0, 20, len(value), 1)
        return 1016, head + b"".join(struct.pack("!iq", 8, one) for one in value)
    if isinstance(value, datetime):
        us = (value - datetime(2000, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        return OIDS[datetime], struct.pack("!q", us)
    if isinstance(value, date):
        return OIDS[date], struct.pack("!i", (value - date(2000, 1, 1)).days)
    return OIDS[type(value)], value.bytes if isinstance(value, UUID) else value.encode()


def record(event: dict[str, Any], columns: tuple[str, ...]) -> bytes:
    parts = [struct.pack("!i", len(columns))]
    for column in columns:
        oid, data = binary(column, event[column])
        parts.append(struct.pack("!ii", oid, len(data)) + data)
    return b"".join(parts)


def digest(event: dict[str, Any]) -> bytes:
    later = b"" if event["preemptions"] is None else record(event, LATER)
    last = b"" if event["wait"] is None else record(event, LAST)
    return hashlib.sha256(record(event, COLUMNS) + later + last).digest()[:16]


async def find(world: World) -> verify.Finding | None:
    async with transaction(world.sessions) as session:
        return await verify.verify(session)


@pytest.fixture
async def batch(world: World) -> UUID:
    """One batch of a tenant: three that are charged, two that are not."""
    tenant, s = await world.tenant("1")
    charged = [make.event(tenant, s, upstream_id=f"up \N{SNOWMAN} {n}") for n in range(3)]
    free = [make.event(tenant, s, outcome=Outcome.TIMEOUT) for _ in range(2)]
    free[0] = msgspec.structs.replace(free[0], preemptions=1, waste_tokens=7, waste_us=9, wait=WAIT)
    charged[1] = msgspec.structs.replace(charged[1], wait=WAIT)
    await write(world.spool_dir / "r", [*charged, *free])
    await world.poster.step()
    assert await find(world) is None
    return tenant


@pytest.mark.usefixtures("batch")
async def test_a_digest_is_over_every_column_and_the_transactions_over_its_events(
    world: World, database_settings: Database
) -> None:
    with owner_of(database_settings) as owner:
        owner.row_factory = psycopg.rows.dict_row  # type: ignore[assignment]
        events: list[Any] = owner.execute("SELECT * FROM usage_event ORDER BY id").fetchall()
        (tx,) = owner.execute("SELECT usage_sha256 AS sha256 FROM ledger_tx WHERE kind = 'usage'").fetchall()
    assert {*COLUMNS, *LATER, *LAST, "digest"} == set(events[0])
    assert [event["preemptions"] for event in events].count(1) == 1
    assert [digest(event) for event in events] == [event["digest"] for event in events]
    assert tx["sha256"] == hashlib.sha256(b"".join(event["digest"] for event in events)).digest()  # type: ignore[call-overload]


@pytest.mark.usefixtures("batch")
async def test_an_event_changed_together_with_its_digest_is_found_by_its_transaction(
    world: World, database_settings: Database
) -> None:
    with owner_of(database_settings) as owner:
        owner.row_factory = psycopg.rows.dict_row  # type: ignore[assignment]
        event: Any = owner.execute("SELECT * FROM usage_event ORDER BY id LIMIT 1").fetchone()
        event["http_status"] = 201
        values = [digest(event), event["id"]]
        owner.execute("UPDATE usage_event SET http_status = 201, digest = %s WHERE id = %s", values)
    found = await find(world)
    assert found is not None
    assert (found.table, found.row) == ("usage_event", str(event["tx_id"]))
    assert found.problem == f"the usage events it has on {event['day']} are not those it posted"


@pytest.mark.parametrize("which", [ONE_OF_THEM, "true"])
async def test_events_that_cost_nothing_do_not_go_unseen_with_what_was_rolled_up_of_them(
    world: World, database_settings: Database, batch: UUID, which: str
) -> None:
    """One of a transaction's events, or all of a transaction that moved nothing: no sum of money tells."""
    free = [make.event(batch, make.schedule(world.prices, batch), outcome=Outcome.TIMEOUT)]
    if which == "true":
        await write(world.spool_dir / "r2", free)
        await world.poster.step()
        which = f"id = '{free[0].id}'"
    with owner_of(database_settings) as owner:
        deleted = f"DELETE FROM usage_event WHERE {which} RETURNING admitted_at"
        assert len(owner.execute(deleted).fetchall()) == 1
        owner.execute("DELETE FROM usage_rollup")
        sums = "input_uncached, input_cached, input_cache_write, output, reasoning, amount_pico, min_charge_pico"
        key = "project_id, key_id, model_id, model, endpoint, tier, outcome, price_version_id, currency"
        owner.execute(
            f"INSERT INTO usage_rollup (tenant_id, minute, {key}, requests, {sums})"
            f" SELECT tenant_id, date_trunc('minute', admitted_at, 'UTC'), {key}, count(*),"
            f" {', '.join(f'sum({one})' for one in sums.split(', '))} FROM usage_event GROUP BY 1, 2, {key}"
        )
    found = await find(world)
    assert found is not None
    assert found.table.startswith("usage_event")
