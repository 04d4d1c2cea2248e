"""What operators' and members' routes of limits share: their shapes on the wire, and what a change leaves behind."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Protocol
from uuid import UUID

from fastapi import Depends, Query
from pydantic import Field, StringConstraints
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request

from api.deps import Act, CurrentAct, Session, get_caller, path_id
from api.errors import request_id_of
from api.schemas import Input, Output, Reason, because
from api.services import services_of
from catalog import models
from core.clock import Clock
from core.ids import IdKind, format_id
from core.money import PICO_PER_NANO
from tenants import limits, refusals
from tenants.limit_merge import SPENDS, Effective
from tenants.limit_requests import LimitRequest, RequestState
from tenants.limits import LimitChange, Why
from tenants.types import ActorKind, LimitAuthor, LimitLevel, LimitMetric, LimitMode, LimitRule, LimitSlot

LevelName = Annotated[LimitLevel, Field(strict=False)]
MetricName = Annotated[LimitMetric, Field(strict=False)]
ModeName = Annotated[LimitMode, Field(strict=False)]
StateName = Annotated[RequestState, Field(strict=False)]
AuthorName = Annotated[LimitAuthor, Field(strict=False)]
ModelName = Annotated[
    str,
    StringConstraints(max_length=128, pattern=r"^[\x21-\x7e]*$"),
    Field(description="A model by any of its names; empty: all models together."),
]
Amount = Annotated[
    Annotated[int, Field(ge=0)] | Annotated[str, StringConstraints(pattern=r"^[0-9]{1,26}(\.[0-9]{1,12})?$")],
    Field(
        description="A whole number; for spend a decimal string in the tenant's currency. 0 allows nothing. "
        "No limit at all is said by having no rule.",
        examples=[600, "100.00"],
    ),
]

MET_SINCE = timedelta(hours=24)
_ACTOR_IDS = {
    ActorKind.OPERATOR: IdKind.OPERATOR,
    ActorKind.API_KEY: IdKind.API_KEY,
    ActorKind.PERSON: IdKind.PERSON,
}


class LimitIn(Input):
    """A limit to set, instead of the one for the same metric, model and mode."""

    metric: MetricName
    amount: Amount
    mode: ModeName = LimitMode.HARD
    model: ModelName = ""
    replaces: ModeName | None = Field(
        None, description="Remove the limit of this mode in the same change: `dark`, to make a trial hard."
    )
    reason: Reason


class LevelLimitIn(LimitIn):
    """A limit to set for the tenant, or with level project or key the same one for each of them that has no own."""

    level: LevelName = LimitLevel.TENANT


class ReasonIn(Input):
    """Why."""

    reason: Reason


class RevertIn(ReasonIn):
    """Why, and whether to do it although the limit was changed again since."""

    force: bool = False


class LimitOut(Output):
    """A rule."""

    id: str
    level: LevelName
    metric: MetricName
    amount: int | str
    mode: ModeName
    model: str
    set_by: AuthorName = Field(description="`tenant`: for itself; the lower of its own and the operators' holds.")
    tenant_id: str | None
    plan_id: str | None
    project_id: str | None
    key_id: str | None
    updated_at: datetime


class LimitList(Output):
    """All rules of one project or key, or of a tenant or plan itself."""

    items: list[LimitOut]


class BesideOut(Output):
    """What a rule of the same metric and model was, and became."""

    mode: ModeName
    before: int | str | None
    after: int | str | None


class LimitChangeOut(Output):
    """What a limit was, and became; null where there was none."""

    id: str
    changed_at: datetime
    actor_kind: str
    actor_id: str | None
    reason: str
    level: LevelName
    metric: MetricName
    mode: ModeName
    model: str
    set_by: AuthorName
    tenant_id: str | None
    plan_id: str | None
    project_id: str | None
    key_id: str | None
    before: int | str | None
    after: int | str | None
    reverts: str | None = Field(description="The change that this one undid.")
    beside: BesideOut | None = Field(description="The rule of another mode that the same change removed or put back.")


class LimitChangePage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[LimitChangeOut]
    next_after: str | None


class LimitRequestOut(Output):
    """What a tenant asked for, and the answer to it."""

    id: str
    tenant_id: str
    level: LevelName
    metric: MetricName
    model: str
    project_id: str | None
    key_id: str | None
    amount: int | str
    reason: str
    state: StateName
    asked_by_kind: str
    asked_by_id: str | None
    created_at: datetime
    decided_at: datetime | None
    note: str
    granted: int | str | None


class LimitRequestPage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[LimitRequestOut]
    next_after: str | None


class EffectiveOut(Output):
    """A limit as gateways enforce it, and where it comes from."""

    level: LevelName
    metric: MetricName
    amount: int | str
    mode: ModeName
    model: str
    source: str = Field(description="`plan`, `tenant` (for every project or key), `project` or `key`.")
    set_by: AuthorName
    limit_id: str
    met_24h: int = Field(
        description="Requests that met it in the last 24 hours: refused by a hard one, counted by a soft or dark one."
    )


class EffectiveList(Output):
    """All limits that a request must pass, narrowest level first."""

    items: list[EffectiveOut]


def _id(kind: IdKind, value: UUID | None) -> str | None:
    return None if value is None else format_id(kind, value)


def _amount(metric: LimitMetric, value: int | None) -> int | str | None:
    return None if value is None else limits.amount_out(metric, value)


def _actor_id(kind: str, value: UUID | None) -> str | None:
    named = _ACTOR_IDS.get(ActorKind(kind))
    return None if named is None else _id(named, value)


def limit_out(rule: LimitRule) -> LimitOut:
    slot = rule.slot
    return LimitOut(
        id=format_id(IdKind.LIMIT, rule.id),
        level=slot.level,
        metric=slot.metric,
        amount=limits.amount_out(slot.metric, rule.amount),
        mode=slot.mode,
        model=slot.model,
        set_by=slot.author,
        tenant_id=_id(IdKind.TENANT, slot.tenant_id),
        plan_id=_id(IdKind.PLAN, slot.plan_id),
        project_id=_id(IdKind.PROJECT, slot.project_id),
        key_id=_id(IdKind.API_KEY, slot.key_id),
        updated_at=rule.updated_at,
    )


def limit_list(rules: Sequence[LimitRule]) -> LimitList:
    return LimitList(items=[limit_out(rule) for rule in rules])


def change_out(change: LimitChange) -> LimitChangeOut:
    slot = change.slot
    return LimitChangeOut(
        id=format_id(IdKind.LIMIT_CHANGE, change.id),
        changed_at=change.changed_at,
        actor_kind=change.actor_kind,
        actor_id=_actor_id(change.actor_kind, change.actor_id),
        reason=change.reason,
        level=slot.level,
        metric=slot.metric,
        mode=slot.mode,
        model=slot.model,
        set_by=slot.author,
        tenant_id=_id(IdKind.TENANT, slot.tenant_id),
        plan_id=_id(IdKind.PLAN, slot.plan_id),
        project_id=_id(IdKind.PROJECT, slot.project_id),
        key_id=_id(IdKind.API_KEY, slot.key_id),
        before=_amount(slot.metric, change.before),
        after=_amount(slot.metric, change.after),
        reverts=_id(IdKind.LIMIT_CHANGE, change.reverts),
        beside=change.beside
        and BesideOut(
            mode=change.beside.mode,
            before=_amount(slot.metric, change.beside.before),
            after=_amount(slot.metric, change.beside.after),
        ),
    )


def change_page(changes: Sequence[LimitChange], next_after: UUID | None) -> LimitChangePage:
    return LimitChangePage(
        items=[change_out(change) for change in changes], next_after=_id(IdKind.LIMIT_CHANGE, next_after)
    )


def request_out(request: LimitRequest) -> LimitRequestOut:
    slot = request.slot
    return LimitRequestOut(
        id=format_id(IdKind.LIMIT_REQUEST, request.id),
        tenant_id=_id(IdKind.TENANT, slot.tenant_id) or "",
        level=slot.level,
        metric=slot.metric,
        model=slot.model,
        project_id=_id(IdKind.PROJECT, slot.project_id),
        key_id=_id(IdKind.API_KEY, slot.key_id),
        amount=limits.amount_out(slot.metric, request.amount),
        reason=request.reason,
        state=request.state,
        asked_by_kind=request.asked_by_kind,
        asked_by_id=_actor_id(request.asked_by_kind, request.asked_by_id),
        created_at=request.created_at,
        decided_at=request.decided_at,
        note=request.note,
        granted=_amount(slot.metric, request.granted),
    )


def request_page(requests: Sequence[LimitRequest], next_after: UUID | None) -> LimitRequestPage:
    return LimitRequestPage(
        items=[request_out(request) for request in requests], next_after=_id(IdKind.LIMIT_REQUEST, next_after)
    )


async def effective_of(
    session: AsyncSession, tenant_id: UUID, project_id: UUID, key_id: UUID | None, clock: Clock
) -> EffectiveList:
    """Return what holds for a key, or for a project's keys without limits of their own, and how often it was met."""
    found = await limits.effective(session, tenant_id, project_id, key_id)
    since = clock.now() - MET_SINCE
    met = await refusals.by_limit(session, tenant_id, since, project_id=project_id, key_id=key_id)
    return EffectiveList(items=[_effective(item, met) for item in found])


