"""People: who is signed in, and what they may do where."""

from collections.abc import Iterable
from datetime import datetime

from fastapi import APIRouter
from pydantic import Field

from api.control.me import LanguageName, MethodName, MyselfOut, person_out
from api.deps import CurrentCaller, CurrentServices, ReadSession
from api.guard import GuardedRoute
from api.schemas import OperatorRoleName, Output, RoleName, StatusName
from core.ids import IdKind, format_id
from tenants import members, operators, sessions, tenants
from tenants.roles import OPERATOR_PERMISSIONS, PERMISSIONS, Rights
from tenants.types import Operator, Role, Tenant

router = APIRouter(route_class=GuardedRoute, tags=["yourself"])

TENANTS_MAX = 200


class ProjectRightsOut(Output):
    """What a person may do in one project, with what they may do in the whole organisation."""

    id: str
    roles: list[RoleName]
    permissions: list[str]


class TenantRightsOut(Output):
    """An organisation, and what a person may do in it."""

    id: str
    name: str
    status: StatusName
    roles: list[RoleName]
    permissions: list[str]
    projects: list[ProjectRightsOut] = Field(description="Where they may do more than everywhere in it.")


class OperatorRightsOut(Output):
    """What a person may do on the platform."""

    id: str
    role: OperatorRoleName
    permissions: list[str]


class SessionOut(Output):
    """Who is signed in, and what they may do."""

    person: MyselfOut
    tenants: list[TenantRightsOut]
    operator: OperatorRightsOut | None
    language: LanguageName
    method: MethodName
    second_factor: bool
    created_at: datetime
    expires_at: datetime
    csrf_token: str = Field(description="To be sent as X-CSRF-Token with every change.")


def _permissions(roles: Iterable[Role]) -> list[str]:
    return sorted({permission.value for role in roles for permission in PERMISSIONS[role]})


def _tenant(tenant: Tenant, rights: Rights) -> TenantRightsOut:
    return TenantRightsOut(
        id=format_id(IdKind.TENANT, tenant.id),
        name=tenant.name,
        status=tenant.status,
        roles=sorted(rights.roles),
        permissions=_permissions(rights.roles),
        projects=[
            ProjectRightsOut(
                id=format_id(IdKind.PROJECT, project_id),
                roles=sorted(rights.roles | roles),
                permissions=_permissions(rights.roles | roles),
            )
            for project_id, roles in sorted(rights.of_project.items())
        ],
    )


def _operator(operator: Operator | None) -> OperatorRightsOut | None:
    if operator is None:
        return None
    return OperatorRightsOut(
        id=format_id(IdKind.OPERATOR, operator.id),
        role=operator.role,
        permissions=sorted(permission.value for permission in OPERATOR_PERMISSIONS[operator.role]),
    )


@router.get("/api/v1/session", summary="Who am I")
async def get_session_of_caller(caller: CurrentCaller, session: ReadSession, services: CurrentServices) -> SessionOut:
    """Return you, your organisations with your rights in them, and the token that changes need."""
    signed_in = caller.own
    held = await members.of_person(session, signed_in.person.id)
    rights = {tenant_id: there for tenant_id, there in held.items() if signed_in.reaches(tenant_id)}
    operator = None if signed_in.only_tenant else await operators.of_person(session, signed_in.person.id)
    found = [(await tenants.get(session, tenant_id), rights[tenant_id]) for tenant_id in sorted(rights)[:TENANTS_MAX]]
    return SessionOut.model_validate(
        {
            "person": person_out(signed_in.person),
            "tenants": [_tenant(tenant, there) for tenant, there in found],
            "operator": _operator(operator),
            "language": signed_in.person.language,
            "method": signed_in.method,
            "second_factor": signed_in.second_factor,
            "created_at": signed_in.created_at,
            "expires_at": signed_in.expires_at,
            "csrf_token": sessions.csrf_token(services.signing, caller.token),
        }
    )
