"""Entitlements: what a tenant weighs in turns, and what it is promised of a model, set by operators.

Every change says why and is kept, and gateways are told in the same transaction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from catalog import deployments
from core.db import record_config_change
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, new_uuid
from core.unreadable import Report, log_unreadable
from tenants import entitlement_queries, limit_queries
from tenants.entitlement_tables import EntitlementChangeRow, EntitlementRow
from tenants.errors import invalid, not_found
from tenants.limits import Why

USUAL_WEIGHT = 100
"""Of a tenant of which nothing is said: one with 200 is served twice as much when both wait."""

WEIGHT_MAX, IN_FLIGHT_MAX = 1000, 1_000_000
OWNED_MAX = 200
PROMISED_MAX = 100
"""Tenants to which something of one model is promised: the script counts them one by one when a deployment is full."""

CHANGED = "entitlements"
"""The kind of its configuration change."""


class Figures(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is said of one owner and model; None: nothing. All but the weight are requests in flight."""

    weight: int | None = None
    guarantee: int | None = None
    deserved: int | None = None
    capability: int | None = None

    @property
    def promises(self) -> bool:
        """Whether something is said but a weight."""
        return any(said is not None for said in (self.guarantee, self.deserved, self.capability))


@dataclass(frozen=True, slots=True)
class Owner:
    """A tenant or a plan."""

    tenant_id: UUID | None = None
    plan_id: UUID | None = None


@dataclass(frozen=True, slots=True)
class Entitlement:
    """`model` is a model's own name, empty for all that have no entitlement of their own."""

    id: UUID
    owner: Owner
    model: str
    figures: Figures
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class EntitlementChange:
    """One change; figures of None mean no entitlement."""

    id: UUID
    changed_at: datetime
    actor_kind: str
    actor_id: UUID | None
    reason: str
    owner: Owner
    model: str
    before: Figures | None
    after: Figures | None
    reverts: UUID | None


def _figures(row: EntitlementRow) -> Figures:
    return Figures(row.weight, row.guarantee, row.deserved, row.capability)


def _entitlement(row: EntitlementRow) -> Entitlement:
    return Entitlement(row.id, Owner(row.tenant_id, row.plan_id), row.model, _figures(row), row.updated_at)


def _change(row: EntitlementChangeRow) -> EntitlementChange:
    before, after = (None if said is None else msgspec.convert(said, Figures) for said in (row.before, row.after))
    return EntitlementChange(
        id=row.id,
        changed_at=row.changed_at,
        actor_kind=row.actor_kind,
        actor_id=row.actor_id,
        reason=row.reason,
        owner=Owner(row.tenant_id, row.plan_id),
        model=row.model,
        before=before,
        after=after,
        reverts=row.reverts,
    )


def check(owner: Owner, model: str, figures: Figures) -> None:
    """Refuse figures that contradict each other or promise what a plan or all models cannot.

    Raises:
        PlatformError: invalid, naming the member.
    """
    if figures == Figures():
        raise invalid(
            "weight", "Say a weight, a guarantee, a deserved share or a capability; or remove the entitlement."
        )
    if figures.promises and owner.plan_id is not None:
        raise invalid("guarantee", "A plan says a weight alone. What is promised is a tenant's own: set it there.")
    if figures.promises and not model:
        raise invalid("model", "A guarantee, a deserved share or a capability is of one model: name it.")
    guarantee = figures.guarantee or 0
    deserved = guarantee if figures.deserved is None else figures.deserved
    if deserved < guarantee:
        raise invalid("deserved", f"What is deserved is at least what is guaranteed: {guarantee} or more.")
    if figures.capability is not None and figures.capability < max(1, deserved):
        raise invalid("capability", f"A capability is at least what is deserved, and 1: {max(1, deserved)} or more.")


async def _check_sum(session: AsyncSession, owner: Owner, model: str, figures: Figures) -> None:
    """The guarantees of a model are together no more than the cap of each of its deployments."""
    if not figures.promises:
        return
    await entitlement_queries.lock_model(session, model)
    others, tenants = await entitlement_queries.promised(session, owner.tenant_id, model)
    if tenants >= PROMISED_MAX:
        message = f"{tenants} tenants are promised something of this model already. Remove one of them first."
        raise PlatformError("TOO_MANY_ENTITLEMENTS", ErrorKind.CONFLICT, message)
    if figures.guarantee:
        for name, most in await deployments.caps_of(session, model):
            _check_cap(name, most, others + figures.guarantee)


