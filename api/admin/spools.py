"""Operators: usage that is on a gateway's disk and not in the books yet, on every host whose poster was heard of."""

from datetime import datetime

from fastapi import APIRouter
from pydantic import Field

from api.deps import CurrentServices, ReadSession
from api.guard import GuardedRoute
from api.permissions import ADMIN
from api.schemas import Output
from billing import spools
from core import keyspace
from core.resp import RespError, RespUnavailable

router = APIRouter(route_class=GuardedRoute, tags=["credit and usage"])


class SpoolOut(Output):
    """What a poster last saw of a spool. Counts are at least so many where a backlog is long."""

    host: str
    name: str
    replica: str
    live: bool = Field(description="Its gateway ran.")
    unposted_bytes: int
    events: int = Field(description="Not posted.")
    tenants: int = Field(description="Whose they are.")
    oldest_at: datetime | None
    reported_at: datetime
    owed_requests: int | None = Field(
        description="Requests of this replica whose money is still held; null when that is not known."
    )


class SpoolsOut(Output):
    """Spools, those with usage that is not posted first."""

    items: list[SpoolOut]


@router.get(f"{ADMIN}/spools", summary="List usage that is on disk and not in the books")
async def list_spools(session: ReadSession, services: CurrentServices) -> SpoolsOut:
    """Spools of a host that is lost are adopted by `tidegate spool adopt`, what they held by `ledger write-off`."""
    items = []
    for one in await spools.all_of(session):
        try:
            owed = int(await services.valkey.call("HLEN", keyspace.owed(one.replica)))
        except (RespUnavailable, RespError):
            owed = None
        items.append(
            SpoolOut(
                host=one.host,
                name=one.name,
                replica=one.replica,
                live=one.live,
                unposted_bytes=one.unposted_bytes,
                events=one.events,
                tenants=one.tenants,
                oldest_at=one.oldest_at,
                reported_at=one.reported_at,
                owed_requests=owed,
            )
        )
    return SpoolsOut(items=items)
