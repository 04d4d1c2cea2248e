"""Operators: rate usage again after a wrong price. Asked for and counted, then executed, perhaps by somebody else."""

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Query, Response
from pydantic import Field

from api.adjustments import Why
from api.admin.credits import IdempotencyKey
from api.deps import CurrentPaging, CurrentWork, ReadSession, Work, path_id, responsible_of
from api.guard import GuardedRoute
from api.idempotency import REPLAYED_YES
from api.permissions import ADMIN, RERATING
from api.schemas import CurrencyCode, Input, Instant, Output, TierName, problems
from billing import rerating
from billing.rerating import Run, TenantPart, Wanted
from billing.types import Meter
from core.ids import IdKind, format_id, parse_id
from core.money import PICO_PER_UNIT, format_pico
from core.pagination import page_of
from core.tiers import Tier

router = APIRouter(route_class=GuardedRoute, tags=["prices"])

RunId = Annotated[UUID, path_id(IdKind.RERATING, "rerating_id")]
Id = Annotated[str, Field(max_length=64)]
MeterName = Annotated[Meter, Field(strict=False)]
TENANTS_DEFAULT = 50
TENANTS_MAX = 200


class RerateIn(Input):
    """Which usage is rated again, and at what. Without models, tiers or meters: all."""

    wrong_version_ids: list[Id] = Field(min_length=1, max_length=rerating.VERSIONS_MAX)
    right_version_id: Id
    since: Instant = Field(description="Usage admitted from this instant on.")
    until: Instant = Field(description="And before this one.")
    models: list[Id] = Field([], max_length=rerating.MODELS_MAX)
    tiers: list[TierName] = Field([], max_length=3)
    meters: list[MeterName] = Field([], max_length=len(Meter))
    charge_more: bool = Field(False, description="Also charge what was billed too low; else that is left as it is.")
    note: Why

    def wanted(self) -> Wanted:
        return Wanted(
            tuple(sorted({parse_id(IdKind.PRICE_VERSION, text) for text in self.wrong_version_ids})),
            parse_id(IdKind.PRICE_VERSION, self.right_version_id),
            self.since,
            self.until,
            tuple(sorted({parse_id(IdKind.MODEL, text) for text in self.models})),
            tuple(sorted({Tier[name.upper()] for name in self.tiers})),
            tuple(meter for meter in Meter if meter in self.meters),
            self.charge_more,
        )


class RerateFigures(Output):
    """What it means, by the count; then what it did, from `done_events` on."""

    requests: int = Field(description="At most so many, by the sums of minutes: more than events where some are gone.")
    events: int = Field(description="Events that stand at a wrong version.")
    credit: str = Field(description="What was paid too much.")
    charge: str = Field(description="What is charged more; 0 unless asked for.")
    uncharged: int = Field(description="Events that were billed too low and are left as they are.")
    uncharged_amount: str
    unpriced: int = Field(description="Events for which the right version has no price; they are left.")
    done_events: int
    credited: str
    given: str = Field(description="Of that, what went back to tenants: not what the platform bore or what expired.")
    charged: str
    overrun: str = Field(description="Of that, what exceeded the tenants' credit: the platform bears it.")


class RerateOut(RerateFigures):
    """A re-rating: `counting`, `counted`, `running`, then `done` or `cancelled`."""

    id: str
    state: Literal["counting", "counted", "running", "done", "cancelled"]
    needs_approval: bool = Field(description="Another person than who asked must execute it, or did.")
    currency: CurrencyCode
    wrong_version_ids: list[str]
    right_version_id: str
    since: datetime
    until: datetime
    models: list[str]
    tiers: list[str]
    meters: list[str]
    charge_more: bool
    note: str
    requested_by: str
    requested_at: datetime
    executed_by: str | None
    executed_at: datetime | None
    finished_at: datetime | None
    tenants: int


