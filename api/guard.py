"""The control plane's door: every route authenticates and authorises by `api.permissions` before it reads a body."""

import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from api import idempotency, networks
from api.permissions import CallerKind, Rule, rule_of
from api.services import Services, services_of
from core.db import transaction
from core.errors import ErrorKind, PlatformError
from core.idempotency import HEADER
from core.ids import IdKind, parse_id
from core.logging import bind_contextvars
from tenants import api_keys, closing, members, operators, principals, provider_sessions, sessions
from tenants.errors import not_found
from tenants.roles import OPERATOR_PERMISSIONS, Rights
from tenants.types import Actor, ActorKind, Operator, Principal, Scope, SignedIn, SignInMethod

BODY_MAX_BYTES = 1_000_000
PART_MAX_BYTES = 8_388_608  # of weights; what the front lets through is 10 MB
COOKIE = "tidegate_session"
CSRF_HEADER = "x-csrf-token"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # as JSON writes it; Postgres has no such text
_OWN_PAGES = frozenset({"same-origin", "none"})  # of Sec-Fetch-Site: ours, or typed by the person
_UNAUTHENTICATED_REFUSALS = frozenset({"KEY_REVOKED", "KEY_EXPIRED"})
_REFUSALS = {
    "KEY_REVOKED": "This API key was revoked.",
    "KEY_EXPIRED": "This API key has expired.",
    "KEY_SUSPENDED": "This API key is suspended.",
    "OWNER_SUSPENDED": "The owner of this API key is suspended or no member any more.",
    "TENANT_CLOSED": "This account is closed.",
    "TENANT_SUSPENDED": "This account is suspended.",
    "PROJECT_SUSPENDED": "The project of this API key is suspended.",
}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: nobody known, a key, a person who signed in, or an operator. Exactly what the route's rule allows.

    `rights` are the member's in the tenant of the path. `token` is the session's, for whoever ends or renews it.
    """

    principal: Principal | None = None
    operator: Operator | None = None
    signed_in: SignedIn | None = None
    rights: Rights = field(default_factory=Rights)
    token: str = ""

    def actor(self, request_id: str) -> Actor:
        if self.operator is not None:
            return Actor(ActorKind.OPERATOR, self.operator.id, request_id)
        if self.signed_in is not None:
            return Actor(ActorKind.PERSON, self.signed_in.person.id, request_id)
        if self.principal is not None:
            return Actor(ActorKind.API_KEY, self.principal.key_id, request_id)
        return Actor(ActorKind.SYSTEM, None, request_id)

    @property
    def tenant_id(self) -> UUID:
        """The tenant of the key; only for routes whose rule is a key's."""
        if self.principal is None:
            raise LookupError("this route's caller is no key")
        return self.principal.tenant_id

    @property
    def person_id(self) -> UUID:
        """The person who signed in; only for routes whose rule is a person's."""
        return self.own.person.id

    @property
    def own(self) -> SignedIn:
        """The session; only for routes whose rule is a person's."""
        if self.signed_in is None:
            raise LookupError("this route's caller is no person")
        return self.signed_in


def _unauthenticated(message: str, code: str = "INVALID_API_KEY") -> PlatformError:
    return PlatformError(code, ErrorKind.UNAUTHENTICATED, message)


def _forbidden(message: str, code: str = "FORBIDDEN") -> PlatformError:
    return PlatformError(code, ErrorKind.FORBIDDEN, message)


def _bearer(request: Request) -> str:
    scheme, _, credential = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not credential.strip():
        raise _unauthenticated("This route needs a credential. Send `Authorization: Bearer …`, or sign in.")
    return credential.strip()


async def _operator(services: Services, token: str) -> Operator:
    async with transaction(services.sessions) as session:
        found = await operators.find(session, services.peppers, token)
    if found is None:
        raise _unauthenticated("This operator token is not valid.")
    return found


async def _principal(services: Services, key: str) -> Principal:
    async with transaction(services.sessions) as session:
        found = await principals.find(session, services.peppers, key)
        if found is not None and not found.refusal:
            await api_keys.note_use(session, found.tenant_id, found.key_id, services.clock.now())
    if found is None:
        raise _unauthenticated("This API key is not valid.")
    if found.refusal == principals.UNREADABLE:
        message = "The settings of this API key cannot be read now. The operators were told."
        raise PlatformError(found.refusal, ErrorKind.UNAVAILABLE, message)
    if found.refusal:
        refuse = _unauthenticated if found.refusal in _UNAUTHENTICATED_REFUSALS else _forbidden
        raise refuse(_REFUSALS[found.refusal], found.refusal)
    return found


