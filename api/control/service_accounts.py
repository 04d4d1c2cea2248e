"""Members: accounts of programs."""

from fastapi import APIRouter

from api.deps import CurrentCaller, CurrentPaging, ProjectId, ReadSession, ServiceAccountId, Session, TenantId
from api.guard import GuardedRoute
from api.people_shapes import ServiceAccountOut, ServiceAccountPage, StandingName, account_out
from api.permissions import MY_ACCOUNT, MY_TENANT
from api.schemas import Input, Name, Reason, RoleName, because, problems
from api.visit import CurrentVisit
from core.ids import IdKind, format_id
from core.pagination import page_of
from tenants import service_accounts
from tenants.roles import Permission
from tenants.types import PersonStatus, Role, ServiceAccount

router = APIRouter(route_class=GuardedRoute, tags=["your organisation"])


class ServiceAccountIn(Input):
    """A program's account; its role says what its keys may be good for."""

    name: Name
    role: RoleName = Role.DEVELOPER


class ServiceAccountChange(Input):
    """What is left out stays."""

    name: Name | None = None
    role: RoleName | None = None
    status: StandingName | None = None
    reason: Reason | None = None


def _shown(account: ServiceAccount) -> dict[str, str]:
    return {"name": account.name, "role": account.role, "status": account.status}


@router.get(f"{MY_TENANT}/service-accounts", summary="List service accounts")
async def list_service_accounts(
    tenant_id: TenantId, session: ReadSession, caller: CurrentCaller, paging: CurrentPaging
) -> ServiceAccountPage:
    found = await service_accounts.list_accounts(
        session,
        tenant_id,
        projects_=caller.rights.projects_with(Permission.MEMBER_READ),
        after=paging.after,
        limit=paging.limit_probe,
    )
    page = page_of(found, paging.limit, lambda one: one.id)
    return ServiceAccountPage(
        items=[account_out(one) for one in page.items],
        next_after=page.next_after and format_id(IdKind.SERVICE_ACCOUNT, page.next_after),
    )


@router.post(
    f"{MY_TENANT}/projects/{{project_id}}/service-accounts",
    status_code=201,
    summary="Create a service account",
    responses=problems(409),
)
async def create_service_account(
    tenant_id: TenantId, project_id: ProjectId, body: ServiceAccountIn, session: Session, visit: CurrentVisit
) -> ServiceAccountOut:
    """Make an account that API keys can belong to instead of a person, never with a role above your own."""
    account = await service_accounts.create(
        session, tenant_id, project_id, name=body.name, role=body.role, by=visit.caller.rights
    )
    visit.act.on(account.id, after=_shown(account))
    return account_out(account)


@router.patch(MY_ACCOUNT, summary="Rename, suspend or resume a service account", responses=problems(409))
async def update_service_account(
    tenant_id: TenantId,
    service_account_id: ServiceAccountId,
    body: ServiceAccountChange,
    session: Session,
    visit: CurrentVisit,
) -> ServiceAccountOut:
    """Change an account. Keys of a suspended one are refused within a second, until it is resumed."""
    before, after = await service_accounts.change(
        session,
        tenant_id,
        service_account_id,
        by=visit.caller.rights,
        name=body.name,
        role=body.role,
        status=body.status and PersonStatus(body.status),
    )
    visit.act.on(service_account_id, before=_shown(before), after=_shown(after), **because(body.reason))
    return account_out(after)


@router.delete(MY_ACCOUNT, status_code=204, summary="Delete a service account")
async def delete_service_account(
    tenant_id: TenantId, service_account_id: ServiceAccountId, session: Session, visit: CurrentVisit
) -> None:
    """Delete an account for good. Its keys are refused within a second; another of its name inherits nothing."""
    before, _ = await service_accounts.change(
        session, tenant_id, service_account_id, by=visit.caller.rights, status=PersonStatus.DELETED
    )
    visit.act.on(service_account_id, before=_shown(before))
