"""Owners of keys, and every way in which a key loses its rights."""

from dataclasses import dataclass
from uuid import UUID, uuid4

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from core import db
from core.clock import SystemClock
from core.ids import IdKind, new_uuid, parse_id
from tenants import api_keys, members, people, projects, tenants
from tenants.key_types import KeyPolicy
from tenants.types import KeyOwner, Role, Status
from tests.factories.fleet import Customer


@dataclass(frozen=True, slots=True)
class Owned:
    """A key by its ids, with what owns it: a person's id, or a service account's, and the membership's."""

    tenant_id: UUID
    project_id: UUID
    key_id: UUID
    owner_id: UUID
    member_id: UUID


async def give(sessions: db.Sessions, customer: Customer, what: str) -> Owned:
    """Give the customer's key to a service account when that is what is to end, else to a member."""
    tenant_id = parse_id(IdKind.TENANT, customer.tenant_id)
    project_id = parse_id(IdKind.PROJECT, customer.project_id)
    key_id = parse_id(IdKind.API_KEY, customer.key_id)
    async with db.transaction(sessions) as session:
        if what == "service account":
            owner = KeyOwner(service_account_id=await account(session, tenant_id, project_id))
            member_id = new_uuid()
        else:
            person = await people.create(session, email=f"{uuid4().hex}@example.com")
            member_id = (await members.add(session, tenant_id, person.id, Role.DEVELOPER)).id
            owner = KeyOwner(person_id=person.id)
        key = await api_keys.get(session, tenant_id, key_id, lock=True)
        policy = KeyPolicy(SystemClock().now())
        await api_keys.update(session, tenant_id, key_id, name=key.name, owner=owner, limits=key.limits, policy=policy)
    owner_id = owner.person_id or owner.service_account_id
    assert owner_id is not None
    return Owned(tenant_id, project_id, key_id, owner_id, member_id)


async def account(session: AsyncSession, tenant_id: UUID, project_id: UUID) -> UUID:
    """Make a service account that may what a developer may."""
    account_id = new_uuid()
    statement = text(
        "INSERT INTO service_account (id, tenant_id, project_id, name, role) VALUES (:i, :t, :p, :n, 'developer')"
    )
    await session.execute(statement, {"i": account_id, "t": tenant_id, "p": project_id, "n": account_id.hex})
    return account_id


async def end(session: AsyncSession, owned: Owned, what: str) -> None:
    """Take the key's rights away in this way."""
    clock = SystemClock()
    if what == "revoked key":
        await api_keys.revoke(session, owned.tenant_id, owned.key_id, clock=clock)
    elif what == "suspended key":
        await api_keys.set_status(session, owned.tenant_id, owned.key_id, Status.SUSPENDED, clock=clock)
    elif what == "project":
        await projects.suspend(session, owned.tenant_id, owned.project_id)
    elif what == "tenant":
        await tenants.suspend(session, owned.tenant_id)
    else:
        table, entity = {
            "person": ("person", owned.owner_id),
            "member": ("member", owned.member_id),
            "service account": ("service_account", owned.owner_id),
        }[what]
        await session.execute(text(f"UPDATE {table} SET status = 'suspended' WHERE id = :id"), {"id": entity})
        await db.record_config_change(session, "person" if table == "member" else table, owned.owner_id)
