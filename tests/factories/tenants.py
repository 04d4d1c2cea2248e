"""Tenants, projects, keys and operators for tests."""

from dataclasses import dataclass
from uuid import UUID, uuid4

from core import db
from core.money import Currency
from tenants import api_keys, operators, principals, projects, tenants
from tenants.credentials import Peppers
from tenants.types import ApiKey, KeyLimits, Operator, Principal, Project, Tenant

PEPPER = bytes(range(32))
PEPPERS = Peppers(PEPPER)


@dataclass(frozen=True, slots=True)
class Customer:
    """A tenant with one project and one key."""

    tenant: Tenant
    project: Project
    key: ApiKey
    secret: str

    @property
    def digest(self) -> bytes:
        return api_keys.digest(PEPPER, self.secret)


async def customer(
    sessions: db.Sessions, limits: KeyLimits | None = None, *, currency: Currency = Currency.USD
) -> Customer:
    """Commit a tenant, a project and a key."""
    async with db.transaction(sessions) as session:
        tenant = await tenants.create(session, name=f"tenant {uuid4().hex}", currency=currency)
        project = await projects.create(session, tenant.id, name="main")
        key, secret = await api_keys.create(session, tenant.id, project.id, name="first", pepper=PEPPER, limits=limits)
    return Customer(tenant, project, key, secret)


async def changed(sessions: db.Sessions, kind: str, *entities: UUID) -> dict[bytes, Principal | None]:
    """Return what a gateway takes in when these change."""
    found: dict[bytes, Principal | None] = {}
    async with db.transaction(sessions) as session:
        async for patch in principals.load_changed(session, kind, entities):
            found.update(patch)
    return found


async def operator(sessions: db.Sessions) -> tuple[Operator, str]:
    """Commit an operator and return it with its token."""
    async with db.transaction(sessions) as session:
        made = await operators.create(session, name=f"operator {uuid4().hex}")
        token = await operators.issue_token(session, made.id, pepper=PEPPER)
    return made, token
