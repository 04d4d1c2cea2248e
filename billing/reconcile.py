"""`tidegate ledger reconcile`: events = rollups = ledger, to the pico; figures in Valkey against the ledger.

A figure of the ledger's present version may be off by `TOLERANCE_NANO`: it is the balance rounded down to nano. One of
an older version is on its way and is not judged.
"""

from uuid import UUID

import msgspec

from billing import closing_queries, credit_figures, queries, verify_queries
from core import keyspace
from core.credit_figure import read_figure
from core.db import Sessions, transaction
from core.money import format_pico, nano_down
from core.resp import RespClient

TOLERANCE_NANO = 1


class Difference(msgspec.Struct, frozen=True):
    """Figures of a tenant that must be the same and are not."""

    tenant_id: UUID
    problem: str


async def books(sessions: Sessions) -> tuple[int, list[Difference]]:
    """Compare events, rollups and ledger of every tenant, in one snapshot; returns how many tenants there are.

    Events = rollups, and with what re-ratings changed = ledger.
    """
    async with transaction(sessions) as session:
        await verify_queries.freeze(session)
        await verify_queries.read_all(session)
        rows = await closing_queries.sums(session)
    found = [
        Difference(
            row.tenant_id,
            f"events {format_pico(int(row.events))}, rollups {format_pico(int(row.rollups))}, "
            f"re-ratings {format_pico(int(row.reratings))}, ledger {format_pico(int(row.ledger))}",
        )
        for row in rows
        if not (row.events == row.rollups and row.rollups + row.reratings == row.ledger)
    ]
    return len(rows), found


async def figures(sessions: Sessions, client: RespClient) -> tuple[int, list[Difference]]:
    """Compare the figures that admission decides by with the ledger; returns how many there are."""
    found: list[Difference] = []
    count, last = 0, UUID(int=0)
    while True:
        async with transaction(sessions) as session:
            page = await queries.balances_after(session, last)
        for balance in page:
            figure = await read_figure(client, balance.tenant_id)
            if figure is None:
                continue
            count += 1
            right = nano_down(balance.available_pico)
            if figure.version == balance.version and abs(figure.available - right) > TOLERANCE_NANO:
                problem = f"the figure is {figure.available} nano, the ledger has {right}"
                found.append(Difference(balance.tenant_id, problem))
        if len(page) < queries.PAGE_MAX:
            return count, found
        last = page[-1].tenant_id


async def write_off(client: RespClient, replica: str) -> dict[UUID, list[UUID]]:
    """Give back the money held for requests of a replica that never returns; returns them by tenant.

    Usage of theirs that turns up later is billed all the same.
    """
    owed = keyspace.owed(replica)
    flat = await client.call("HGETALL", owed)
    lost: dict[UUID, list[UUID]] = {}
    for request, tenant in zip(flat[::2], flat[1::2], strict=True):
        lost.setdefault(UUID(hex=tenant.decode()), []).append(UUID(hex=request.decode()))
    for tenant_id, requests in lost.items():
        await credit_figures.settle(client, tenant_id, None, requests)
        await client.call("HDEL", owed, *(request.hex for request in requests))
    return lost
