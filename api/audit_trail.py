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
_PERSON, _TENANT = IdKind.PERSON, IdKind.TENANT
# What an action is about, where its first word does not say; the whole action goes before its first word.
_TARGETS = {
    "api_key.revoke_matching": _TENANT,
    "credit.top_up": IdKind.TRANSACTION,
    "credit.give": IdKind.ADJUSTMENT,
    "entitlement.revert": IdKind.ENTITLEMENT_CHANGE,
    "limit.revert": IdKind.LIMIT_CHANGE,
    "member.follow_provider": _PERSON,
    "member.leave": _PERSON,
    "model_alias": IdKind.MODEL_VERSION,
    "operator_token": IdKind.OPERATOR,
    "identity.refresh": _PERSON,
    "password": _PERSON,
    "quarantine": IdKind.GENERATION,
    "recovery_codes": _PERSON,
    "second_factor": _PERSON,
    "session.end_all": _PERSON,
    "session.open": _PERSON,
    "session.open_with_second_factor": _PERSON,
    "transaction.reverse": IdKind.ADJUSTMENT,
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
        id=format_id(IdKind.AUDIT_RECORD, record.id),
        recorded_at=record.recorded_at,
        actor_kind=actor.kind,
        actor_id=format_id(kind, actor.id) if kind is not None and actor.id is not None and not hidden else None,
        client_ip="" if hidden else actor.client_ip,
        tenant_id=record.tenant_id and format_id(IdKind.TENANT, record.tenant_id),
        action=record.action,
        target_id=record.target_id and _target(record.action, record.target_id, record.tenant_id),
        request_id=actor.request_id,
        details={} if hidden else dict(record.details),
        seq=record.seq,
        hash=record.hash.hex(),
    )


def kind_of_target(action: str, tenant_id: UUID | None) -> IdKind | None:
    """Return what an action of the trail is done to; None for one that nobody knows here."""
    noun, _, verb = action.partition(".")
    if verb == "put":  # settings of a tenant, as a whole
        return _TENANT
    if action == "limit.preview":
        return IdKind.PLAN if tenant_id is None else _TENANT
    return _TARGETS.get(action) or _TARGETS.get(noun) or IdKind.__members__.get(noun.upper())


def _target(action: str, target_id: UUID, tenant_id: UUID | None) -> str:
    kind = kind_of_target(action, tenant_id)
    return target_id.hex if kind is None else format_id(kind, target_id)


def audit_page(found: Sequence[AuditRecord], paging: Paging, *, to_members: bool = False) -> AuditPage:
    """Render what was found with `paging.limit_probe`.

    To members an operator's act is shown without who it was, from where, and what else the platform noted.
    """
    page = page_of(found, paging.limit, lambda record: record.id)
    return AuditPage(
        items=[_out(record, to_members=to_members) for record in page.items],
        next_after=page.next_after and format_id(IdKind.AUDIT_RECORD, page.next_after),
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
