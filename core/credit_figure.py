"""A tenant's credit in Valkey: billing makes it, admission decides by it, both change the sum of what is held."""

from struct import Struct
from typing import NamedTuple
from uuid import UUID

from core import keyspace
from core.resp import RespClient

LAYOUT = Struct("<ddd")  # whole numbers: MAX_BALANCE_NANO is below 2^53


class CreditFigure(NamedTuple):
    """All but the version in nano."""

    available: int  # as the ledger says, before what is outstanding
    version: int  # of the ledger's balance that this comes from
    outstanding: int  # the sum of the tenant's outstanding requests


def parse_figure(raw: bytes | None) -> CreditFigure | None:
    """Return the figure in the value of `keyspace.credit`; None when nobody asked for it yet."""
    return CreditFigure(*map(int, LAYOUT.unpack(raw))) if raw is not None else None


async def read_figure(client: RespClient, tenant_id: UUID) -> CreditFigure | None:
    """Return a tenant's figure, None when Valkey has none: also where an earlier version left it as a hash."""
    return parse_figure((await client.call("MGET", keyspace.credit(tenant_id)))[0])