def _effective(item: Effective, met: Mapping[tuple[str, str, str, str], int]) -> EffectiveOut:
    limit, slot = item.limit, item.rule.slot
    stored = limit.amount * PICO_PER_NANO if limit.metric in SPENDS else limit.amount
    if slot.plan_id is not None:
        source = "plan"
    elif slot.project_id is None and slot.key_id is None:
        source = "tenant"
    else:
        source = "project" if slot.key_id is None else "key"
    return EffectiveOut(
        level=limit.level,
        metric=limit.metric,
        amount=limits.amount_out(limit.metric, stored),
        mode=limit.mode,
        model=limit.model,
        source=source,
        set_by=slot.author,
        limit_id=format_id(IdKind.LIMIT, item.rule.id),
        met_24h=met.get((limit.level.value, limit.metric.value, limit.model, limit.mode.value), 0),
    )


@dataclass(frozen=True, slots=True)
class LimitWork:
    """What a route works with that changes limits. `why` adds to a reason who changes them, and in which request."""

    session: AsyncSession
    act: Act
    why: Callable[[str], Why]


def get_limit_work(request: Request, session: Session, act: CurrentAct) -> LimitWork:
    actor = get_caller(request).actor(request_id_of(request))
    return LimitWork(session, act, lambda reason: Why(actor, reason, services_of(request).clock))


