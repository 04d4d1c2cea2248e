"""Operators: the audit trail, searched and exported."""

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Query
from starlette.responses import StreamingResponse

from api.admin.audit_files import MEDIA_TYPES, Format, lines
from api.deps import CurrentPaging, CurrentServices, ReadSession
from api.guard import GuardedRoute
from api.permissions import ADMIN
from api.schemas import Instant, Output, problems
from core.ids import IdKind, format_id, parse_any_id, parse_id
from core.pagination import page_of
from tenants import audit
from tenants.types import ActorKind, AuditFilter

router = APIRouter(route_class=GuardedRoute, tags=["audit"])

_ACTOR_IDS = {
    ActorKind.OPERATOR: IdKind.OPERATOR,
    ActorKind.PERSON: IdKind.PERSON,
    ActorKind.API_KEY: IdKind.API_KEY,
}


class AuditRecordOut(Output):
    """Who did what, when, from where, in which request; and the record's place in the hash chain."""

    id: str
    recorded_at: datetime
    actor_kind: str
    actor_id: str | None
    client_ip: str
    tenant_id: str | None
    action: str
    target_id: str | None
    request_id: str
    details: dict[str, Any]
    seq: int
    hash: str


class AuditPage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[AuditRecordOut]
    next_after: str | None


def _out(record: audit.AuditRecord) -> AuditRecordOut:
    actor, kind = record.actor, _ACTOR_IDS.get(record.actor.kind)
    return AuditRecordOut(
        id=record.id.hex,
        recorded_at=record.recorded_at,
        actor_kind=actor.kind,
        actor_id=format_id(kind, actor.id) if kind is not None and actor.id is not None else None,
        client_ip=actor.client_ip,
        tenant_id=record.tenant_id and format_id(IdKind.TENANT, record.tenant_id),
        action=record.action,
        target_id=record.target_id and record.target_id.hex,
        request_id=actor.request_id,
        details=dict(record.details),
        seq=record.seq,
        hash=record.hash.hex(),
    )


def get_filter(  # noqa: PLR0917 - each is a query parameter
    services: CurrentServices,
    tenant_id: Annotated[str | None, Query(max_length=64, description="Only what concerns this tenant.")] = None,
    actor_id: Annotated[str | None, Query(max_length=64, description="Only what this one did.")] = None,
    target_id: Annotated[str | None, Query(max_length=64, description="Only what was done to this thing.")] = None,
    action: Annotated[str, Query(max_length=80, description="How the action begins, e.g. `api_key.`.")] = "",
    since: Annotated[Instant | None, Query(description="From this instant on.")] = None,
    until: Annotated[Instant | None, Query(description="Before this instant.")] = None,
    text: Annotated[
        str, Query(max_length=audit.TEXT_CHARACTERS_MAX, description="What stands in the details, in 92 days at most.")
    ] = "",
) -> AuditFilter:
    def optional(given: str | None) -> UUID | None:
        return None if given is None else parse_any_id(given)

    tenant = None if tenant_id is None else parse_id(IdKind.TENANT, tenant_id)
    wanted = AuditFilter(tenant, optional(actor_id), optional(target_id), action, since, until, text)
    return audit.checked(wanted, services.clock.now())


CurrentFilter = Annotated[AuditFilter, Depends(get_filter)]


@router.get(f"{ADMIN}/audit", summary="Search the audit trail", responses=problems(400))
async def list_audit_records(session: ReadSession, paging: CurrentPaging, wanted: CurrentFilter) -> AuditPage:
    found = await audit.search(session, wanted, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda record: record.id)
    return AuditPage(items=[_out(record) for record in page.items], next_after=page.next_after and page.next_after.hex)


@router.get(
    f"{ADMIN}/audit/export",
    summary="Export the audit trail",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/csv": {}, "application/x-ndjson": {}}}, **problems(400)},
)
async def export_audit_records(
    services: CurrentServices,
    wanted: CurrentFilter,
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
