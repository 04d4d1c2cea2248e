"""Operators: usage that was kept from billing, and what is done with it."""

from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from pydantic import Field

from api.adjustments import Why
from api.admin.asking import asked_by
from api.deps import CurrentWork, GenerationId, ReadSession, TenantId, Work, responsible_of
from api.guard import GuardedRoute
from api.permissions import ADMIN, QUARANTINED
from api.schemas import CurrencyCode, Input, Output, TierName, problems
from billing import adjustments, credit_figures, quarantine
from billing.adjustment_kinds import BilledUsage
from billing.credits import balance
from billing.quarantine import TOKENS_MAX, Estimate, Item, QuarantineState
from billing.tasks import ask_refresh
from core.ids import IdKind, format_id, parse_id
from core.money import format_pico
from core.pagination import LIMIT_DEFAULT, LIMIT_MAX
from core.usage import TokenUsage

router = APIRouter(route_class=GuardedRoute, tags=["credit and usage"])

Tokens = Annotated[int, Field(ge=0, le=TOKENS_MAX)]
StateName = Literal["waiting", "billed", "dismissed"]


class TokenCountsIn(Input):
    """Token counts that do not overlap: every token is in one part."""

    input_uncached: Tokens = 0
    input_cached: Tokens = 0
    input_cache_write: Tokens = 0
    output: Tokens = 0
    reasoning: Tokens = 0


class BillIn(Input):
    """The counts that are billed instead of those that came, and why."""

    usage: TokenCountsIn
    reason: Why


class DismissIn(Input):
    """Why it is never billed."""

    reason: Why


class TokenCountsOut(Output):
    """Token counts as they came; a negative one is why it is here."""

    input_uncached: int
    input_cached: int
    input_cache_write: int
    output: int
    reasoning: int


class DecisionOut(Output):
    """Who decided what, and why. `billed_as` is the generation id under which it was billed."""

    reason: str
    decided_by: str
    decided_at: datetime
    billed_as: str | None


class QuarantinedOut(Output):
    """Usage that was kept from billing."""

    id: str
    tenant_id: str
    project_id: str
    key_id: str
    state: StateName
    reason: str
    model: str
    tier: TierName
    outcome: str
    currency: CurrencyCode
    rated: str = Field(description="What the gateway made of it; nobody was charged.")
    admitted_at: datetime
    quarantined_at: datetime
    decision: DecisionOut | None


class QuarantinedDetail(QuarantinedOut):
    """The same with what came from the engine, and what that would be billed."""

    price_version_id: str
    usage: TokenCountsOut
    raw_usage: str = Field(description="The engine's own usage object, where it was the trouble.")
    would_be: str | None = Field(description="What the counts as they came would be billed.")
    would_be_problem: str = Field(description="Why that cannot be said.")
    waiting: str | None = Field(None, description="A bill of it, on which a second person has to decide.")


class QuarantinePage(Output):
    """Quarantined usage, what waits longest first."""

    items: list[QuarantinedOut]
    next_after: int | None


def _decision(item: Item) -> DecisionOut | None:
    if item.decision is None:
        return None
    billed_as = item.decision.event_id
    return DecisionOut(
        reason=item.decision.reason,
        decided_by=format_id(IdKind.OPERATOR, item.decision.by),
        decided_at=item.decision.at,
        billed_as=None if billed_as is None else format_id(IdKind.GENERATION, billed_as),
    )


def _shown(item: Item) -> QuarantinedOut:
    event = item.event
    return QuarantinedOut(
        id=format_id(IdKind.GENERATION, item.id),
        tenant_id=format_id(IdKind.TENANT, item.tenant_id),
        project_id=format_id(IdKind.PROJECT, event.project_id),
        key_id=format_id(IdKind.API_KEY, event.key_id),
        state=item.state.value,
        reason=item.reason,
        model=event.model,
        tier=event.tier.label,
        outcome=event.outcome.value,
        currency=event.currency.value,
        rated=format_pico(event.amount_pico),
        admitted_at=item.admitted_at,
        quarantined_at=item.quarantined_at,
        decision=_decision(item),
    )


def _detail(item: Item, estimate: Estimate) -> QuarantinedDetail:
    counts = item.event.usage
    return QuarantinedDetail(
        **_shown(item).model_dump(),
        price_version_id=format_id(IdKind.PRICE_VERSION, item.event.price_version_id),
        usage=TokenCountsOut(
            input_uncached=counts.input_uncached,
            input_cached=counts.input_cached,
            input_cache_write=counts.input_cache_write,
            output=counts.output,
            reasoning=counts.reasoning,
        ),
        raw_usage=item.raw_usage,
        would_be=None if estimate.amount_pico is None else format_pico(estimate.amount_pico),
        would_be_problem=estimate.problem,
    )


