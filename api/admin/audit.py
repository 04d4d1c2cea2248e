"""Operators: the audit trail."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query

from api.deps import CurrentPaging, ReadSession
from api.guard import GuardedRoute
from api.permissions import ADMIN
from api.schemas import Output
from core.ids import IdKind, format_id, parse_id
from core.pagination import page_of
from tenants import audit
from tenants.types import ActorKind

router = APIRouter(route_class=GuardedRoute, tags=["audit"])

_ACTOR_IDS = {ActorKind.OPERATOR: IdKind.OPERATOR, ActorKind.API_KEY: IdKind.API_KEY}


class AuditRecordOut(Output):
    """Who did what, when, in which request."""

    id: str
    recorded_at: datetime
    actor_kind: str
    actor_id: str | None
    tenant_id: str | None
    action: str
    target_id: str | None
    request_id: str
    details: dict[str, Any]


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
        tenant_id=record.tenant_id and format_id(IdKind.TENANT, record.tenant_id),
        action=record.action,
        target_id=record.target_id and record.target_id.hex,
        request_id=actor.request_id,
        details=dict(record.details),
    )


@router.get(f"{ADMIN}/audit", summary="Read the audit trail")
async def list_audit_records(
    session: ReadSession,
    paging: CurrentPaging,
    tenant_id: Annotated[str | None, Query(max_length=64, description="Only what concerns this tenant.")] = None,
) -> AuditPage:
    tenant = None if tenant_id is None else parse_id(IdKind.TENANT, tenant_id)
    found = await audit.list_records(session, tenant, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda record: record.id)
    return AuditPage(items=[_out(record) for record in page.items], next_after=page.next_after and page.next_after.hex)
