"""Cuts what runs of a key, a project or a tenant: the hard way of revoking and suspending."""

from uuid import UUID

from api.inference import access
from api.inference.gateway import Gateway
from tenants.types import Principal

_CODES = {"api_key": "KEY_REVOKED", "project": "PROJECT_SUSPENDED", "tenant": "TENANT_SUSPENDED"}


def _id_of(principal: Principal, kind: str) -> UUID:
    if kind == "api_key":
        return principal.key_id
    return principal.project_id if kind == "project" else principal.tenant_id


def end_running(gateway: Gateway, kind: str, entity_id: UUID) -> None:
    """End every answer under way of a key, project or tenant; other kinds have none."""
    code = _CODES.get(kind)
    if code is None:
        return
    for relay in list(gateway.relays):
        if relay.offer is not None and _id_of(relay.offer.principal, kind) == entity_id:
            gateway.metrics.add("streams_ended_total")
            relay.revoke(access.refusal(code))
