"""What routes are given: a transaction that commits before the answer leaves, who calls, and a page's bounds."""

import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, Path, Query
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request

from api.errors import request_id_of
from api.guard import Caller
from api.idempotency import once_of
from api.permissions import AFTER_CLOSING, CallerKind, Rule
from api.schemas import Output
from api.services import Services, services_of
from core.db import transaction
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, parse_id
from core.logging import get_logger, guard
from core.pagination import LIMIT_DEFAULT, LIMIT_MAX
from tenants import audit, closing, vouching
from tenants.types import Actor, ActorKind, Responsible

log = get_logger(__name__)

AfterCommit = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Act:
    """What a changing route did, for the audit trail, and what must follow its commit before the answer leaves."""

    tenant_id: UUID | None = None
    target_id: UUID | None = None
    person_id: UUID | None = None
    details: dict[str, Any] = field(default_factory=dict)
    after_commit: list[AfterCommit] = field(default_factory=list)

    def by(self, person_id: UUID) -> None:
        """Name who did it, where the door cannot know: on the routes by which people sign in."""
        self.person_id = person_id

    def on(self, target_id: UUID, *, tenant_id: UUID | None = None, **details: Any) -> None:
        """Name what was changed. `details` hold ids and names, never a secret."""
        self.target_id = target_id
        self.tenant_id = tenant_id or self.tenant_id
        self.details.update(details)


def get_act(request: Request) -> Act:
    act: Act | None = getattr(request.state, "act", None)
    if act is None:
        text = request.path_params.get("tenant_id")
        act = request.state.act = Act(tenant_id=parse_id(IdKind.TENANT, text) if text else None)
    return act


def changed(before: Output, after: Output) -> dict[str, Any]:
    """Return the members that differ, each as ``{"from": …, "to": …}``: the details of a changed setting."""
    return differences(before.model_dump(mode="json"), after.model_dump(mode="json"))


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The same of plain values; one that is not there counts as null. What looks like a secret is hidden."""

    def shown(value: Any) -> Any:
        return guard(None, "", {"value": value})["value"]

    return {
        name: {"from": shown(before.get(name)), "to": shown(after.get(name))}
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    }


def client_ip_of(request: Request) -> str:
    """Return the caller's address as the front door saw it; empty when it did not say, or said nonsense."""
    try:
        return str(ipaddress.ip_address(request.client.host.partition("%")[0])) if request.client is not None else ""
    except ValueError:
        return ""


def get_caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def _actor(request: Request, act: Act) -> Actor:
    if act.person_id is not None:
        return Actor(ActorKind.PERSON, act.person_id, request_id_of(request))
    return get_caller(request).actor(request_id_of(request))


async def get_session(request: Request) -> AsyncIterator[AsyncSession]:
    """Open the one transaction of a changing request, with its audit record and, for repeats, its answer in it."""
    services, act, rule, once = services_of(request), get_act(request), _rule(request), once_of(request)
    if not rule.action:
        raise LookupError("a route that changes something needs an action in api/permissions.py")
    async with transaction(services.sessions) as session:
        if once is not None:
            await once.claim(session)
        if rule.caller is CallerKind.OPERATOR and rule.operator not in AFTER_CLOSING and act.tenant_id is not None:
            await closing.require_not_closed(session, act.tenant_id)
        yield session
        audit.record(
            session,
            replace(_actor(request, act), client_ip=client_ip_of(request)),
            rule.action,
            tenant_id=act.tenant_id,
            target_id=act.target_id,
            details=act.details,
        )
        if once is not None:
            await once.keep(session)
    for follow in act.after_commit:
        try:
            await follow()
        except Exception as error:  # noqa: BLE001 - it is committed; what follows is made good by the worker
            log.warning("request.follow_up_failed", error=type(error).__name__)


async def get_read_session(request: Request) -> AsyncIterator[AsyncSession]:
    """Open a read-only transaction: Postgres itself refuses a write."""
    async with transaction(services_of(request).sessions) as session:
        await session.connection(execution_options={"postgresql_readonly": True})
        yield session


def _rule(request: Request) -> Rule:
    rule: Rule = request.state.rule
    return rule


