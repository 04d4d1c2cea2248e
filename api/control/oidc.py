"""Sign-in by an identity provider: to the provider and back, with state, nonce and PKCE kept in a sealed cookie."""

import os
import secrets
from dataclasses import replace
from typing import Annotated
from urllib.parse import urlencode, urlsplit
from uuid import UUID

from fastapi import APIRouter, Query
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, Field
from starlette.responses import Response

from api.deps import IdentityProviderId, ReadSession, Session
from api.errors import request_id_of
from api.guard import COOKIE as SESSION_COOKIE
from api.guard import GuardedRoute
from api.permissions import AUTH
from api.schemas import Output, problems
from api.services import Services
from api.visit import CurrentVisit, Visit
from core.db import transaction
from core.ids import IdKind, format_id
from core.sealing import NONCE_BYTES
from tenants import audit, identities, identity_providers, provider_sessions, sessions
from tenants.errors import not_found
from tenants.oidc import flow
from tenants.oidc.errors import sign_in_refused
from tenants.oidc.flow import Attempt, Profile, Registration
from tenants.types import Actor, ActorKind, SignInMethod

router = APIRouter(route_class=GuardedRoute, tags=["sign-in"])

COOKIE = "tidegate_sign_in"
PATH = f"{AUTH}/oidc"
RETURN_MAX = 512
_DENIALS = frozenset({"access_denied", "login_required", "consent_required", "interaction_required"})


class ProviderShown(Output):
    """A way to sign in. Send the browser to `start_url`, with `?return_to=` a path of ours."""

    id: str
    name: str
    start_url: str


class ProvidersShown(Output):
    """By name."""

    items: list[ProviderShown]


class BackFromProvider(BaseModel):
    """What the provider sends the browser back with. Members of its own beside these mean nothing to us."""

    state: str = Field("", max_length=512)
    code: str = Field("", max_length=4096)
    error: str = Field("", max_length=256)
    iss: str | None = Field(None, max_length=512)


class SignedOut(Output):
    """Send the browser to `redirect_to`, where the provider ends its own session; null when it offers no such place."""

    redirect_to: str | None


def own_path(text: str) -> str:
    """Return `text` when it is a path of this site, else the start page: nobody is sent elsewhere by our word."""
    plain = text.isprintable() and text.startswith("/") and "\\" not in text and len(text) <= RETURN_MAX
    if not plain or text.startswith("//") or urlsplit(text).netloc:
        return "/"
    return text


def _callback_url(services: Services, provider_id: UUID) -> str:
    text = format_id(IdKind.IDENTITY_PROVIDER, provider_id)
    return f"{services.settings.base_url}{PATH}/{text}/callback"


async def _registration(services: Services, provider_id: UUID) -> Registration:
    async with transaction(services.sessions) as session:
        found = await identity_providers.registration(session, provider_id, sealing_key=services.sealing_key)
    if found is None:
        raise not_found(IdKind.IDENTITY_PROVIDER)
    return found


@router.get(f"{AUTH}/providers", summary="List the ways to sign in")
async def list_sign_in_providers(
    session: ReadSession,
    email_domain: Annotated[
        str, Query(max_length=253, description="Also the ways of whoever has such an address.")
    ] = "",
) -> ProvidersShown:
    found = await identity_providers.shown(session, email_domain)
    items = []
    for provider in found:
        text = format_id(IdKind.IDENTITY_PROVIDER, provider.id)
        items.append(ProviderShown(id=text, name=provider.name, start_url=f"{PATH}/{text}/start"))
    return ProvidersShown(items=items)


@router.get(
    f"{PATH}/{{identity_provider_id}}/start",
    status_code=302,
    summary="Begin to sign in by an identity provider",
    response_class=RedirectResponse,
    responses=problems(404, 502, 503),
)
async def start_sign_in(
    identity_provider_id: IdentityProviderId,
    visit: CurrentVisit,
    return_to: Annotated[str, Query(max_length=RETURN_MAX, description="A path of ours to come back to.")] = "/",
) -> Response:
    """Send the browser to the provider."""
    services = visit.services
    registration = await _registration(services, identity_provider_id)
    metadata = await services.identity.metadata(registration.issuer)
    attempt = Attempt(
        provider=identity_provider_id.hex,
        state=secrets.token_urlsafe(24),
        nonce=secrets.token_urlsafe(24),
        verifier=secrets.token_urlsafe(48),
        return_to=own_path(return_to),
        started_s=int(visit.now.timestamp()),
    )
    redirect_uri = _callback_url(services, identity_provider_id)
    answer = RedirectResponse(flow.authorization_url(metadata, registration, attempt, redirect_uri), 302)
    answer.set_cookie(
        COOKIE,
        flow.seal_attempt(services.sealing_key, attempt, os.urandom(NONCE_BYTES)),
        max_age=flow.ATTEMPT_S,
        path=PATH,
        secure=visit.secure,
        httponly=True,
        samesite="lax",
    )
    answer.headers["cache-control"] = "no-store"
    return answer