CurrentLimitWork = Annotated[LimitWork, Depends(get_limit_work, scope="function")]
RemovalReason = Annotated[str, Query(alias="reason", min_length=1, max_length=500, description="Why.")]
LimitId = Annotated[UUID, path_id(IdKind.LIMIT, "limit_id")]
LimitChangeId = Annotated[UUID, path_id(IdKind.LIMIT_CHANGE, "limit_change_id")]
LimitRequestId = Annotated[UUID, path_id(IdKind.LIMIT_REQUEST, "limit_request_id")]


class Keeper(Protocol):
    """Who keeps limits: `tenants.limits` for operators, `tenants.own_limits` for a tenant's own."""

    async def set_limit(
        self, session: AsyncSession, slot: LimitSlot, amount: int, why: Why, *, replaces: LimitMode | None = None
    ) -> tuple[LimitRule, int | None]: ...

    async def remove(self, session: AsyncSession, rule: LimitRule, why: Why) -> None: ...

    async def revert(self, session: AsyncSession, change: LimitChange, why: Why, *, force: bool) -> LimitChange: ...


async def put(work: LimitWork, keeper: Keeper, slot: LimitSlot, body: LimitIn) -> LimitOut:
    """Set a limit as the body says."""
    amount = limits.parse_amount(body.metric, body.amount)
    rule, before = await keeper.set_limit(work.session, slot, amount, work.why(body.reason), replaces=body.replaces)
    _note(work.act, rule, before, rule.amount, body.reason)
    return limit_out(rule)


async def take_away(work: LimitWork, keeper: Keeper, rule: LimitRule, reason: str) -> LimitOut:
    """Remove a limit; return what it was."""
    await keeper.remove(work.session, rule, work.why(reason))
    _note(work.act, rule, rule.amount, None, reason)
    return limit_out(rule)


async def undo(work: LimitWork, keeper: Keeper, change: LimitChange, body: RevertIn) -> LimitChangeOut:
    """Put back what a change replaced."""
    done = await keeper.revert(work.session, change, work.why(body.reason), force=body.force)
    work.act.on(done.id, reverts=format_id(IdKind.LIMIT_CHANGE, change.id), **because(body.reason))
    return change_out(done)


def _note(act: Act, rule: LimitRule, before: int | None, after: int | None, reason: str) -> None:
    """Put a change of a limit into the audit record."""
    slot = rule.slot
    act.on(
        rule.id,
        level=slot.level.value,
        metric=slot.metric.value,
        mode=slot.mode.value,
        model=slot.model,
        before=_amount(slot.metric, before),
        after=_amount(slot.metric, after),
        reason=reason,
    )


async def slot_of(session: AsyncSession, body: LimitIn, level: LimitLevel) -> LimitSlot:
    """Return what the body is about, without whose it is; a model by any of its names becomes its own name."""
    model = await models.own_name(session, body.model) if body.model else ""
    return LimitSlot(level, body.metric, body.mode, model)
