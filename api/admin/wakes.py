"""Operators: how often a deployment's engines were started, why, and what took how long."""

from datetime import datetime

from fastapi import APIRouter
from pydantic import Field

from api.deps import CurrentPaging, DeploymentId, ReadSession
from api.guard import GuardedRoute
from api.permissions import ADMIN
from api.schemas import Output
from catalog import deployments, observed
from catalog.types import Wake
from core.ids import IdKind, format_id
from core.pagination import page_in_memory

router = APIRouter(route_class=GuardedRoute, tags=["deployments"])


class WakeOut(Output):
    """One start of an engine, by phase in milliseconds."""

    id: str
    replica: int = Field(description="Which of the deployment's replicas, counted from 0.")
    cause: str = Field(description="call (somebody called while it slept), floor (min_scale), load or crash.")
    outcome: str = Field(description="ready, failed or ended.")
    woken_at: datetime = Field(description="When it was first wished for.")
    decide_ms: int = Field(description="From the wish to the controller's decision.")
    fetch_ms: int = Field(description="Until the weights were on the host.")
    schedule_ms: int = Field(description="From the decision to a process, but for the fetch.")
    load_ms: int | None = Field(description="From the process to ready; null when it never was.")
    first_token_ms: int | None = Field(
        description="From being let go to the first token of a caller that was held and streams; null: none was."
    )
    ready_ms: int | None = Field(description="From the wish to ready: what the estimate goes by.")
    held: int = Field(description="Callers that were held when it ended, over all gateways.")
    attempts: int
    reason: str


class WakePage(Output):
    """Newest first; `next_after` is null at the end. The last 200 of a deployment are kept."""

    items: list[WakeOut]
    next_after: str | None


def _out(wake: Wake) -> WakeOut:
    return WakeOut(
        id=format_id(IdKind.WAKE, wake.id),
        replica=wake.index,
        cause=wake.cause.value,
        outcome=wake.outcome.value,
        woken_at=wake.woken_at,
        decide_ms=wake.decide_ms,
        fetch_ms=wake.fetch_ms,
        schedule_ms=wake.schedule_ms,
        load_ms=wake.load_ms,
        first_token_ms=wake.first_token_ms,
        ready_ms=wake.ready_ms,
        held=wake.held,
        attempts=wake.attempts,
        reason=wake.reason,
    )


@router.get(f"{ADMIN}/deployments/{{deployment_id}}/wakes", summary="List the starts of a deployment's engines")
async def list_wakes(deployment_id: DeploymentId, session: ReadSession, paging: CurrentPaging) -> WakePage:
    """Of each start: why, what became of it, and how long each phase took."""
    await deployments.get(session, deployment_id)
    found = await observed.list_wakes(session, deployment_id)
    page = page_in_memory(found, paging.after, paging.limit, lambda wake: wake.id)
    return WakePage(
        items=[_out(wake) for wake in page.items],
        next_after=page.next_after and format_id(IdKind.WAKE, page.next_after),
    )
