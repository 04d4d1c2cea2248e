"""What members and operators are shown alike of projects."""

from datetime import datetime

from pydantic import Field

from api.schemas import Input, Name, Output, StatusName
from core.ids import IdKind, format_id
from core.pagination import Page
from tenants.types import Project


class ProjectIn(Input):
    """A new project."""

    name: Name


class ProjectOut(Output):
    """A project."""

    id: str
    tenant_id: str
    name: str
    status: StatusName
    created_at: datetime
    keep_answers: bool = Field(
        description="Whether answers to calls with an Idempotency-Key are kept, sealed, for 24 hours, for repeats."
    )


class ProjectPage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[ProjectOut]
    next_after: str | None


def project_out(project: Project) -> ProjectOut:
    return ProjectOut(
        id=format_id(IdKind.PROJECT, project.id),
        tenant_id=format_id(IdKind.TENANT, project.tenant_id),
        name=project.name,
        status=project.status,
        created_at=project.created_at,
        keep_answers=project.keep_answers,
    )


def project_page(page: Page[Project]) -> ProjectPage:
    return ProjectPage(
        items=[project_out(project) for project in page.items],
        next_after=page.next_after and format_id(IdKind.PROJECT, page.next_after),
    )
