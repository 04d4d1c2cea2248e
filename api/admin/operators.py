"""Operators: themselves, and their tokens. A token is in the answer of its making and nowhere else."""

from datetime import datetime

from fastapi import APIRouter
from pydantic import Field

from api.deps import CurrentAct, CurrentPaging, CurrentServices, OperatorId, ReadSession, Session
from api.guard import GuardedRoute
from api.permissions import ADMIN
from api.schemas import Input, Instant, Name, Output, problems
from core.ids import IdKind, format_id
from core.pagination import page_of
from tenants import operators
from tenants.errors import invalid
from tenants.types import Operator

router = APIRouter(route_class=GuardedRoute, tags=["operators"])

OPERATOR = f"{ADMIN}/operators/{{operator_id}}"


class OperatorIn(Input):
    """A new operator, who can do nothing without a token."""

    name: Name


class TokenIn(Input):
    """A new token; without an end it is valid until revoked."""

    expires_at: Instant | None = None


class OperatorOut(Output):
    """An operator."""

    id: str
    name: str
    created_at: datetime
    disabled_at: datetime | None


class OperatorPage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[OperatorOut]
    next_after: str | None


class TokenCreated(Output):
    """The only time the token is shown."""

    token: str = Field(description="`tgo_` and 46 characters. Keep it: it cannot be shown again.")


def _out(operator: Operator) -> OperatorOut:
    return OperatorOut(
        id=format_id(IdKind.OPERATOR, operator.id),
        name=operator.name,
        created_at=operator.created_at,
        disabled_at=operator.disabled_at,
    )


@router.post(f"{ADMIN}/operators", status_code=201, summary="Create an operator", responses=problems(409))
async def create_operator(body: OperatorIn, session: Session, act: CurrentAct) -> OperatorOut:
    operator = await operators.create(session, name=body.name)
    act.on(operator.id, name=operator.name)
    return _out(operator)


@router.get(f"{ADMIN}/operators", summary="List operators")
async def list_operators(session: ReadSession, paging: CurrentPaging) -> OperatorPage:
    found = await operators.list_operators(session, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda operator: operator.id)
    return OperatorPage(
        items=[_out(operator) for operator in page.items],
        next_after=page.next_after and format_id(IdKind.OPERATOR, page.next_after),
    )


@router.post(f"{OPERATOR}/tokens", status_code=201, summary="Issue an operator token")
async def issue_token(
    operator_id: OperatorId, body: TokenIn, session: Session, act: CurrentAct, services: CurrentServices
) -> TokenCreated:
    """Give an operator a token. It is shown here once."""
    if body.expires_at is not None and body.expires_at <= services.clock.now():
        raise invalid("expires_at", "The token would have expired already.")
    token = await operators.issue_token(session, operator_id, pepper=services.pepper, expires_at=body.expires_at)
    act.on(operator_id)
    return TokenCreated(token=token)


@router.post(f"{OPERATOR}/tokens/revoke", status_code=204, summary="Revoke all tokens of an operator")
async def revoke_tokens(operator_id: OperatorId, session: Session, act: CurrentAct) -> None:
    """End every token of an operator at once, e.g. after a leak; issue a new one afterwards."""
    await operators.revoke_tokens(session, operator_id)
    act.on(operator_id)


@router.post(f"{OPERATOR}/disable", summary="Lock an operator out for good")
async def disable_operator(
    operator_id: OperatorId, session: Session, act: CurrentAct, services: CurrentServices
) -> OperatorOut:
    """Refuse an operator and all its tokens from now on. Repeating is harmless."""
    operator = await operators.disable(session, operator_id, clock=services.clock)
    act.on(operator_id)
    return _out(operator)
