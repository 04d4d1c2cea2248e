"""What members and operators are shown alike of people, invites and service accounts."""

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from pydantic import Field

from api.schemas import Input, OperatorRoleName, Output, RoleName
from api.services import Services
from core.ids import IdKind, format_id, parse_id
from tenants.letters import Post
from tenants.types import Invite, InviteState, Member, Person, ServiceAccount

Email = Annotated[str, Field(min_length=3, max_length=254, examples=["ada@example.com"])]
ProjectIdIn = Annotated[str, Field(max_length=64, description="In one project only; null: in all of it.")]
StandingName = Literal["active", "suspended"]
InviteStateName = Annotated[InviteState, Field(strict=False)]


class InviteIn(Input):
    """Whom to invite, as what."""

    email: Email
    role: RoleName
    project_id: ProjectIdIn | None = None


class OperatorInviteIn(Input):
    """Who shall run the platform with you."""

    email: Email
    role: OperatorRoleName


class MemberOut(Output):
    """A person's role in an organisation, or in one of its projects."""

    id: str
    person_id: str
    email: str
    name: str
    project_id: str | None
    role: RoleName
    status: StandingName
    person_status: StandingName
    has_second_factor: bool
    origin: str = Field(description="Empty, or the identity provider whose groups give this role.")
    created_at: datetime


class MemberPage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[MemberOut]
    next_after: str | None


class InviteOut(Output):
    """An invite, without its link."""

    id: str
    email: str
    project_id: str | None
    role: RoleName | None
    operator_role: OperatorRoleName | None
    state: InviteStateName
    created_at: datetime
    expires_at: datetime


class InvitePage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[InviteOut]
    next_after: str | None


class ServiceAccountOut(Output):
    """A program's account in a project."""

    id: str
    project_id: str
    name: str
    role: RoleName
    status: StandingName
    created_at: datetime


class ServiceAccountPage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[ServiceAccountOut]
    next_after: str | None


def post_of(services: Services) -> Post:
    return Post(services.settings.base_url, services.pepper, services.sealing_key)


def shown_id(kind: IdKind, value: UUID | None) -> str | None:
    return None if value is None else format_id(kind, value)


def project_in(text: str | None) -> UUID | None:
    return None if text is None else parse_id(IdKind.PROJECT, text)


def member_out(member: Member, person: Person) -> MemberOut:
    return MemberOut.model_validate(
        {
            "id": format_id(IdKind.MEMBER, member.id),
            "person_id": format_id(IdKind.PERSON, person.id),
            "email": person.email,
            "name": person.name,
            "project_id": shown_id(IdKind.PROJECT, member.project_id),
            "role": member.role,
            "status": member.status,
            "person_status": person.status,
            "has_second_factor": person.has_second_factor,
            "origin": member.origin,
            "created_at": member.created_at,
        }
    )


def invite_out(invite: Invite) -> InviteOut:
    return InviteOut(
        id=format_id(IdKind.INVITE, invite.id),
        email=invite.email,
        project_id=shown_id(IdKind.PROJECT, invite.project_id),
        role=invite.role,
        operator_role=invite.operator_role,
        state=invite.state,
        created_at=invite.created_at,
        expires_at=invite.expires_at,
    )


def account_out(account: ServiceAccount) -> ServiceAccountOut:
    return ServiceAccountOut.model_validate(
        {
            "id": format_id(IdKind.SERVICE_ACCOUNT, account.id),
            "project_id": format_id(IdKind.PROJECT, account.project_id),
            "name": account.name,
            "role": account.role,
            "status": account.status,
            "created_at": account.created_at,
        }
    )
