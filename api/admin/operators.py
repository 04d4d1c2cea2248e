"""Operators: themselves, and their tokens. A token is in the answer of its making and nowhere else."""

from datetime import datetime

from fastapi import APIRouter
from pydantic import Field

from api.deps import (
    CurrentAct,
    CurrentCaller,
    CurrentPaging,
    CurrentServices,
    CurrentWork,
    OperatorId,
    ReadSession,
    Session,
    changed,
    responsible_of,
)
from api.guard import GuardedRoute
from api.permissions import ADMIN, OPERATOR
from api.schemas import Input, Instant, Name, OperatorRoleName, Output, problems
from core.ids import IdKind, format_id
from core.pagination import page_of
from tenants import operators, vouching
from tenants.errors import invalid
from tenants.types import Operator, OperatorRole

router = APIRouter(route_class=GuardedRoute, tags=["operators"])


class OperatorIn(Input):
    """A new operator, a program's: it can do nothing without a token; who issues one answers for it."""

    name: Name
    role: OperatorRoleName = OperatorRole.ADMIN


class OperatorChange(Input):
    """The new role."""

    role: OperatorRoleName


class TokenIn(Input):
    """A new token; without an end it is valid until revoked."""

    expires_at: Instant | None = None


class OperatorOut(Output):
    """An operator."""

    id: str
    name: str
    role: OperatorRoleName
    person_id: str | None = Field(description="Who signs in as this operator.")
    vouched_by: str | None = Field(description="Who answers for this person until they are confirmed.")
    confirmed_at: datetime | None = Field(description="Since when it is known that this is a person of their own.")
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
        role=operator.role,
        person_id=operator.person_id and format_id(IdKind.PERSON, operator.person_id),
        vouched_by=operator.vouched_by and format_id(IdKind.PERSON, operator.vouched_by),
        confirmed_at=operator.confirmed_at,
        created_at=operator.created_at,
        disabled_at=operator.disabled_at,
    )


@router.post(f"{ADMIN}/operators", status_code=201, summary="Create an operator", responses=problems(409))
async def create_operator(body: OperatorIn, session: Session, act: CurrentAct) -> OperatorOut:
    operator = await operators.create(session, name=body.name, role=body.role)
    act.on(operator.id, name=operator.name, role=operator.role)
    return _out(operator)


@router.get(f"{ADMIN}/operators", summary="List operators")
async def list_operators(session: ReadSession, paging: CurrentPaging) -> OperatorPage:
    found = await operators.list_operators(session, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda operator: operator.id)
    return OperatorPage(
        items=[_out(operator) for operator in page.items],
        next_after=page.next_after and format_id(IdKind.OPERATOR, page.next_after),
    )


@router.patch(OPERATOR, summary="Change an operator's role", responses=problems(409))
async def update_operator(
    operator_id: OperatorId, body: OperatorChange, session: Session, act: CurrentAct
) -> OperatorOut:
    """Give an operator, and all tokens of it, another role at once. The last one with every right keeps it."""
    before, after = await operators.change_role(session, operator_id, body.role)
    act.on(operator_id, **changed(_out(before), _out(after)))
    return _out(after)


@router.post(f"{OPERATOR}/tokens", status_code=201, summary="Issue an operator token")
async def issue_token(  # noqa: PLR0917 - each is what a route is given
    operator_id: OperatorId,
    body: TokenIn,
    session: Session,
    act: CurrentAct,
    services: CurrentServices,
    caller: CurrentCaller,
) -> TokenCreated:
    """Give an operator a token. It is shown here once; who issues it answers for what it does.

    403 `NOT_YOUR_OPERATOR`: nobody issues a token of another person's operator.
    """
    if body.expires_at is not None and body.expires_at <= services.clock.now():
        raise invalid("expires_at", "The token would have expired already.")
    issuer = None if caller.operator is None else vouching.who(caller.operator, caller.signed_in)
    token = await operators.issue_token(
        session, operator_id, pepper=services.pepper, expires_at=body.expires_at, issued_by=issuer
    )
    act.on(operator_id)
    return TokenCreated(token=token)


@router.post(f"{OPERATOR}/tokens/revoke", status_code=204, summary="Revoke all tokens of an operator")
async def revoke_tokens(operator_id: OperatorId, session: Session, act: CurrentAct) -> None:
    """End every token of an operator at once, e.g. after a leak; issue a new one afterwards."""
    await operators.revoke_tokens(session, operator_id)
    act.on(operator_id)


@router.post(f"{OPERATOR}/confirm", summary="Confirm that an operator is a person", responses=problems(403, 409))
async def confirm_operator(operator_id: OperatorId, work: CurrentWork) -> OperatorOut:
    """Say that you know this person, and that the account is theirs. Only then they decide on money above the limit.

    It takes a confirmed person, signed in with the own password, other than who invited them. Where nobody answers for
    them, the first who says so does, and a second confirms. Repeating is harmless.
    """
    by = await responsible_of(work)
    await vouching.confirm(work.session, operator_id, by, now=work.services.clock.now())
    operator = await operators.get(work.session, operator_id)
    work.act.on(operator_id, confirmed=operator.confirmed_at is not None)
    return _out(operator)


@router.post(f"{OPERATOR}/disable", summary="Lock an operator out for good")
async def disable_operator(
    operator_id: OperatorId, session: Session, act: CurrentAct, services: CurrentServices
) -> OperatorOut:
    """Refuse an operator and all its tokens from now on. Repeating is harmless."""
    operator = await operators.disable(session, operator_id, clock=services.clock)
    act.on(operator_id)
    return _out(operator)
