"""People who are signed in, for tests."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID, uuid4

from api.guard import COOKIE, CSRF_HEADER
from core import db
from tenants import members, operators, people, sessions
from tenants.types import OperatorRole, Person, Role, SignInMethod
from tests.factories.tenants import PEPPER

SIGNING = b"\x11" * 32  # as the control plane under test has it
DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Visitor:
    """A person with an open session, and the headers a browser of theirs sends with our own pages' requests."""

    person: Person
    token: str

    @property
    def headers(self) -> Mapping[str, str]:
        return {"cookie": f"{COOKIE}={self.token}", CSRF_HEADER: sessions.csrf_token(SIGNING, self.token)}


async def person(sessions_: db.Sessions, *, email: str = "") -> Visitor:
    """Commit a person who is no member of anything, and sign in."""
    async with db.transaction(sessions_) as session:
        made = await people.create(session, email=email or f"{uuid4().hex}@example.com")
    return await signed_in(sessions_, made)


async def signed_in(sessions_: db.Sessions, who: Person) -> Visitor:
    """Open a session for somebody."""
    async with db.transaction(sessions_) as session:
        token = await sessions.open_session(
            session,
            who.id,
            pepper=PEPPER,
            now=datetime.now(UTC),
            absolute_s=DAY_S,
            method=SignInMethod.PASSWORD,
        )
    return Visitor(who, token)


async def member(sessions_: db.Sessions, tenant_id: UUID, role: Role, *, project_id: UUID | None = None) -> Visitor:
    """Commit a member of the tenant, or of one project, and sign in."""
    visitor = await person(sessions_)
    async with db.transaction(sessions_) as session:
        await members.add(session, tenant_id, visitor.person.id, role, project_id=project_id)
    return visitor


async def operator_person(sessions_: db.Sessions, role: OperatorRole) -> Visitor:
    """Commit an operator who signs in as a person, confirmed to be one."""
    visitor = await person(sessions_)
    async with db.transaction(sessions_) as session:
        made = await operators.create(session, name=f"operator {uuid4().hex}", role=role)
        await operators.link(session, made.id, visitor.person.id, now=datetime.now(UTC))
    return visitor
