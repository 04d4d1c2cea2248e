"""Credit figures as tests set them by hand."""

from uuid import UUID

from core import keyspace
from core.credit_figure import LAYOUT, CreditFigure, read_figure
from core.resp import RespClient


async def figure_of(client: RespClient, tenant_id: UUID) -> CreditFigure:
    found = await read_figure(client, tenant_id)
    assert found is not None
    return found


async def set_figure(client: RespClient, tenant_id: UUID, **changed: int) -> None:
    """Set these parts of a tenant's figure; what is not named stays."""
    figure = (await read_figure(client, tenant_id) or CreditFigure(0, 0, 0))._replace(**changed)
    await client.call("SET", keyspace.credit(tenant_id), LAYOUT.pack(*figure))


async def add_outstanding(client: RespClient, tenant_id: UUID, nano: int) -> None:
    await set_figure(client, tenant_id, outstanding=(await figure_of(client, tenant_id)).outstanding + nano)