async def _signed_in(services: Services, token: str) -> SignedIn:
    now = services.clock.now()
    async with transaction(services.sessions) as session:
        idle_s = services.settings.control.session_idle_s
        found = await sessions.find(session, token, pepper=services.pepper, now=now, idle_s=idle_s)
        if found is not None and found[1]:
            await sessions.see(session, found[0].id, now)
    if found is None or not await _still_vouched_for(services, found[0], now):
        raise _unauthenticated("Your session is over. Sign in again.", "SESSION_ENDED")
    return found[0]


async def _still_vouched_for(services: Services, signed_in: SignedIn, now: datetime) -> bool:
    """Ask the provider that opened the session for the person's groups again, when they are due."""
    if signed_in.method is not SignInMethod.OIDC:
        return True
    return await provider_sessions.refresh_if_due(
        services.sessions,
        services.identity,
        signed_in.id,
        signed_in.person.id,
        sealing_key=services.sealing_key,
        now=now,
    )


def _check_network(request: Request, principal: Principal) -> None:
    if not principal.allowed_networks:
        return
    host = request.client.host if request.client is not None else ""
    if not networks.contain(principal.allowed_networks, host):
        raise _forbidden("This API key may not be used from this network.", "NETWORK_NOT_ALLOWED")


def check_origin(request: Request, services: Services) -> None:
    """Refuse a change that another site's page asks for with this browser's cookies.

    Raises:
        PlatformError: forbidden, when the browser says that the page is not ours.
    """
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin")
    ours = urlsplit(services.settings.control.public_url).netloc or request.headers.get("host", "")
    if (site is not None and site not in _OWN_PAGES) or (origin is not None and _place(origin) != ours):
        raise _forbidden("This change was asked for by a page of another site.", "FOREIGN_ORIGIN")