def _check_cap(deployment: str, most: int, guaranteed: int) -> None:
    if most <= 0:
        message = f"The deployment {deployment!r} has no cap to guarantee a part of. Set its inflight_max first."
        raise PlatformError("NO_CAP", ErrorKind.CONFLICT, message, param="guarantee")
    if guaranteed > most:
        message = (
            f"All tenants together would be guaranteed {guaranteed} requests in flight, and the deployment"
            f" {deployment!r} holds {most}. Guarantee less, or raise its inflight_max."
        )
        fields = {"guaranteed": guaranteed, "inflight_max": most}
        raise PlatformError("OVERPROMISED", ErrorKind.CONFLICT, message, param="guarantee", fields=fields)


async def lock(session: AsyncSession, model: str) -> None:
    """Hold what is promised of a model until the transaction ends; before any configuration change is recorded."""
    await entitlement_queries.lock_model(session, model)


async def check_deployment(session: AsyncSession, model: str, deployment: str, inflight_max: int) -> None:
    """Refuse a cap of a deployment that what is guaranteed of its model does not fit in. The caller holds `lock`.

    Raises:
        PlatformError: conflict.
    """
    guaranteed, _ = await entitlement_queries.promised(session, None, model)
    if guaranteed:
        _check_cap(deployment, inflight_max, guaranteed)


async def put(
    session: AsyncSession, owner: Owner, model: str, figures: Figures, why: Why
) -> tuple[Entitlement, Figures | None]:
    """Say what an owner is entitled to, instead of what was said before.

    Args:
        session: the transaction.
        owner: the tenant or plan.
        model: by its own name; empty: every model without an entitlement of its own.
        figures: all of it; what is None is not said any more.
        why: kept in the history.

    Returns:
        The entitlement, and the figures before, None when there were none.

    Raises:
        PlatformError: invalid, not_found, or conflict when it cannot be kept.
    """
    check(owner, model, figures)
    await _lock(session, owner)
    await _check_sum(session, owner, model, figures)
    row = await entitlement_queries.at(session, owner.tenant_id, owner.plan_id, model)
    before = None if row is None else _figures(row)
    if (
        row is None
        and len(await entitlement_queries.owned(session, owner.tenant_id, owner.plan_id, OWNED_MAX)) >= OWNED_MAX
    ):
        raise PlatformError(
            "TOO_MANY_ENTITLEMENTS", ErrorKind.CONFLICT, f"There are {OWNED_MAX} here. Remove one first."
        )
    edit = _Edit(owner, model, why)
    row = await _write(session, row, edit, figures)
    if before != figures:
        await _record(session, edit, before, figures)
    return _entitlement(row), before


@dataclass(frozen=True, slots=True)
class _Edit:
    """Whose entitlement of which model is changed, and why."""

    owner: Owner
    model: str
    why: Why


async def _write(session: AsyncSession, row: EntitlementRow | None, edit: _Edit, figures: Figures) -> EntitlementRow:
    if row is None:
        owner = edit.owner
        row = EntitlementRow(id=new_uuid(), tenant_id=owner.tenant_id, plan_id=owner.plan_id, model=edit.model)
        session.add(row)
    if row.updated_at is None or _figures(row) != figures:
        row.updated_at = edit.why.clock.now()
    row.weight, row.guarantee = figures.weight, figures.guarantee
    row.deserved, row.capability = figures.deserved, figures.capability
    await session.flush()
    return row


async def remove(session: AsyncSession, owner: Owner, entitlement_id: UUID, why: Why) -> Entitlement:
    """Take an entitlement away; returns what it was."""
    await _lock(session, owner)
    row = await entitlement_queries.one(session, owner.tenant_id, owner.plan_id, entitlement_id)
    if row is None:
        raise not_found(IdKind.ENTITLEMENT)
    gone = _entitlement(row)
    await session.delete(row)
    await _record(session, _Edit(owner, row.model, why), gone.figures, None)
    return gone


async def remove_all_of_plan(session: AsyncSession, plan_id: UUID, why: Why) -> None:
    """Before a plan goes."""
    for row in await entitlement_queries.owned(session, None, plan_id, OWNED_MAX):
        await remove(session, Owner(plan_id=plan_id), row.id, why)


