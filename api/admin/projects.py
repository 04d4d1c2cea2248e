"""Operators: projects of a tenant."""

from datetime import datetime

from fastapi import APIRouter

from api.deps import CurrentAct, CurrentPaging, ProjectId, ReadSession, Session, TenantId, changed
from api.guard import GuardedRoute
from api.permissions import TENANT
from api.schemas import Input, Name, Output, StatusName, problems
from core.ids import IdKind, format_id
from core.pagination import page_of
from tenants import projects, tenants
from tenants.types import Project

router = APIRouter(route_class=GuardedRoute, tags=["projects"])


class ProjectIn(Input):
    """A new project."""

    name: Name


class ProjectChange(Input):
    """What is left out stays."""

    status: StatusName | None = None


class ProjectOut(Output):
    """A project."""

    id: str
    tenant_id: str
    name: str
    status: StatusName
    created_at: datetime


class ProjectPage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[ProjectOut]
    next_after: str | None


def _out(project: Project) -> ProjectOut:
    return ProjectOut(
        id=format_id(IdKind.PROJECT, project.id),
        tenant_id=format_id(IdKind.TENANT, project.tenant_id),
        name=project.name,
        status=project.status,
        created_at=project.created_at,
    )


@router.post(f"{TENANT}/projects", status_code=201, summary="Create a project", responses=problems(409))
async def create_project(tenant_id: TenantId, body: ProjectIn, session: Session, act: CurrentAct) -> ProjectOut:
    project = await projects.create(session, tenant_id, name=body.name)
    act.on(project.id, name=project.name)
    return _out(project)


@router.get(f"{TENANT}/projects", summary="List a tenant's projects")
async def list_projects(tenant_id: TenantId, session: ReadSession, paging: CurrentPaging) -> ProjectPage:
    await tenants.get(session, tenant_id)
    found = await projects.list_projects(session, tenant_id, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda project: project.id)
    return ProjectPage(
        items=[_out(project) for project in page.items],
        next_after=page.next_after and format_id(IdKind.PROJECT, page.next_after),
    )


@router.get(f"{TENANT}/projects/{{project_id}}", summary="Read a project")
async def get_project(tenant_id: TenantId, project_id: ProjectId, session: ReadSession) -> ProjectOut:
    return _out(await projects.get(session, tenant_id, project_id))


@router.patch(f"{TENANT}/projects/{{project_id}}", summary="Change a project")
async def update_project(
    tenant_id: TenantId, project_id: ProjectId, body: ProjectChange, session: Session, act: CurrentAct
) -> ProjectOut:
    """Suspend or resume a project. Gateways follow within a second."""
    before = _out(await projects.get(session, tenant_id, project_id))
    after = _out(await projects.update(session, tenant_id, project_id, status=body.status))
    act.on(project_id, **changed(before, after))
    return after
