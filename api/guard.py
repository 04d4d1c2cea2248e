"""The control plane's door: every route authenticates and authorises by `api.permissions` before it reads a body."""

import ipaddress
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from api.permissions import CallerKind, Rule, rule_of
from api.services import Services, services_of
from core.db import transaction
from core.errors import ErrorKind, PlatformError
from core.logging import bind_contextvars
from tenants import api_keys, operators, principals
from tenants.credentials import digest
from tenants.types import Actor, ActorKind, Operator, Principal

BODY_MAX_BYTES = 1_000_000
_FORBIDDEN_REFUSALS = frozenset({"TENANT_SUSPENDED", "PROJECT_SUSPENDED"})
_REFUSALS = {
    "KEY_REVOKED": "This API key was revoked.",
    "KEY_EXPIRED": "This API key has expired.",
    "TENANT_SUSPENDED": "This account is suspended.",
    "PROJECT_SUSPENDED": "The project of this API key is suspended.",
}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: nobody known, a tenant's key, or an operator. Exactly what the route's rule allows."""

    principal: Principal | None = None
    operator: Operator | None = None

    def actor(self, request_id: str) -> Actor:
        if self.operator is not None:
            return Actor(ActorKind.OPERATOR, self.operator.id, request_id)
        if self.principal is not None:
            return Actor(ActorKind.API_KEY, self.principal.key_id, request_id)
        return Actor(ActorKind.SYSTEM, None, request_id)

    @property
    def tenant_id(self) -> UUID:
        """The tenant of the key; only for routes whose rule is a tenant's."""
        if self.principal is None:
            raise LookupError("this route's caller is no tenant")
        return self.principal.tenant_id


def _unauthenticated(message: str, code: str = "INVALID_API_KEY") -> PlatformError:
    return PlatformError(code, ErrorKind.UNAUTHENTICATED, message)


def _forbidden(message: str, code: str = "FORBIDDEN") -> PlatformError:
    return PlatformError(code, ErrorKind.FORBIDDEN, message)


def _bearer(request: Request) -> str:
    scheme, _, credential = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not credential.strip():
        raise _unauthenticated("This route needs a credential. Send `Authorization: Bearer …`.")
    return credential.strip()


async def _operator(services: Services, token: str) -> Operator:
    async with transaction(services.sessions) as session:
        found = await operators.find(session, digest(services.pepper, token))
    if found is None:
        raise _unauthenticated("This operator token is not valid.")
    return found


async def _principal(services: Services, key: str) -> Principal:
    async with transaction(services.sessions) as session:
        found = await principals.find(session, digest(services.pepper, key))
    if found is None:
        raise _unauthenticated("This API key is not valid.")
    if found.refusal in _FORBIDDEN_REFUSALS:
        raise _forbidden(_REFUSALS[found.refusal], found.refusal)
    if found.refusal:
        raise _unauthenticated(_REFUSALS[found.refusal], found.refusal)
    return found


def _check_network(request: Request, principal: Principal) -> None:
    if not principal.allowed_networks:
        return
    host = request.client.host if request.client is not None else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is None or not any(address in ipaddress.ip_network(net) for net in principal.allowed_networks):
        raise _forbidden("This API key may not be used from this network.", "NETWORK_NOT_ALLOWED")


async def authorise(request: Request, rule: Rule) -> Caller:
    """Return who calls, when the rule allows it.

    Raises:
        PlatformError: unauthenticated without a valid credential, forbidden with one of the wrong kind or scope.
    """
    if rule.caller is CallerKind.PUBLIC:
        return Caller()
    services = services_of(request)
    credential = _bearer(request)
    if operators.well_formed(credential):
        operator = await _operator(services, credential)
        if rule.caller is not CallerKind.OPERATOR:
            raise _forbidden("An operator token cannot act for a tenant. Use one of the tenant's API keys.")
        bind_contextvars(operator_id=operator.id.hex)
        return Caller(operator=operator)
    if api_keys.well_formed(credential):
        principal = await _principal(services, credential)
        if rule.caller is not CallerKind.TENANT:
            raise _forbidden("An API key cannot do operators' work. Use an operator token.")
        _check_network(request, principal)
        if rule.scope is not None and rule.scope not in principal.scopes:
            raise _forbidden(f"This API key lacks the scope {rule.scope.value}.", "SCOPE_MISSING")
        bind_contextvars(tenant_id=principal.tenant_id.hex, key_id=principal.key_id.hex)
        return Caller(principal=principal)
    raise _unauthenticated("This is neither an API key (tg_…) nor an operator token (tgo_…): check for a typo.")


def _too_large() -> PlatformError:
    return PlatformError("BODY_TOO_LARGE", ErrorKind.TOO_LARGE, f"The body is larger than {BODY_MAX_BYTES:,} bytes.")


async def _with_bounded_body(request: Request) -> Request:
    """Read the body up to the limit, and return a request that has it."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:19]) > BODY_MAX_BYTES:
        raise _too_large()
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_MAX_BYTES:
            raise _too_large()
    message: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}

    async def receive() -> Message:
        nonlocal message
        first, message = message, None
        return await request.receive() if first is None else first

    return Request(request.scope, receive)


class GuardedRoute(APIRoute):
    """A route that knows its rule, and asks it before the body is read or any parameter is looked at."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(path, endpoint, **kwargs)
        self.rules = {method: rule_of(method, self.path_format) for method in self.methods or ()}

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            rule = self.rules[request.method]
            request.state.rule = rule
            request.state.caller = await authorise(request, rule)
            return await handle(await _with_bounded_body(request))

        return guarded