def _attempt(visit: Visit, provider_id: UUID, state: str) -> Attempt:
    """Return the attempt that this browser began with this provider, when the state is its own."""
    now_s = int(visit.now.timestamp())
    attempt = flow.open_attempt(visit.services.sealing_key, visit.request.cookies.get(COOKIE, ""), now_s)
    same_state = secrets.compare_digest(attempt.state.encode(), state.encode("utf-8", "surrogatepass"))
    if not same_state or attempt.provider != provider_id.hex:
        raise sign_in_refused("this browser did not start it")
    return attempt


@router.get(
    f"{PATH}/{{identity_provider_id}}/callback",
    status_code=303,
    summary="Come back from an identity provider",
    response_class=RedirectResponse,
    responses=problems(401, 403, 404, 409, 502, 503),
)
async def finish_sign_in(
    identity_provider_id: IdentityProviderId,
    visit: CurrentVisit,
    back: Annotated[BackFromProvider, Query()],
) -> Response:
    """Open a session for whom the provider vouches, and send the browser where it wanted to go."""
    services = visit.services
    attempt = _attempt(visit, identity_provider_id, back.state)
    if back.error or not back.code:
        known = back.error in _DENIALS
        raise sign_in_refused(f"the provider says {back.error}" if known else "the provider refused it")
    registration = await _registration(services, identity_provider_id)
    if back.iss is not None and back.iss != registration.issuer:  # RFC 9207: another provider's answer
        raise sign_in_refused("it is the answer of another provider")
    profile = await flow.redeem(
        services.identity,
        registration,
        attempt,
        code=back.code,
        redirect_uri=_callback_url(services, identity_provider_id),
    )
    answer = RedirectResponse(attempt.return_to, 303)
    await _open_session(replace(visit, response=answer), identity_provider_id, profile)
    answer.delete_cookie(COOKIE, path=PATH, secure=visit.secure, httponly=True, samesite="lax")
    answer.headers["cache-control"] = "no-store"
    return answer


async def _open_session(visit: Visit, provider_id: UUID, profile: Profile) -> None:
    """Recognise the person and open the session, in one transaction with its audit record."""
    services, now, pepper = visit.services, visit.now, visit.services.pepper
    async with transaction(services.sessions) as session:
        provider = await identity_providers.get(session, provider_id)
        found = await identities.recognise(session, provider, profile, now=now)
        await sessions.end_token(session, visit.request.cookies.get(SESSION_COOKIE, ""), pepper=pepper, now=now)
        token = await sessions.open_session(
            session,
            found.person.id,
            pepper=pepper,
            now=now,
            absolute_s=services.settings.control.session_absolute_s,
            method=SignInMethod.OIDC,
            provider_id=provider_id,
            second_factor=flow.had_second_factor(profile),
            ip=visit.address,
            user_agent=visit.request.headers.get("user-agent", ""),
        )
        await provider_sessions.keep(
            session,
            token,
            provider_id,
            profile,
            pepper=pepper,
            sealing_key=services.sealing_key,
            settings=services.settings.oidc,
            now=now,
        )
        audit.record(
            session,
            Actor(ActorKind.PERSON, found.person.id, request_id_of(visit.request), visit.address),
            "session.open",
            tenant_id=provider.tenant_id,
            target_id=found.person.id,
            details={
                "method": "oidc",
                "provider": format_id(IdKind.IDENTITY_PROVIDER, provider_id),
                "created": found.created,
                "linked": found.linked,
                **found.changed,
            },
        )
    visit.keep(token)


@router.post(f"{PATH}/sign-out", summary="Sign out here and at the identity provider")
async def sign_out_of_provider(session: Session, visit: CurrentVisit) -> SignedOut:
    """End this session, and say where the provider ends its own (RP-initiated logout), when it offers that."""
    own = visit.caller.own
    redirect_to = await _logout_url(visit.services, own.id, own.provider_id)
    await sessions.end(session, own.id, visit.now)
    visit.act.on(own.id, method=own.method.value)
    visit.forget()
    return SignedOut(redirect_to=redirect_to)


async def _logout_url(services: Services, session_id: UUID, provider_id: UUID | None) -> str | None:
    if provider_id is None:
        return None
    async with transaction(services.sessions) as session:
        hint = await provider_sessions.logout_hint(session, session_id, sealing_key=services.sealing_key)
        registration = await identity_providers.registration(session, provider_id, sealing_key=services.sealing_key)
    if registration is None:
        return None
    endpoint = await services.identity.logout_endpoint(registration.issuer)
    if not endpoint:
        return None
    query = {"client_id": registration.client_id, "post_logout_redirect_uri": f"{services.settings.base_url}/"}
    joiner = "&" if "?" in endpoint else "?"
    return f"{endpoint}{joiner}{urlencode({**query, **({'id_token_hint': hint} if hint else {})})}"