# scope="function": the transaction ends before the answer is sent, so a 201 is a committed 201.
Session = Annotated[AsyncSession, Depends(get_session, scope="function")]
ReadSession = Annotated[AsyncSession, Depends(get_read_session, scope="function")]
CurrentAct = Annotated[Act, Depends(get_act)]
CurrentCaller = Annotated[Caller, Depends(get_caller)]
CurrentServices = Annotated[Services, Depends(services_of)]


@dataclass(frozen=True, slots=True)
class Work:
    """What a changing route works with, in one."""

    session: AsyncSession
    act: Act
    services: Services
    caller: Caller


async def responsible_of(work: Work) -> Responsible:
    """Return the operator who calls, and the people who answer for it; only for routes whose rule is an operator's."""
    operator = work.caller.operator
    if operator is None:
        raise PlatformError("FORBIDDEN", ErrorKind.FORBIDDEN, "An operator is needed for this.")
    return await vouching.responsible(work.session, operator, work.caller.signed_in)


def get_work(session: Session, act: CurrentAct, services: CurrentServices, caller: CurrentCaller) -> Work:
    return Work(session, act, services, caller)


CurrentWork = Annotated[Work, Depends(get_work, scope="function")]


def path_id(kind: IdKind, name: str) -> Any:
    example = f"{kind.value}_019a0000000070008000000000000001"

    async def parse(text: Annotated[str, Path(alias=name, max_length=64, examples=[example])]) -> UUID:
        return parse_id(kind, text)

    return Depends(parse)


TenantId = Annotated[UUID, path_id(IdKind.TENANT, "tenant_id")]
ProjectId = Annotated[UUID, path_id(IdKind.PROJECT, "project_id")]
OperatorId = Annotated[UUID, path_id(IdKind.OPERATOR, "operator_id")]
IdentityProviderId = Annotated[UUID, path_id(IdKind.IDENTITY_PROVIDER, "identity_provider_id")]
KeyId = Annotated[UUID, path_id(IdKind.API_KEY, "key_id")]
BookId = Annotated[UUID, path_id(IdKind.PRICE_BOOK, "book_id")]
PriceVersionId = Annotated[UUID, path_id(IdKind.PRICE_VERSION, "price_version_id")]
ModelId = Annotated[UUID, path_id(IdKind.MODEL, "model_id")]
VersionId = Annotated[UUID, path_id(IdKind.MODEL_VERSION, "version_id")]
IntakeId = Annotated[UUID, path_id(IdKind.MODEL_INTAKE, "intake_id")]
DeploymentId = Annotated[UUID, path_id(IdKind.DEPLOYMENT, "deployment_id")]
PersonId = Annotated[UUID, path_id(IdKind.PERSON, "person_id")]
MemberId = Annotated[UUID, path_id(IdKind.MEMBER, "member_id")]
InviteId = Annotated[UUID, path_id(IdKind.INVITE, "invite_id")]
ServiceAccountId = Annotated[UUID, path_id(IdKind.SERVICE_ACCOUNT, "service_account_id")]
SessionId = Annotated[UUID, path_id(IdKind.SESSION, "session_id")]
AdjustmentId = Annotated[UUID, path_id(IdKind.ADJUSTMENT, "adjustment_id")]
TransactionId = Annotated[UUID, path_id(IdKind.TRANSACTION, "transaction_id")]
GenerationId = Annotated[UUID, path_id(IdKind.GENERATION, "generation_id")]


@dataclass(frozen=True, slots=True)
class Paging:
    """At most `limit` items, those after the id `after`."""

    limit: int
    after: UUID | None

    @property
    def limit_probe(self) -> int:
        """One more than asked, to know whether there is a next page."""
        return self.limit + 1


def get_paging(
    limit: Annotated[int, Query(ge=1, le=LIMIT_MAX, description="Most items to return.")] = LIMIT_DEFAULT,
    after: Annotated[str | None, Query(max_length=64, description="`next_after` of the page before.")] = None,
) -> Paging:
    if after is None:
        return Paging(limit, None)
    try:
        return Paging(limit, UUID(hex=after.rpartition("_")[2]))
    except ValueError:
        message = "This is not the `next_after` of a page."
        raise PlatformError("INVALID_REQUEST", ErrorKind.INVALID, message, param="after") from None


CurrentPaging = Annotated[Paging, Depends(get_paging)]
