"""The audit trail on the wire, as operators and members read it."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, Query

from api.deps import CurrentServices, Paging
from api.schemas import Instant, Output
from core.ids import IdKind, format_id, parse_any_id
from core.pagination import page_of
from tenants import audit
from tenants.audit import AuditRecord
from tenants.types import ActorKind, AuditFilter

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


def _out(record: AuditRecord, *, to_members: bool) -> AuditRecordOut:
    actor, kind = record.actor, _ACTOR_IDS.get(record.actor.kind)
    hidden = to_members and actor.kind is ActorKind.OPERATOR
    return AuditRecordOut(
        id=record.id.hex,
        recorded_at=record.recorded_at,
        actor_kind=actor.kind,
        actor_id=format_id(kind, actor.id) if kind is not None and actor.id is not None and not hidden else None,
        client_ip="" if hidden else actor.client_ip,
        tenant_id=record.tenant_id and format_id(IdKind.TENANT, record.tenant_id),
        action=record.action,
        target_id=record.target_id and record.target_id.hex,
        request_id=actor.request_id,
        details={} if hidden else dict(record.details),
        seq=record.seq,
        hash=record.hash.hex(),
    )


def audit_page(found: Sequence[AuditRecord], paging: Paging, *, to_members: bool = False) -> AuditPage:
    """Render what was found with `paging.limit_probe`.

    To members an operator's act is shown without who it was, from where, and what else the platform noted.
    """
    page = page_of(found, paging.limit, lambda record: record.id)
    return AuditPage(
        items=[_out(record, to_members=to_members) for record in page.items],
        next_after=page.next_after and page.next_after.hex,
    )


def get_filter(  # noqa: PLR0917 - each is a query parameter
    services: CurrentServices,
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

    wanted = AuditFilter(None, optional(actor_id), optional(target_id), action, since, until, text)
    return audit.checked(wanted, services.clock.now())


CurrentFilter = Annotated[AuditFilter, Depends(get_filter)]