@router.get(f"{ADMIN}/quarantine", summary="List usage that was kept from billing")
async def list_quarantine(
    *,
    session: ReadSession,
    tenant_id: Annotated[str | None, Query(max_length=64, description="Only this tenant's.")] = None,
    state: Annotated[StateName | None, Query(description="Only in this state.")] = None,
    model: Annotated[str | None, Query(max_length=200, description="Only of this model, by its name.")] = None,
    reason: Annotated[str | None, Query(max_length=200, description="Only with this in the reason.")] = None,
    limit: Annotated[int, Query(ge=1, le=LIMIT_MAX, description="Most items to return.")] = LIMIT_DEFAULT,
    after: Annotated[int, Query(ge=0, lt=2**63, description="`next_after` of the page before.")] = 0,
) -> QuarantinePage:
    found = await quarantine.search(
        session,
        None if tenant_id is None else parse_id(IdKind.TENANT, tenant_id),
        state=None if state is None else QuarantineState(state),
        model=model,
        reason=reason,
        after=after,
        limit=limit + 1,
    )
    items = found[:limit]
    return QuarantinePage(items=[_shown(item) for item in items], next_after=items[-1].seq if found[limit:] else None)


@router.get(QUARANTINED, summary="Read usage that was kept from billing")
async def get_quarantined(tenant_id: TenantId, generation_id: GenerationId, session: ReadSession) -> QuarantinedDetail:
    item = await quarantine.get(session, tenant_id, generation_id)
    return _detail(item, await quarantine.estimate(session, item))


_BILLED = {
    **problems(403, 409),
    202: {"model": QuarantinedDetail, "description": "A second person has to decide: it is above the limit."},
}


async def _decided(work: Work, item: Item, **details: object) -> QuarantinedDetail:
    decision = item.decision
    reason = "" if decision is None else decision.reason
    work.act.on(item.id, tenant_id=item.tenant_id, state=item.state.value, reason=reason, **details)
    await ask_refresh(work.session, item.tenant_id)

    async def settle() -> None:
        async with work.services.sessions() as session:
            now = await balance(session, item.tenant_id)
        await credit_figures.settle(work.services.valkey, item.tenant_id, now, [item.id])

    work.act.after_commit.append(settle)
    return _detail(item, await quarantine.estimate(work.session, item))


@router.post(f"{QUARANTINED}/bill", summary="Bill quarantined usage with corrected counts", responses=_BILLED)
async def bill_quarantined(
    tenant_id: TenantId, generation_id: GenerationId, body: BillIn, work: CurrentWork, response: Response
) -> QuarantinedDetail:
    """Rate these counts at the price version frozen at admission, and post them, once and for good.

    It counts to what one person does alone in 24 hours; above that the answer is 202, and it waits for a second person.
    """
    usage = TokenUsage(**body.usage.model_dump())
    asked = await asked_by(work, body.reason)
    done = await adjustments.bill(work.session, tenant_id, BilledUsage(generation_id, usage), asked)
    item = await quarantine.get(work.session, tenant_id, generation_id)
    if done.state == "pending":
        response.status_code = 202
        waiting = format_id(IdKind.ADJUSTMENT, done.id)
        work.act.on(item.id, tenant_id=tenant_id, waits=waiting, reason=body.reason, usage=body.usage.model_dump())
        answer = _detail(item, await quarantine.estimate(work.session, item))
        return answer.model_copy(update={"waiting": waiting})
    billed_as = "" if item.decision is None or item.decision.event_id is None else item.decision.event_id.hex
    return await _decided(work, item, usage=body.usage.model_dump(), billed_as=billed_as)


@router.post(f"{QUARANTINED}/dismiss", summary="Never bill quarantined usage", responses=problems(409))
async def dismiss_quarantined(
    tenant_id: TenantId, generation_id: GenerationId, body: DismissIn, work: CurrentWork
) -> QuarantinedDetail:
    """Give back what may still be held for it; nobody is charged."""
    now, by = work.services.clock.now(), await responsible_of(work)
    await adjustments.require_undecided(work.session, tenant_id, generation_id)
    item = await quarantine.dismiss(
        work.session, tenant_id, generation_id, reason=body.reason, by=by.operator_id, now=now
    )
    return await _decided(work, item)