def _place(origin: str) -> str | None:
    """The host and port of an origin; None for what is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _check_csrf(request: Request, services: Services, token: str) -> None:
    if request.method in SAFE_METHODS:
        return
    check_origin(request, services)
    given = request.headers.get(CSRF_HEADER, "")
    if not any(sessions.csrf_matches(key, token, given) for key in (services.signing, *services.previous_signing)):
        raise _forbidden("Send the X-CSRF-Token that GET /api/v1/session shows.", "CSRF_TOKEN_WRONG")


def _require_operator(operator: Operator, rule: Rule) -> None:
    if rule.operator is not None and rule.operator not in OPERATOR_PERMISSIONS[operator.role]:
        raise _forbidden(f"Operators with the role {operator.role.value} may not do this ({rule.operator.value}).")


def _require_right(request: Request, rule: Rule, rights: Rights) -> None:
    """Raise not_found to whoever is no member, forbidden to a member without the right."""
    if not rights.any:
        raise not_found(IdKind.TENANT)
    permission = rule.permission
    if permission is None:
        return
    project = request.path_params.get("project_id")
    project_id = parse_id(IdKind.PROJECT, project) if project else None
    held = rights.allow_anywhere(permission) if rule.in_any_project else rights.allow(permission, project_id)
    if not held:
        raise _forbidden(f"Your role does not allow this ({permission.value}).")


def _require_owners_right(rule: Rule, rights: Rights) -> None:
    """Raise forbidden to a key whose owner may not see so much of the tenant."""
    if rule.permission is not None and not rights.allow(rule.permission):
        raise _forbidden(f"The owner of this API key may not see this ({rule.permission.value}).")


def _tenant_of(request: Request) -> UUID:
    return parse_id(IdKind.TENANT, request.path_params.get("tenant_id", ""))


async def _as_operator(services: Services, rule: Rule, token: str) -> Caller:
    operator = await _operator(services, token)
    if rule.caller is not CallerKind.OPERATOR:
        raise _forbidden("An operator token cannot act for a tenant. Use one of the tenant's API keys, or sign in.")
    bind_contextvars(operator_id=operator.id.hex)
    _require_operator(operator, rule)
    return Caller(operator=operator)


async def _as_key(request: Request, services: Services, rule: Rule, key: str) -> Caller:
    principal = await _principal(services, key)
    if rule.caller not in {CallerKind.KEY, CallerKind.MEMBER}:
        raise _forbidden("An API key cannot do this. Sign in, or use an operator token for operators' work.")
    _check_network(request, principal)
    bind_contextvars(tenant_id=principal.tenant_id.hex, key_id=principal.key_id.hex)
    scope = Scope.MANAGE if rule.caller is CallerKind.MEMBER else rule.scope
    if scope is not None and scope not in principal.scopes:
        raise _forbidden(f"This API key lacks the scope {scope.value}.", "SCOPE_MISSING")
    find = api_keys.rights_to_read if rule.caller is CallerKind.KEY else api_keys.rights_of
    async with transaction(services.sessions) as session:
        rights = await find(session, principal.tenant_id, principal.key_id)
    if rule.caller is CallerKind.KEY:
        _require_owners_right(rule, rights)
    else:
        _require_right(request, rule, rights if _tenant_of(request) == principal.tenant_id else Rights())
    return Caller(principal=principal, rights=rights)


async def _as_person(request: Request, services: Services, rule: Rule, token: str) -> Caller:
    signed_in = await _signed_in(services, token)
    _check_csrf(request, services, token)
    person = signed_in.person
    bind_contextvars(person_id=person.id.hex)
    if rule.caller is CallerKind.PERSON:
        return Caller(signed_in=signed_in, token=token)
    if rule.caller is CallerKind.OPERATOR:
        async with transaction(services.sessions) as session:
            operator = await operators.of_person(session, person.id)
        if operator is None or signed_in.only_tenant is not None:
            raise _forbidden("Only operators may do this, and not by the sign-in of one organisation.")
        _require_operator(operator, rule)
        return Caller(operator=operator, signed_in=signed_in, token=token)
    if rule.caller is CallerKind.MEMBER:
        async with transaction(services.sessions) as session:
            tenant_id = _tenant_of(request)
            rights = (
                await members.rights_in(session, tenant_id, person.id) if signed_in.reaches(tenant_id) else Rights()
            )
            _require_right(request, rule, rights)
            if rule.action:
                await closing.require_open(session, _tenant_of(request))
        return Caller(signed_in=signed_in, rights=rights, token=token)
    raise _forbidden("This route is for API keys: send `Authorization: Bearer tg_…`.")


async def authorise(request: Request, rule: Rule) -> Caller:
    """Return who calls, when the rule allows it. A bearer credential goes before the cookie.

    Raises:
        PlatformError: unauthenticated without a valid credential, forbidden with one of the wrong kind, scope or role,
            not_found for a tenant that is not the caller's.
    """
    if rule.caller is CallerKind.PUBLIC:
        return Caller()
    services = services_of(request)
    token = request.cookies.get(COOKIE)
    if token and "authorization" not in request.headers:
        return await _as_person(request, services, rule, token)
    credential = _bearer(request)
    if operators.well_formed(credential):
        return await _as_operator(services, rule, credential)
    if api_keys.well_formed(credential):
        return await _as_key(request, services, rule, credential)
    raise _unauthenticated("This is neither an API key (tg_…) nor an operator token (tgo_…): check for a typo.")


def _too_large(most: int) -> PlatformError:
    return PlatformError("BODY_TOO_LARGE", ErrorKind.TOO_LARGE, f"The body is larger than {most:,} bytes.")


async def _with_bounded_body(request: Request, most: int, *, text: bool) -> Request:
    """Read the body up to the limit, and return a request that has it."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:19]) > most:
        raise _too_large(most)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise _too_large(most)
    if b"%00" in request.scope["query_string"] or (text and _NUL.search(body)):
        raise PlatformError("INVALID_REQUEST", ErrorKind.INVALID, "No text here may have the character U+0000.")
    message: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}

    async def receive() -> Message:
        nonlocal message
        first, message = message, None
        return await request.receive() if first is None else first

    return Request(request.scope, receive)


class GuardedRoute(APIRoute):
    """A route that knows its rule, and asks it before the body is read or any parameter is looked at."""

    body_max_bytes = BODY_MAX_BYTES
    body_is_text = True

    def __init__(self, path: str, endpoint: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(path, endpoint, **kwargs)
        self.rules = {method: rule_of(method, self.path_format) for method in self.methods or ()}
        self.takes_key = any(idempotency.takes_key(self.path_format, rule) for rule in self.rules.values())

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            rule = self.rules[request.method]
            request.state.rule = rule
            caller = request.state.caller = await authorise(request, rule)
            request = await _with_bounded_body(request, self.body_max_bytes, text=self.body_is_text)
            if self.takes_key and HEADER in request.headers:
                return await idempotency.serve(request, services_of(request), caller.actor(""), handle)
            return await handle(request)

        return guarded


class BytesRoute(GuardedRoute):
    """A route whose body is bytes and no text."""

    body_max_bytes = PART_MAX_BYTES
    body_is_text = False
