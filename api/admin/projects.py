"""Operators: projects of a tenant."""

from typing import Literal

from fastapi import APIRouter

from api.deps import CurrentAct, CurrentPaging, ProjectId, ReadSession, Session, TenantId, changed
from api.guard import GuardedRoute
from api.permissions import TENANT
from api.project_shapes import ProjectIn, ProjectOut, ProjectPage, project_out, project_page
from api.schemas import Input, Reason, because, problems
from core.pagination import page_of
from tenants import projects, tenants
from tenants.types import Status

router = APIRouter(route_class=GuardedRoute, tags=["projects"])


class ProjectChange(Input):
    """What is left out stays."""

    status: Literal["active", "suspended"] | None = None
    reason: Reason | None = None


@router.post(f"{TENANT}/projects", status_code=201, summary="Create a project", responses=problems(409))
async def create_project(tenant_id: TenantId, body: ProjectIn, session: Session, act: CurrentAct) -> ProjectOut:
    project = await projects.create(session, tenant_id, name=body.name)
    act.on(project.id, name=project.name)
    return project_out(project)


@router.get(f"{TENANT}/projects", summary="List a tenant's projects")
async def list_projects(tenant_id: TenantId, session: ReadSession, paging: CurrentPaging) -> ProjectPage:
    await tenants.get(session, tenant_id)
    found = await projects.list_projects(session, tenant_id, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda project: project.id)
    return project_page(page)


@router.get(f"{TENANT}/projects/{{project_id}}", summary="Read a project")
async def get_project(tenant_id: TenantId, project_id: ProjectId, session: ReadSession) -> ProjectOut:
    return project_out(await projects.get(session, tenant_id, project_id))


@router.patch(f"{TENANT}/projects/{{project_id}}", summary="Change a project")
async def update_project(
    tenant_id: TenantId, project_id: ProjectId, body: ProjectChange, session: Session, act: CurrentAct
) -> ProjectOut:
    """Suspend or resume a project. Gateways follow within a second."""
    before = project_out(await projects.get(session, tenant_id, project_id))
    after = project_out(
        await projects.update(session, tenant_id, project_id, status=body.status and Status(body.status))
    )
    act.on(project_id, **changed(before, after), **because(body.reason))
    return after
