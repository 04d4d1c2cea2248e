"""Operators: the audit trail, searched and exported."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.responses import StreamingResponse

from api.admin.audit_files import MEDIA_TYPES, Format, lines
from api.audit_trail import AuditPage, CurrentFilter, audit_page
from api.deps import CurrentPaging, CurrentServices, ReadSession
from api.guard import GuardedRoute
from api.permissions import ADMIN
from api.schemas import problems
from core.ids import IdKind, parse_id
from tenants import audit
from tenants.types import AuditFilter

router = APIRouter(route_class=GuardedRoute, tags=["audit"])


def get_operators_filter(
    wanted: CurrentFilter,
    tenant_id: Annotated[str | None, Query(max_length=64, description="Only what concerns this tenant.")] = None,
) -> AuditFilter:
    if tenant_id is None:
        return wanted
    return msgspec.structs.replace(wanted, tenant_id=parse_id(IdKind.TENANT, tenant_id))


OperatorsFilter = Annotated[AuditFilter, Depends(get_operators_filter)]


@router.get(f"{ADMIN}/audit", summary="Search the audit trail", responses=problems(400))
async def list_audit_records(session: ReadSession, paging: CurrentPaging, wanted: OperatorsFilter) -> AuditPage:
    return audit_page(await audit.search(session, wanted, after=paging.after, limit=paging.limit_probe), paging)


@router.get(
    f"{ADMIN}/audit/export",
    summary="Export the audit trail",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/csv": {}, "application/x-ndjson": {}}}, **problems(400)},
)
async def export_audit_records(
    services: CurrentServices,
    wanted: OperatorsFilter,
    kind: Annotated[Format, Query(alias="format", description="`csv` or `jsonl`.")] = Format.JSONL,
    after_seq: Annotated[int, Query(ge=0, lt=2**63, description="`last_seq` of the file before, to go on there.")] = 0,
) -> StreamingResponse:
    """Stream the records that match, oldest first, 500,000 at most.

    The last line says how many they are, the last one's number and hash, and whether there are more; a file without
    it was cut off. Each record has all that its hash covers.
    """
    export = await audit.Export.begin(services.sessions, wanted, after_seq)
    headers = {"content-disposition": f'attachment; filename="audit.{kind.value}"'}
    return StreamingResponse(lines(export, kind), media_type=MEDIA_TYPES[kind], headers=headers)