async def revert(session: AsyncSession, owner: Owner, change_id: UUID, why: Why, *, force: bool) -> EntitlementChange:
    """Put back what a change replaced, as a change of its own.

    Raises:
        PlatformError: not_found; conflict when it was changed since, unless forced, is as before already, or what was
            promised then cannot be promised now.
    """
    await _lock(session, owner)
    found = await entitlement_queries.change(session, owner.tenant_id, owner.plan_id, change_id)
    if found is None:
        raise not_found(IdKind.ENTITLEMENT_CHANGE)
    change = _change(found)
    edit = _Edit(owner, change.model, why)
    row = await entitlement_queries.at(session, owner.tenant_id, owner.plan_id, change.model)
    now = None if row is None else _figures(row)
    if now == change.before:
        raise PlatformError("NOTHING_TO_REVERT", ErrorKind.CONFLICT, "It is as it was before that change.")
    if now != change.after and not force:
        message = "It was changed again since. Look at it, then send `force` to put back what was before this change."
        raise PlatformError("ENTITLEMENT_CHANGED_SINCE", ErrorKind.CONFLICT, message)
    if change.before is not None:
        await _check_sum(session, owner, change.model, change.before)
        await _write(session, row, edit, change.before)
    elif row is not None:
        await session.delete(row)
    return await _record(session, edit, now, change.before, reverts=change.id)


async def list_of(session: AsyncSession, owner: Owner) -> Sequence[Entitlement]:
    """Return all of an owner's, at most `OWNED_MAX`, by model."""
    rows = await entitlement_queries.owned(session, owner.tenant_id, owner.plan_id, OWNED_MAX)
    return [_entitlement(row) for row in rows]


async def list_changes(
    session: AsyncSession, owner: Owner, *, after: UUID | None, limit: int
) -> Sequence[EntitlementChange]:
    """Return at most `limit` changes, newest first."""
    rows = await entitlement_queries.changes(session, owner.tenant_id, owner.plan_id, after=after, limit=limit)
    return [_change(row) for row in rows]


async def _lock(session: AsyncSession, owner: Owner) -> None:
    if owner.tenant_id is not None:
        if await limit_queries.lock_tenant(session, owner.tenant_id) is None:
            raise not_found(IdKind.TENANT)
    elif owner.plan_id is None or await limit_queries.plan(session, owner.plan_id, lock=True) is None:
        raise not_found(IdKind.PLAN)


async def _record(
    session: AsyncSession,
    edit: _Edit,
    before: Figures | None,
    after: Figures | None,
    *,
    reverts: UUID | None = None,
) -> EntitlementChange:
    owner, why = edit.owner, edit.why
    row = EntitlementChangeRow(
        id=new_uuid(),
        changed_at=why.clock.now(),
        actor_kind=why.actor.kind,
        actor_id=why.actor.id,
        reason=why.reason,
        tenant_id=owner.tenant_id,
        plan_id=owner.plan_id,
        model=edit.model,
        before=None if before is None else msgspec.to_builtins(before),
        after=None if after is None else msgspec.to_builtins(after),
        reverts=reverts,
    )
    session.add(row)
    await session.flush()
    await record_config_change(session, CHANGED, owner.tenant_id or owner.plan_id)
    return _change(row)


class EntitlementBook:
    """What gateways know: weights by owner and model, and what is promised by model."""

    def __init__(self) -> None:
        self._weights: dict[tuple[UUID | None, str], int] = {}
        self._promised: dict[str, list[tuple[UUID, Figures]]] = {}

    def add(self, owner: Owner, model: str, figures: Figures) -> None:
        """Take in one entitlement."""
        if figures.weight is not None:
            self._weights[owner.tenant_id or owner.plan_id, model] = figures.weight
        if owner.tenant_id is not None and figures.promises:
            self._promised.setdefault(model, []).append((owner.tenant_id, figures))

    def weight(self, tenant_id: UUID, plan_id: UUID | None, model: str) -> int:
        """The tenant's for this model ▸ the tenant's ▸ the plan's for this model ▸ the plan's ▸ the usual."""
        for owner in (tenant_id, plan_id):
            for of in (model, ""):
                found = self._weights.get((owner, of))
                if found is not None:
                    return found
        return USUAL_WEIGHT

    def promised(self, model: str) -> Sequence[tuple[UUID, Figures]]:
        """Return the tenants to which something of a model is promised."""
        return self._promised.get(model, ())


async def load(session: AsyncSession, report: Report = log_unreadable) -> EntitlementBook:
    """Return what gateways need; of a row that cannot be read nothing is promised."""
    book = EntitlementBook()
    for row in await entitlement_queries.everything(session):
        try:
            figures = Figures(row.weight, row.guarantee, row.deserved, row.capability)
            book.add(Owner(row.tenant_id, row.plan_id), row.model, figures)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one row is not the others' fault
            report("entitlement", row.id, error)
    return book
