"""Members: the projects of their organisation."""

from fastapi import APIRouter
from pydantic import Field

from api.deps import CurrentAct, CurrentCaller, CurrentPaging, ProjectId, ReadSession, Session, TenantId, changed
from api.guard import GuardedRoute
from api.permissions import MY_TENANT
from api.project_shapes import ProjectIn, ProjectOut, ProjectPage, project_out, project_page
from api.schemas import (
    NO_REASON,
    Input,
    Name,
    SuspendIn,
    because,
    problems,
)
from core.pagination import page_of
from tenants import projects
from tenants.roles import Permission

router = APIRouter(route_class=GuardedRoute, tags=["your organisation"])

PROJECT = f"{MY_TENANT}/projects/{{project_id}}"


class ProjectSettings(Input):
    """What is left out stays."""

    name: Name | None = None
    keep_answers: bool | None = Field(
        None,
        description=(
            "Keep answers to calls with an Idempotency-Key, sealed, for 24 hours: a repeat gets the answer again. "
            "Without it a repeat is told where its receipt is. Answers kept before are shown no more once it is off."
        ),
    )


@router.get(f"{MY_TENANT}/projects", summary="List the projects that you see")
async def list_my_projects(
    tenant_id: TenantId, session: ReadSession, caller: CurrentCaller, paging: CurrentPaging
) -> ProjectPage:
    found = await projects.list_projects(
        session,
        tenant_id,
        only=caller.rights.projects_with(Permission.TENANT_READ),
        after=paging.after,
        limit=paging.limit_probe,
    )
    return project_page(page_of(found, paging.limit, lambda project: project.id))


@router.post(f"{MY_TENANT}/projects", status_code=201, summary="Create a project", responses=problems(409))
async def create_my_project(tenant_id: TenantId, body: ProjectIn, session: Session, act: CurrentAct) -> ProjectOut:
    project = await projects.create(session, tenant_id, name=body.name)
    act.on(project.id, name=project.name)
    return project_out(project)


@router.get(PROJECT, summary="Read a project")
async def get_my_project(tenant_id: TenantId, project_id: ProjectId, session: ReadSession) -> ProjectOut:
    return project_out(await projects.get(session, tenant_id, project_id))


@router.patch(PROJECT, summary="Change a project", responses=problems(409))
async def update_my_project(
    tenant_id: TenantId, project_id: ProjectId, body: ProjectSettings, session: Session, act: CurrentAct
) -> ProjectOut:
    before = project_out(await projects.get(session, tenant_id, project_id))
    after = project_out(
        await projects.update(session, tenant_id, project_id, name=body.name, keep_answers=body.keep_answers)
    )
    act.on(project_id, **changed(before, after))
    return after


@router.post(f"{PROJECT}/suspend", status_code=204, summary="Suspend a project")
async def suspend_my_project(
    tenant_id: TenantId, project_id: ProjectId, session: Session, act: CurrentAct, body: SuspendIn = NO_REASON
) -> None:
    """Refuse all calls of its keys, within a second and until resumed. Running answers end normally."""
    await projects.suspend(session, tenant_id, project_id)
    act.on(project_id, **because(body.reason))


@router.post(f"{PROJECT}/resume", status_code=204, summary="Resume a project")
async def resume_my_project(tenant_id: TenantId, project_id: ProjectId, session: Session, act: CurrentAct) -> None:
    await projects.resume(session, tenant_id, project_id)
    act.on(project_id)