class RerateList(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[RerateOut]
    next_after: str | None


class RerateTenantOut(RerateFigures):
    """What it means for one tenant."""

    tenant_id: str
    counted: bool
    done: bool


class RerateTenants(Output):
    """Those to whom it means most first; `next_offset` is null at the end."""

    items: list[RerateTenantOut]
    next_offset: int | None


def _figures(found: Run | TenantPart) -> dict[str, int | str]:
    return {
        "requests": found.requests,
        "events": found.events,
        "credit": format_pico(found.credit_pico),
        "charge": format_pico(found.charge_pico),
        "uncharged": found.uncharged,
        "uncharged_amount": format_pico(found.uncharged_pico),
        "unpriced": found.unpriced,
        "done_events": found.done_events,
        "credited": format_pico(found.credited_pico),
        "given": format_pico(found.given_pico),
        "charged": format_pico(found.charged_pico),
        "overrun": format_pico(found.overrun_pico),
    }


def _out(run: Run) -> RerateOut:
    wanted = run.wanted
    return RerateOut.model_validate(
        {
            **_figures(run),
            "id": format_id(IdKind.RERATING, run.id),
            "state": run.state,
            "needs_approval": run.needs_approval,
            "currency": run.currency,
            "wrong_version_ids": [format_id(IdKind.PRICE_VERSION, one) for one in wanted.wrong],
            "right_version_id": format_id(IdKind.PRICE_VERSION, wanted.right),
            "since": wanted.since,
            "until": wanted.until,
            "models": [format_id(IdKind.MODEL, one) for one in wanted.models],
            "tiers": [tier.label for tier in wanted.tiers],
            "meters": [meter.value for meter in wanted.meters],
            "charge_more": wanted.charge_more,
            "note": run.note,
            "requested_by": format_id(IdKind.OPERATOR, run.requested_by),
            "requested_at": run.requested_at,
            "executed_by": run.executed_by and format_id(IdKind.OPERATOR, run.executed_by),
            "executed_at": run.executed_at,
            "finished_at": run.finished_at,
            "tenants": run.tenants,
        }
    )


def _told(work: Work, run: Run) -> RerateOut:
    answer = _out(run)
    work.act.on(run.id, state=run.state, note=run.note, credit=answer.credit, charge=answer.charge)
    return answer


@router.post(f"{ADMIN}/reratings", status_code=202, summary="Ask for a re-rating", responses=problems(400, 409))
async def ask_rerating(
    body: RerateIn, idempotency_key: IdempotencyKey, work: CurrentWork, response: Response
) -> RerateOut:
    """Count what rating usage again would do, without effect, once per idempotency key. Read it until it is counted."""
    now = work.services.clock.now()
    run = await rerating.ask(
        work.session,
        body.wanted(),
        by=await responsible_of(work),
        note=body.note,
        idempotency_key=idempotency_key,
        now=now,
    )
    if run.replayed:
        response.headers.update(REPLAYED_YES)
    return _told(work, run)


@router.get(f"{ADMIN}/reratings", summary="List re-ratings")
async def list_reratings(session: ReadSession, paging: CurrentPaging) -> RerateList:
    found = await rerating.search(session, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda run: run.id)
    after = None if page.next_after is None else format_id(IdKind.RERATING, page.next_after)
    return RerateList(items=[_out(run) for run in page.items], next_after=after)


@router.get(RERATING, summary="Read a re-rating and how far it is")
async def get_rerating(rerating_id: RunId, session: ReadSession) -> RerateOut:
    return _out(await rerating.get(session, rerating_id))


@router.get(f"{RERATING}/tenants", summary="Read what a re-rating means for each tenant")
async def list_rerating_tenants(
    rerating_id: RunId,
    session: ReadSession,
    offset: Annotated[int, Query(ge=0, le=1_000_000, description="`next_offset` of the page before.")] = 0,
    limit: Annotated[int, Query(ge=1, le=TENANTS_MAX)] = TENANTS_DEFAULT,
) -> RerateTenants:
    found = await rerating.tenants_of(session, rerating_id, offset=offset, limit=limit + 1)
    items = [
        RerateTenantOut.model_validate(
            {
                **_figures(part),
                "tenant_id": format_id(IdKind.TENANT, part.tenant_id),
                "counted": part.counted,
                "done": part.done,
            }
        )
        for part in found[:limit]
    ]
    return RerateTenants(items=items, next_offset=offset + limit if len(found) > limit else None)


@router.post(
    f"{RERATING}/execute", status_code=202, summary="Execute a counted re-rating", responses=problems(403, 409)
)
async def execute_rerating(rerating_id: RunId, work: CurrentWork) -> RerateOut:
    """Let the worker post it, batch by batch. Above the limit of one person, it takes another than who asked."""
    alone_max_pico = work.services.settings.books.adjust_alone_max * PICO_PER_UNIT
    now = work.services.clock.now()
    by = await responsible_of(work)
    run = await rerating.execute(work.session, rerating_id, by=by, alone_max_pico=alone_max_pico, now=now)
    return _told(work, run)


@router.post(f"{RERATING}/cancel", summary="Cancel a re-rating", responses=problems(409))
async def cancel_rerating(rerating_id: RunId, work: CurrentWork) -> RerateOut:
    """End it where it is. What it posted stays; another re-rating can put that right."""
    return _told(work, await rerating.cancel(work.session, rerating_id, now=work.services.clock.now()))
