"""Tenants: their own balance and usage."""

from fastapi import APIRouter

from api.deps import CurrentCaller, CurrentServices, ReadSession
from api.guard import GuardedRoute
from api.money import Day, balance_of, usage_of
from api.schemas import BalanceOut, UsageOut, problems

router = APIRouter(route_class=GuardedRoute, tags=["your account"])


@router.get("/api/v1/balance", summary="Read your balance", responses=problems(404))
async def get_balance(caller: CurrentCaller, session: ReadSession) -> BalanceOut:
    return await balance_of(session, caller.tenant_id)


@router.get("/api/v1/usage", summary="Read your usage by day and model", responses=problems(400))
async def get_usage(
    caller: CurrentCaller, session: ReadSession, services: CurrentServices, start: Day = None, end: Day = None
) -> UsageOut:
    return await usage_of(session, caller.tenant_id, start, end, services.clock)
